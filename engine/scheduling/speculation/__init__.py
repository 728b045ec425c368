"""Tokens guessed ahead, for the model to check several of them in one step."""
