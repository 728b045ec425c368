"""Entry of decode and unified nodes."""

from __future__ import annotations

from tandem.engine.config import NodeOptions
from tandem.engine.serving_node import ServingNode
from tandem.kv_connector.node_shell import NodeContext
from tandem.kv_connector.node_shell import run_node as run_shell


def make_logic(context: NodeContext) -> ServingNode:
    """A unified node has no hand-offs and serves every request alone."""
    options = context.options
    scheduler = context.make_scheduler(None)
    max_queue = options.scheduler.max_queue
    if options.role == "unified":
        return ServingNode(context.info, context.book, scheduler, context.pool, max_queue)
    from tandem.decode_node.node import DecodeNode
    from tandem.kv_connector.sink import SinkManager

    sink = SinkManager(context.info, context.keys, context.pool, options, context.is_settled)
    return DecodeNode(context.info, context.book, scheduler, context.pool, max_queue, sink)


def run_node(options: NodeOptions) -> int:
    """Serves until SIGTERM has drained the node; the process's exit code."""
    return run_shell(options, make_logic)
