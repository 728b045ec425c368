"""Pools of nodes that grow and shrink with what a cluster reports (docs/scaling.md)."""
