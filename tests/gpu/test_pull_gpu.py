"""Pulling a prefix between CUDA pools: a node goes on from pulled KV as the holder does from its own. Also where the
other computes it at the same time, and the step's stream waits layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from near_ties import widest_gap
from node_child import NodeChild

import tandem.deploy
from in_process_cluster import BLOCK, FAST, Client, Node, Result, node_options, whole_at_the_end
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.running.graphs.decode_graphs import REPLAYED_TOKENS
from tiny_models import VOCAB, random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, num_logprobs=3)
NUM_ERRORS = 3  # of the dtype: it is measured for one order of additions, and two of our own may each be off by as much
# Behind the prefix: more than a captured step takes, so that the rest is launched layer by layer.
LONG_ENDS = (REPLAYED_TOKENS + 1, REPLAYED_TOKENS + 5 * BLOCK, 900)
PREFIX = 40 * BLOCK
NUM_BLOCKS = 480  # layers of both kinds take several for each
CHUNK = 1024  # tokens of a step: each part of a prompt that two nodes compute is one
TOGETHER = 3 * REPLAYED_TOKENS + 3  # so that the helper's half is launched, and pushed, layer by layer


def make_node(
    role: str, way: str, device_index: int, dtype: str = "auto", model: Path = DEMO, **changes: object
) -> Node:
    where = {"device": DEVICE, "device_index": device_index % max(1, torch.cuda.device_count())}
    options = node_options(role, model, num_blocks=NUM_BLOCKS, transport=way, timeouts=FAST, **where, **changes)
    node = Node(replace(options, model=ModelOptions(str(model), dtype=dtype)))  # type: ignore[arg-type]
    puller = node.process.logic.handoffs.puller  # type: ignore[attr-defined]
    puller.compute_rate = Rate()  # so that it pulls, whatever was measured
    return node


@dataclass
class Asking:
    """Nodes of this process that may pull, and a client of them and of `others`."""

    nodes: list[Node]
    others: list[NodeInfo] = field(default_factory=list)
    num_asked: int = 0

    def __post_init__(self) -> None:
        self.client = Client(*(node.info for node in self.nodes), *self.others)

    def ask(self, prompt: list[int], on: NodeInfo, **options: object) -> Result:
        self.num_asked += 1
        result = self.client.submit(f"r{self.num_asked}", prompt, GREEDY, decode=on, **options)  # type: ignore[arg-type]
        self.client.wait(result)
        assert result.failed is None, result.failed
        return result

    def count(self, node: Node, name: str) -> float:
        return node.process.logic.counters()[name]


@contextmanager
def asking(*nodes: Node, others: tuple[NodeInfo, ...] = ()) -> Iterator[Asking]:
    asked = Asking(list(nodes), list(others))
    with whole_at_the_end(nodes, asked.client):
        yield asked


def check_tokens(prompt: list[int], result: Result, dtype: torch.dtype, model: Path = DEMO) -> None:
    gap, error, index = widest_gap(model, prompt, result.output(), dtype)
    assert gap <= NUM_ERRORS * error, f"token {index} has a gap of {gap:.5f}, the dtype's error is {error:.5f}"


def two_prompts(end: int) -> tuple[list[int], list[int]]:
    """With one prefix, of whole blocks, and an end each."""
    prefix = random_prompt(PREFIX, seed=end, vocab_size=2048)
    first, second = (prefix + random_prompt(end, seed=end + which, vocab_size=2048) for which in (1, 2))
    return first, second


@pytest.mark.parametrize("way", ["local", "tcp"])
def test_pulled_kv_goes_on_as_the_holders_own(way: str) -> None:
    holder, asker = (make_node("unified", way, index) for index in range(2))
    with asking(holder, asker) as asked:
        for length in (5 * BLOCK + 3, 40 * BLOCK):
            prompt = random_prompt(length, seed=length, vocab_size=2048)
            asked.ask(prompt, holder.info)
            hit = asked.ask(prompt, holder.info)
            pulled = asked.ask(prompt, asker.info, holder=holder.info)
            assert pulled.output() == hit.output()
        assert asked.count(asker, "pull_completed") == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_behind_a_pulled_prefix_a_node_computes_what_the_holder_does(dtype: str) -> None:
    """The same end behind the same prefix, pulled from another process, and cached at home: the same kernels get the
    same numbers, so log-probabilities are equal to the last bit."""
    where = {"device": DEVICE, "device_index": 0, "chunk": 0}
    child = NodeChild(("unified",), "cuda_ipc", num_blocks=NUM_BLOCKS, model=str(DEMO), dtype=dtype, **where)
    try:
        (holder,) = child.infos
        asker = make_node("unified", "cuda_ipc", 1, dtype)
        with asking(asker, others=(holder,)) as asked:
            for end in LONG_ENDS:
                first, second = two_prompts(end)
                asked.ask(first, holder)
                pulled = asked.ask(second, asker.info, holder=holder, num_held=PREFIX)
                own = asked.ask(second, holder)
                assert own.num_reused_tokens == pulled.num_reused_tokens == PREFIX
                assert pulled.output() == own.output()
                assert pulled.logprobs == own.logprobs
                check_tokens(second, pulled, getattr(torch, dtype))
            assert asked.count(asker, "pull_completed") == len(LONG_ENDS)
            assert asked.count(asker, "sink_digest_mismatches") == 0
    finally:
        child.stop()


def test_wrong_bytes_are_sent_again() -> None:
    holder, asker = make_node("unified", "tcp", 0, fault_injection="corrupt:1"), make_node("unified", "tcp", 1)
    with asking(holder, asker) as asked:
        first, second = two_prompts(LONG_ENDS[0])
        asked.ask(first, holder.info)
        pulled = asked.ask(second, asker.info, holder=holder.info, num_held=PREFIX)
        check_tokens(second, pulled, torch.bfloat16)
        assert asked.count(asker, "sink_digest_mismatches") >= 1
        assert asked.count(asker, "pull_completed") == 1, "sent again"


def test_what_was_pulled_is_handed_on() -> None:
    decode = make_node("decode", "local", 1)
    one, two = (make_node("prefill", "local", index) for index in range(2))
    with asking(decode, one, two) as asked:
        first, second = two_prompts(LONG_ENDS[1])
        asked.ask(first, decode.info, prefill=one.info)
        asked.ask(first[:BLOCK], decode.info, prefill=two.info)  # a node that claims at once: it knows the decode node
        handed = asked.ask(second, decode.info, prefill=two.info, holder=one.info, num_held=PREFIX)
        check_tokens(second, handed, torch.bfloat16)
        assert asked.count(two, "pull_completed") == 1
        assert asked.count(decode, "sink_commits") == 3


def start_helper(faults: str, dtype: str, model: Path = DEMO) -> NodeChild:
    where = {"device": DEVICE, "device_index": 0, "chunk": CHUNK}
    return NodeChild(("unified",), "cuda_ipc", faults, num_blocks=NUM_BLOCKS, model=str(model), dtype=dtype, **where)


@pytest.mark.parametrize(("kind", "dtype"), [("demo", "bfloat16"), ("demo", "float32"), ("qwen2_hybrid", "float32")])
def test_two_gpus_compute_a_prompt(kind: str, dtype: str) -> None:
    """The helper's pushes are held up, so that the prompt's end begins before its beginning is there. Also where layers
    that slide have blocks of their own."""
    model = DEMO if kind == "demo" else tiny_model(kind)
    child = start_helper("delay:0.3", dtype, model)
    try:
        asker = make_node("unified", "cuda_ipc", 1, dtype, model, chunk=CHUNK)
        assert (asker.process.pool.windows.num_each > 0) == (kind == "qwen2_hybrid")
        with asking(asker, others=tuple(child.infos)) as asked:
            for turn, length in enumerate((TOGETHER, TOGETHER + 5 * BLOCK)):
                prompt = random_prompt(length, seed=length, vocab_size=2048 if kind == "demo" else VOCAB)
                check_tokens(prompt, asked.ask(prompt, asker.info, helpers=child.infos), getattr(torch, dtype), model)
                assert (asked.count(asker, "shared_begun"), asked.count(asker, "shared_failed")) == (turn + 1, 0)
            assert asked.count(asker, "sink_digest_mismatches") == 0
    finally:
        child.stop()


def test_a_helper_dies_and_the_node_serves_on() -> None:
    child = start_helper("delay:0.3,die:2", "bfloat16")
    try:
        asker = make_node("unified", "cuda_ipc", 1, "bfloat16", chunk=CHUNK)
        with asking(asker, others=tuple(child.infos)) as asked:
            prompt = random_prompt(TOGETHER, seed=1, vocab_size=2048)
            sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            result = asked.client.submit("hurt", prompt, sampling, decode=asker.info, helpers=child.infos)
            asked.client.wait(result)
            assert child.process.wait(60) < 0, "the fault did not strike: this test shows nothing"
            if result.failed is None:
                check_tokens(prompt, result, torch.bfloat16)
            else:
                assert (result.failed.code, result.failed.retryable, result.tokens) == ("help_lost", True, {})
            check_tokens(prompt, asked.ask(prompt, asker.info), torch.bfloat16)
    finally:
        child.stop()
