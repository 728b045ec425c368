"""A prefill and a decode node in one process with a client of both, and the single node that they must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from in_process_cluster import Client, Node, Result, node_options
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.kv_connector.transports.links.nixl_agent import nixl_problem
from tiny_models import random_prompt, tiny_model

NIXL = pytest.param("nixl", marks=pytest.mark.skipif(bool(nixl_problem()), reason=nixl_problem()))
WAYS = ("shm", NIXL, "tcp", "local")
# Of what has nothing to do with how bytes are copied: two of the four in `make test`.
TWO_WAYS = (
    "shm",
    pytest.param("nixl", marks=(*NIXL.marks, pytest.mark.slow)),
    "tcp",
    pytest.param("local", marks=pytest.mark.slow),
)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=24,
    temperature=0.9,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=20_240,
    ignore_eos=True,
)


def changed(sampling: SamplingParams, **fields: object) -> SamplingParams:
    return SamplingParams(**{**{name: getattr(sampling, name) for name in sampling.__struct_fields__}, **fields})


@dataclass
class Pair:
    """A decode node, a prefill node, and a client of both."""

    decode: Node
    prefill: Node
    client: Client
    _names: Iterator[str] = field(default_factory=lambda: (f"r{i}" for i in range(10**6)))

    def submit(self, prompt: list[int], sampling: SamplingParams, name: str = "", **options: object) -> Result:
        name = name or next(self._names)
        return self.client.submit(
            name,
            prompt,
            sampling,
            decode=self.decode.info,
            prefill=self.prefill.info,
            **options,  # type: ignore[arg-type]
        )

    def cancel(self, result: Result) -> None:
        self.client.cancel(*self.client.key_of(result), self.decode.info, self.prefill.info)

    def run(self, prompt: list[int], sampling: SamplingParams, **options: object) -> Result:
        result = self.submit(prompt, sampling, **options)
        self.client.wait(result)
        return result

    def run_alone(self, prompt: list[int], sampling: SamplingParams, **options: object) -> Result:
        """By the decode node, which computes the prompt itself."""
        name, alone = next(self._names), self.decode.info
        result = self.client.submit(name, prompt, sampling, decode=alone, **options)  # type: ignore[arg-type]
        self.client.wait(result)
        return result

    def check_samples(self, prompt: list[int], sampling: SamplingParams) -> None:
        """Three samples of a prompt are the same whether the prefill node computes it or not."""
        samples = (0, 1, 2)
        both = [run(prompt, sampling, samples=samples) for run in (self.run, self.run_alone)]
        outputs = [[result.output(sample) for sample in samples] for result in both]
        assert outputs[0] == outputs[1]

    def until(self, condition: Callable[[], bool]) -> None:
        self.client.until(condition)

    @property
    def sink(self):  # type: ignore[no-untyped-def]
        return self.decode.process.logic.handoffs.sink.counters  # type: ignore[attr-defined]

    @property
    def source(self):  # type: ignore[no-untyped-def]
        return self.prefill.process.logic.handoffs.source.counters  # type: ignore[attr-defined]

    @property
    def pushed_bytes(self) -> float:
        return self.prefill.process.transfer.counters["kv_pushed_bytes"]

    def renew_client(self) -> None:
        """The next test's results are its own."""
        self.client.close()
        self.client = Client(self.decode.info, self.prefill.info)

    def check_whole(self) -> None:
        """Nothing is held, nobody waits, on either side."""
        for node in (self.decode, self.prefill):
            pool, logic = node.process.pool, node.process.logic
            self.until(lambda pool=pool: pool.num_free == pool.num_blocks)  # type: ignore[misc]
            self.until(lambda logic=logic: logic.is_empty)  # type: ignore[misc]


@contextmanager
def make_pair(
    way: str, *, model: Path | None = None, decode: dict | None = None, prefill: dict | None = None
) -> Iterator[Pair]:
    """Both nodes with `model` (the tiny llama); `decode` and `prefill`: options of in_process_cluster.node_options."""
    model = model or tiny_model("llama")
    nodes = []
    for role, options in (("decode", decode or {}), ("prefill", prefill or {})):
        nodes.append(Node(node_options(role, model, transport=way, **options)))
    pair = Pair(nodes[0], nodes[1], Client(*(node.info for node in nodes)))
    try:
        yield pair
    finally:
        pair.client.close()
        for node in reversed(nodes):
            node.stop()


def run_both_ways(
    model: Path, lengths: tuple[int, ...], adapter: AdapterRef | None = None
) -> list[tuple[list[int], list[int]]]:
    """Random prompts of these lengths, each with its greedy output once split over two nodes and once by one; with
    `adapter` after that the same again, without it."""
    more = {} if adapter is None else {"lora": LoraOptions(True, max_loras=2, max_lora_rank=8)}
    options = {"num_blocks": 64, **more}
    with make_pair("local", model=model, decode=options, prefill={**options, "chunk": 64}) as pair:
        results = []
        for taken in (adapter, None)[: 1 if adapter is None else 2]:
            for length in lengths:
                prompt, name = random_prompt(length, seed=length), f"alone{length}{'' if taken is None else 'adapted'}"
                results.append((prompt, pair.submit(prompt, GREEDY, adapter=taken)))
                alone = pair.client.submit(name, prompt, GREEDY, decode=pair.decode.info, adapter=taken)
                results.append((prompt, alone))
        pair.client.wait()
        for _, result in results:
            assert result.failed is None, result.failed
        pair.check_whole()
    return [(prompt, result.output()) for prompt, result in results]


@dataclass
class Alone:
    """What one node makes of a request: the expectation that split serving must meet, made once."""

    node: Node
    _made: dict[tuple, list[list[int]]] = field(default_factory=dict)

    def run(self, prompt: list[int], sampling: SamplingParams, samples: tuple[int, ...] = (0,)) -> list[list[int]]:
        key = (*prompt, repr(sampling), samples)
        if key not in self._made:
            self._made[key] = self._run(f"alone{len(self._made)}", prompt, sampling, samples)
        return self._made[key]

    def _run(self, name: str, prompt: list[int], sampling: SamplingParams, samples: tuple[int, ...]) -> list[list[int]]:
        client = Client(self.node.info)
        try:
            result = client.submit(name, prompt, sampling, decode=self.node.info, samples=samples)
            client.wait(result)
        finally:
            client.close()
        assert result.failed is None, result.failed
        return [result.output(sample) for sample in samples]
