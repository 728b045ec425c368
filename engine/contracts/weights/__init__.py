"""How checkpoints say what their weights are."""
