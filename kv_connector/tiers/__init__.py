"""Tiers of a node's prefix cache below its device pool: host memory, disk."""
