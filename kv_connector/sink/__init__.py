"""The node that wants KV: tickets, grants, commits, decided without I/O."""
