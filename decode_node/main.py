"""Entry of decode and unified nodes."""

from __future__ import annotations

from tandem.decode_node.node import DecodeNode
from tandem.engine.config import NodeOptions
from tandem.engine.serving_node import ServingNode
from tandem.kv_connector.node_context import NodeContext
from tandem.kv_connector.node_shell import run_node as run_shell


def make_logic(context: NodeContext) -> ServingNode:
    """A unified node is a decode node that routers give whole requests; it takes over running ones like any other."""
    return context.make_node(DecodeNode, pushes_prompts=False)


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node; the process's exit code."""
    return run_shell(options, make_logic)
