"""What every process knows: configuration, errors, hashes, messages. No torch, no sockets."""
