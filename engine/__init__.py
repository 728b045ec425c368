"""What every node shares: scheduler, block pool, model, runner, sampler, messages."""
