"""Nodes in a process of their own, for faults that take the whole process along.

Start them with `NodeChild(...)` from the test; the child runs this same file as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
from waiting import PATIENCE_S

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.collector import collect_rarely


class NodeChild:
    """`addresses`: where the child's nodes take control connections, one for each of `roles`; `infos`: what they say
    of themselves. `num_ranks` processes make a node. `model`: a tiny one's name, or a folder; `dtype` of its weights;
    `changes` of the options, as `node_options` takes them; `faults` among them are those of failing_ranks.py,
    `always_loads`: its tiers load whatever they have, `measures`: whether it measures steps at its start, on whatever
    device, and `hold_after`: each takes so many steps, and no more."""

    def __init__(
        self,
        roles: tuple[str, ...],
        transport: str,
        fault_injection: str = "",
        num_blocks: int = 256,
        num_ranks: int = 1,
        model: str = "llama",
        dtype: str = "auto",
        **changes: object,
    ) -> None:
        sizes = {"num_blocks": num_blocks, "tensor_parallel_size": num_ranks, "chunk": 64, **changes}
        rest = [fault_injection, model, dtype, json.dumps(sizes)]
        command = [sys.executable, __file__, ",".join(roles), transport, *rest]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child ended before its nodes were up"
        self.infos = [msgspec.msgpack.decode(bytes.fromhex(info), type=NodeInfo) for info in json.loads(line)]
        self.addresses = tuple(info.control_address for info in self.infos)

    def drain(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("drain\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Ends it if it still lives."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _serve(roles: str, transport: str, fault_injection: str, model: str, dtype: str, changes: str) -> None:
    """Until stdin is closed: a child doesn't outlive its test."""
    collect_rarely()
    from failing_ranks import lose_memory_in_node
    from tier_nodes import always_loading

    from in_process_cluster import Node, node_options
    from tiny_models import tiny_model

    nodes, sizes = [], json.loads(changes)
    if faults := sizes.pop("faults", None):
        lose_memory_in_node(faults)
    if (measures := sizes.pop("measures", None)) is not None:
        _measure_at_start(measures)
    always_loads, num_steps = sizes.pop("always_loads", False), sizes.pop("hold_after", None)
    folder, impl = Path(model) if "/" in model else tiny_model(model), sizes.pop("model_impl", "auto")
    for role in roles.split(","):
        fault = fault_injection if role == "prefill" or "prefill" not in roles else ""
        options = node_options(role, folder, transport=transport, fault_injection=fault, **sizes)
        nodes.append(Node(replace(options, model=ModelOptions(str(folder), dtype=dtype, model_impl=impl))))  # type: ignore[arg-type]
        if always_loads:
            always_loading(nodes[-1])
        if num_steps is not None:
            nodes[-1].hold_after(num_steps)
    print(json.dumps([msgspec.msgpack.encode(node.info).hex() for node in nodes]), flush=True)
    closed = threading.Event()

    def read() -> None:
        for _ in sys.stdin:
            for node in nodes:
                node.process.loop.begin_drain()
        closed.set()

    threading.Thread(target=read, daemon=True).start()
    closed.wait()
    os._exit(0)


def _measure_at_start(measures: bool) -> None:
    """Has the nodes of this process measure what they would measure on a GPU, before they start, or nothing."""
    import torch

    from tandem.node import process
    from tandem.node.setup import measures_steps

    start = process.NodeProcess.start

    def measure_and_start(node: process.NodeProcess) -> None:
        if measures and node.loaded.device.type == "cpu":  # others have warmed up
            node.warm_up()
        assert node.logic.scheduler.state.step_times.are_measured == measures
        start(node)

    process.measures_steps = lambda options, _: measures and measures_steps(options, torch.device("cuda"))
    process.NodeProcess.start = measure_and_start  # type: ignore[method-assign]


if __name__ == "__main__":
    _serve(*sys.argv[1:])
