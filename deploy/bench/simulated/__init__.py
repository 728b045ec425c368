"""Clusters in virtual time: the product's pure cores decide, nodes only take time (docs/simulator.md)."""
