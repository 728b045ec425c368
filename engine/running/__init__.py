"""The device side of a step: inputs, forward pass, sampling, results."""
