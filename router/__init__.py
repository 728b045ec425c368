"""The front door: HTTP, tokens, placement, the life of one request across nodes."""
