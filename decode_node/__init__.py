"""KV to tokens: reservations, commit of received KV, token streams."""
