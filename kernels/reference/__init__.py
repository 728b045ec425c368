"""Eager twins of the kernels, written for reading. Tests compare against these."""
