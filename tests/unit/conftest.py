"""Fixtures that several unit tests use."""

from __future__ import annotations

from kv_pools import make_node, make_pair
from router_nodes import folder, node, nodes

__all__ = ["folder", "make_node", "make_pair", "node", "nodes"]
