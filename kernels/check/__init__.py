"""Cases with work and error: self-test, benchmarks, counts of late compilations."""
