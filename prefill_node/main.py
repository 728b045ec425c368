"""Entry of prefill nodes."""

from __future__ import annotations

from tandem.engine.config import NodeOptions
from tandem.engine.serving_node import ServingNode
from tandem.kv_connector.node_shell import NodeContext
from tandem.kv_connector.node_shell import run_node as run_shell
from tandem.kv_connector.source import SourceManager
from tandem.prefill_node.node import PrefillNode


def make_logic(context: NodeContext) -> ServingNode:
    options = context.options
    source = SourceManager(context.info, context.keys, context.pool, options)
    scheduler = context.make_scheduler(source)
    return PrefillNode(context.info, context.book, scheduler, context.pool, options.scheduler.max_queue, source)


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node; the process's exit code."""
    return run_shell(options, make_logic)
