"""Grammars that output is held to: compiled for the model's tokenizer, followed token by token."""
