"""Kernels of adapters of low rank: of decode rows, of prompts' tiles, and their launches."""
