"""Prefill attention: the general kernel, and one for Hopper."""
