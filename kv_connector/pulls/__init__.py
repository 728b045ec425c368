"""Pulls: prefixes fetched from peers that have them cached, the side that asks and the side that answers. Pure."""
