"""Byte layouts of KV blocks, and the conversion of one node's blocks into another's."""
