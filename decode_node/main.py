"""Entry of decode and unified nodes."""

from __future__ import annotations

from tandem.decode_node.node import DecodeNode
from tandem.engine.contracts.config import NodeOptions
from tandem.node.context import NodeContext
from tandem.node.process import run_node as run_shell
from tandem.node.serving import ServingNode


def make_logic(context: NodeContext) -> ServingNode:
    """Makes the logic of a decode node or a unified node, which is a decode node that computes for others, too."""
    return context.make_node(DecodeNode, pushes_prompts=context.options.role == "unified")


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node. Returns the process's exit code."""
    return run_shell(options, make_logic)
