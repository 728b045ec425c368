"""Low-rank adapters (LoRA): read from files, kept in host memory, in slots on the device."""
