"""Entry of prefill nodes."""

from __future__ import annotations

from tandem.engine.config import NodeOptions
from tandem.engine.serving_node import ServingNode
from tandem.kv_connector.node_context import NodeContext
from tandem.kv_connector.node_shell import run_node as run_shell
from tandem.prefill_node.node import PrefillNode


def make_logic(context: NodeContext) -> ServingNode:
    return context.make_node(PrefillNode, pushes_prompts=True)


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node; the process's exit code."""
    return run_shell(options, make_logic)
