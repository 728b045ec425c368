"""Tandem from Python: `LLM` and `AsyncLLM` over a server of their own, or over one that runs somewhere."""
