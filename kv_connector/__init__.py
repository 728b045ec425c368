"""Moves and finds KV blocks: connector contract, transports, Redis directory."""
