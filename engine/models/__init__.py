"""Decoder models in plain PyTorch over the attention API of tandem.kernels."""
