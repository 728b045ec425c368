"""The nodes of a router: links, discovery, what was sent and not answered."""
