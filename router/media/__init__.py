"""Images and sounds of conversations: found, fetched, decoded within limits, and made what the model takes."""
