"""KV of 16 bits beside a pool of fp8."""
