"""Sampling without a sort."""
