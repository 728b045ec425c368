"""The groups of layers that move together. Pure."""

from __future__ import annotations

from tandem.engine.contracts.kv_layout import LAYERS_TOGETHER

# A load under a forward pass goes in so many groups: few launches, and the first layers don't wait for the last.
LAYER_GROUPS = 8  # a guess


def layer_groups(num_layers: int) -> list[range]:
    """The groups in which layers are loaded: a forward pass waits for each as a whole."""
    size = -(-num_layers // LAYER_GROUPS)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


def push_groups(num_layers: int) -> list[range]:
    """The groups in which layers are pushed while a prompt is computed. The last layer goes alone: nothing is computed
    behind it, and the end of the hand-off waits for it. Prompts' graphs end where these do."""
    last = num_layers - 1
    groups = [range(first, min(first + LAYERS_TOGETHER, last)) for first in range(0, last, LAYERS_TOGETHER)]
    return [*groups, range(last, num_layers)]
