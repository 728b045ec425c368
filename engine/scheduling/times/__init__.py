"""How long steps take, and what they may have for it."""
