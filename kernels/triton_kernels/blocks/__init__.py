"""Stores, copies, moves and sums of KV blocks."""
