"""The node that has KV: its hand-offs, decided without I/O."""
