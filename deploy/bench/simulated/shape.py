"""What a simulated cluster is made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.deploy.bench.simulated.costs import CostModel
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets


@dataclass(frozen=True)
class ClusterShape:
    """What is simulated: the nodes' numbers, memory and speed, and the router processes before them."""

    num_nodes: int  # that do all work
    gpu_tokens: int  # of KV, a node
    host_tokens: int
    num_routers: int = 1
    costs: CostModel = field(default_factory=CostModel)
    targets: Targets = NO_TARGETS  # that the nodes keep
    most_nodes: int = 4  # that compute one prompt, where the placement is elastic
    num_prefill: int = 0
    num_decode: int = 0
    keeps_once: bool = False  # whether nodes leave to others what those keep
    leans: bool = False  # whether those of both roles do all work, and are for that of their role first

    @property
    def roles(self) -> list[str]:
        """One for each node."""
        return ["unified" if self.leans else each for each in self.starting_roles]

    @property
    def starting_roles(self) -> list[str]:
        """One for each node: "prefill" and "decode" are what it leans to where nodes lean."""
        return ["unified"] * self.num_nodes + ["prefill"] * self.num_prefill + ["decode"] * self.num_decode


def read_counts(text: str) -> tuple[int, int, int]:
    """The nodes that do all work, prefill and decode nodes of "4" or "2+2". Raises ConfigError for anything else."""
    parts = text.split("+")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"--simulate {text}: name a number of nodes, or prefill and decode nodes as in 2+2")
    numbers = [int(part) for part in parts]
    return (numbers[0], 0, 0) if len(numbers) == 1 else (0, numbers[0], numbers[1])
