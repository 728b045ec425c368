"""The device side of heads that guess."""
