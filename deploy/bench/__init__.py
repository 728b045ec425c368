"""`tandem bench`: load generators, traces, simulated clusters."""
