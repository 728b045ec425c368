"""Fixtures that several unit tests use."""

from __future__ import annotations

from router_nodes import folder, nodes

__all__ = ["folder", "nodes"]
