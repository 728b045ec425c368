"""Prefixes fetched from peers that have them cached: who asks, who answers. Pure."""
