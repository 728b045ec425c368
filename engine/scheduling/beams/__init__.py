"""Beam search on a node: the search itself, and the sequences that carry its beams."""
