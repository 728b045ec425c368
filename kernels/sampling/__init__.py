"""Tokens from logits, and the inputs of the decode step that they feed."""
