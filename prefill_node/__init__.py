"""Prompt to KV and first token: admission order, hand-off of finished prompts."""
