"""Transports between hosts: one authenticated socket for each pair of nodes."""
