"""A node's ZMQ thread: connections to peers, their liveness, and the messages that come and go."""
