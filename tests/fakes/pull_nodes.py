"""Real nodes that may pull from each other, one client of all of them, and what a node alone would answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import zmq
from tiny_hf_models import FAMILIES, tiny_hf_model
from waiting import PATIENCE_S

from in_process_cluster import FAST, Client, Node, Result, node_options, whole_at_the_end
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Welcome
from tandem.engine.contracts.wire.parts import NodeInfo
from tiny_models import check_greedy, tiny_model


@dataclass
class Nodes:
    nodes: list[Node]
    client: Client
    sampling: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    )
    model: str = "llama"
    _names: Iterator[int] = field(default_factory=itertools.count)

    def submit(
        self,
        prompt: list[int],
        on: int,
        prefill: int | None = None,
        holder: int | None = None,
        holder_info: NodeInfo | None = None,
        salt: bytes = b"",
        helpers: Sequence[int] = (),
        helper_infos: Sequence[NodeInfo] = (),
    ) -> Result:
        """On node `on`, its prompt on `prefill`, whichever of them computes it pulling from the holder, or with the
        help of others."""
        infos = [node.info for node in self.nodes]
        return self.client.submit(
            f"r{next(self._names)}",
            prompt,
            self.sampling,
            decode=infos[on],
            prefill=None if prefill is None else infos[prefill],
            holder=holder_info if holder is None else infos[holder],
            salt=salt,
            helpers=[*helper_infos, *(infos[node] for node in helpers)],
        )

    def check(self, result: Result, prompt: list[int]) -> Result:
        assert result.failed is None, result.failed
        check_greedy(folder_of(self.model), prompt, result.output(), self.sampling.max_tokens)
        return result

    def ask(self, prompt: list[int], on: int, **options: object) -> Result:
        """Waits for its end, and checks its tokens."""
        result = self.submit(prompt, on, **options)  # type: ignore[arg-type]
        self.client.wait(result)
        return self.check(result, prompt)

    def cancel(self, result: Result, on: int) -> None:
        self.client.cancel(*self.client.key_of(result), self.nodes[on].info)

    def count(self, node: int, name: str) -> float:
        return self.nodes[node].process.logic.counters()[name]

    def until(self, condition: Callable[[], bool]) -> None:
        self.client.until(condition)


def folder_of(model: str) -> Path:
    """The folder of a kind of tiny_models.py, or of a family of tiny_hf_models.py."""
    return tiny_hf_model(model) if model in FAMILIES else tiny_model(model)


@contextmanager
def make_nodes(
    *roles: str,
    changes: dict[int, dict[str, object]] | None = None,
    pull_s: float = FAST.pull_s,
    model: str = "llama",
    **common: object,
) -> Iterator[Nodes]:
    """One node a role; `changes` of node_options by index, `common` to all. All of them pull whatever the rates say.
    At the end nothing is held anywhere."""
    common = {"timeouts": replace(FAST, pull_s=pull_s), **common}
    options = [
        node_options(role, folder_of(model), **{**common, **(changes or {}).get(index, {})})
        for index, role in enumerate(roles)
    ]
    nodes = [Node(each) for each in options]
    for node in nodes:
        node.process.logic.handoffs.puller.compute_rate = Rate()  # type: ignore[attr-defined]
    client = Client(*(node.info for node in nodes))
    with whole_at_the_end(nodes, client):
        yield Nodes(nodes, client, model=model)


def greet(address: str) -> NodeInfo:
    """Who serves there."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(address)
        info = NodeInfo(node_id="asks-who", epoch=1, role="router")
        socket.send(codec.encode(Hello(wire_version=WIRE_VERSION, info=info)))
        assert socket.poll(int(PATIENCE_S * 1000)), "nobody answers"
        welcome = codec.decode_from_node(socket.recv())
        assert isinstance(welcome, Welcome)
        return welcome.info
    finally:
        socket.close()
        context.term()
