"""A node's ZMQ thread: who is there, and what comes and goes."""
