"""Whole blocks of KV: copies, moves, digests, fp8."""
