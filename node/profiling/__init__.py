"""Profiles: where the time of steps goes, measured while a node serves."""
