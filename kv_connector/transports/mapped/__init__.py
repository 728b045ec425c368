"""Transports within a host: the source maps the sink's pool and stores into it."""
