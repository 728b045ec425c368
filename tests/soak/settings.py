"""The clusters that campaigns hurt."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from campaign import KINDS
from wall_clock import find_compiler

# Of each channel's writes; and nodes that refuse what they can't hold.
FAULTS = ("--fault-injection", "delay:0.001,corrupt:5,drop:9,duplicate:12", "--max-queue", "3")
# Nobody is ever in time, so that work goes to and fro.
HURRIED = ("--ttft-target-ms", "20", "--tpot-target-ms", "1")
# Each write takes a while, so that a prompt is several nodes' for long enough to be hurt in the middle.
SHARED = ("--prefill-nodes-per-prompt", "3", "--prefill-shared-tokens", "256", "--fault-injection", "delay:0.02")
SETTINGS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp", "prefill": 2},
    "tcp, bad channels": {"transport": "tcp", "arguments": FAULTS},
    "nixl": {"transport": "nixl"},
    "nodes that do all work": {"transport": "shm", "elastic": 3, "arguments": HURRIED},
    "prompts by several nodes": {"transport": "shm", "elastic": 3, "arguments": (*HURRIED, *SHARED), "salted": 0.8},
    "nodes that lean": {"transport": "tcp", "prefill": 2, "arguments": ("--no-fixed-roles", *HURRIED)},
    "blocks kept once": {"transport": "shm", "prefill": 2, "arguments": ("--keep-kv-once",)},
    "layers that slide": {"transport": "shm", "prefill": 2, "change": "slide"},
    "nodes that share experts": {"transport": "shm", "decode": 1, "change": "experts", "in_group": 2},
    "one node": {"transport": "local"},
}


def missing(setting: str) -> str:
    """What this machine lacks for it, or nothing."""
    if SETTINGS[setting]["transport"] == "nixl" and find_spec("nixl_cu13") is None and find_spec("nixl_cu12") is None:
        return "the package nixl is not installed"
    return ""


def possible_kinds() -> tuple[str, ...]:
    return tuple(kind for kind in KINDS if kind != "clock" or find_compiler() is not None)
