"""The groups of layers that move together. Pure."""

from __future__ import annotations

# A load under a forward pass goes in so many groups: few launches, and the first layers don't wait for the last.
LAYER_GROUPS = 8  # a guess


def layer_groups(num_layers: int) -> list[range]:
    """The groups in which layers are loaded: a forward pass waits for each as a whole."""
    size = -(-num_layers // LAYER_GROUPS)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
