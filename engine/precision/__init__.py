"""What a quantised KV cache loses: scales measured, errors sampled."""
