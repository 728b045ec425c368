"""Heads that guess tokens from a model's hidden states."""
