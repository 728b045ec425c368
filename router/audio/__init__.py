"""Sound in requests: uploads, samples, what an encoder hears, and transcripts."""
