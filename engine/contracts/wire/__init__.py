"""Messages of the control sockets."""
