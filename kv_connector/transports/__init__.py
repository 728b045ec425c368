"""Transports that move KV blocks between nodes: within a process, within a host (mapped/), over sockets (links/)."""
