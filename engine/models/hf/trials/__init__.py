"""The trial that a model of transformers stands before it serves."""
