"""Who computes how many tokens in the next step, and what became of the last one. Pure."""
