"""The newest requests of a router process, and what happened to each. Pure."""
