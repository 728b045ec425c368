"""What isn't text in prompts: encoded once, put in the place of token embeddings."""
