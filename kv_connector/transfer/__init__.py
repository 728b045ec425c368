"""The transfer thread: pushes, digests, checks; and the layer hooks that feed it."""
