"""Paged decode attention and the inputs of a decode step."""
