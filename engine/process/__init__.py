"""What every process has: its log, its descriptors, watched threads, a pipe to its launcher."""
