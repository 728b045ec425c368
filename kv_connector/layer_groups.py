"""Layers that come together where a forward pass waits for them. Pure."""

from __future__ import annotations

LAYER_GROUPS = 8  # of a load under a forward pass: few launches, and the first layers don't wait for the last


def layer_groups(num_layers: int) -> list[range]:
    size = -(-num_layers // LAYER_GROUPS)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
