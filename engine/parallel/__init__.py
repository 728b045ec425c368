"""One node over several GPUs: a process a rank, weights and KV heads shared out, steps in lockstep."""
