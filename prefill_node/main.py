"""Entry of prefill nodes."""

from __future__ import annotations

from tandem.engine.contracts.config import NodeOptions
from tandem.node.context import NodeContext
from tandem.node.process import run_node as run_shell
from tandem.node.serving import ServingNode
from tandem.prefill_node.node import PrefillNode


def make_logic(context: NodeContext) -> ServingNode:
    return context.make_node(PrefillNode, pushes_prompts=True)


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node. Returns the process's exit code."""
    return run_shell(options, make_logic)
