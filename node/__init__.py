"""The process around an engine and its connector: loop, control sockets, ranks, requests."""
