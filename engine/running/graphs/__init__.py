"""Steps as CUDA graphs: those of a token a row, and those with prompts."""
