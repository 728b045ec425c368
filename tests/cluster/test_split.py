"""Split serving, end to end with real nodes in one process: what a request may meet on its way, and what is left after.

Every test ends with both pools whole. Nodes are shared by way; tests that need a fault or a small pool make their own.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import torch
import zmq

from in_process_cluster import BLOCK, Client, Node, Result, node_options
from tandem.engine import messages as wire
from tandem.engine.config import Timeouts
from tandem.engine.messages import (
    Cancel,
    Hello,
    KVClaim,
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVReady,
    KVRefused,
    PeerRef,
    Submit,
    Welcome,
)
from tandem.engine.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

WAYS = ("shm", "tcp", "local")
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

    def key_of(self, result: Result) -> tuple[str, int]:
        return next(key for key, known in self.client.results.items() if known is result)

    def cancel(self, result: Result) -> None:
        self.client.cancel(*self.key_of(result), self.decode.info, self.prefill.info)

    def run(self, prompt: list[int], sampling: SamplingParams, **options: object) -> Result:
        result = self.submit(prompt, sampling, **options)
        self.client.wait(result)
        return result

    def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.client.poll(0.005)

    @property
    def sink(self):  # type: ignore[no-untyped-def]
        return self.decode.process.logic.sink.counters  # type: ignore[attr-defined]

    @property
    def source(self):  # type: ignore[no-untyped-def]
        return self.prefill.process.logic.source.counters  # type: ignore[attr-defined]

    @property
    def pushed_bytes(self) -> float:
        return self.prefill.process.transfer.counters["kv_pushed_bytes"]

    def renew_client(self) -> None:
        """A client that said nothing while other tests ran counts as lost."""
        self.client.close()
        self.client = Client(self.decode.info, self.prefill.info)

    def check_whole(self) -> None:
        """Nothing is held, nobody waits, on either side."""
        for node in (self.decode, self.prefill):
            pool, logic = node.process.pool, node.process.logic
            self.until(lambda pool=pool: pool.num_free == pool.num_blocks)  # type: ignore[misc]
            self.until(lambda logic=logic: logic.is_empty)  # type: ignore[misc]


@contextmanager
def make_pair(way: str, *, decode: dict | None = None, prefill: dict | None = None) -> Iterator[Pair]:
    """Both nodes with the tiny llama; `decode` and `prefill` are options of in_process_cluster.node_options."""
    model = tiny_model("llama")
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


@pytest.fixture(scope="module")
def pairs() -> Iterator[dict[str, Pair]]:
    with make_pair("shm") as shm, make_pair("tcp") as tcp, make_pair("local") as local:
        yield {"shm": shm, "tcp": tcp, "local": local}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Iterator[Pair]:
    pairs[request.param].renew_client()
    yield pairs[request.param]
    pairs[request.param].check_whole()


@pytest.fixture
def shm(pairs: dict[str, Pair]) -> Iterator[Pair]:
    pairs["shm"].renew_client()
    yield pairs["shm"]
    pairs["shm"].check_whole()


@dataclass
class Alone:
    """What one node makes of a request: the expectation that split serving must meet."""

    node: Node
    _count: int = 0

    def run(self, prompt: list[int], sampling: SamplingParams, samples: tuple[int, ...] = (0,)) -> list[list[int]]:
        self._count += 1
        client = Client(self.node.info)
        try:
            result = client.submit(f"alone{self._count}", prompt, sampling, decode=self.node.info, samples=samples)
            client.wait(result)
        finally:
            client.close()
        assert result.failed is None, result.failed
        return [result.output(sample) for sample in samples]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    node = Node(node_options("unified", tiny_model("llama")))
    yield Alone(node)
    node.stop()


# --- sampling -----------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_alone_and_split(pair: Pair, alone: Alone) -> None:
    prompts = [random_prompt(length, seed=100 + length) for length in (1, 16, 77)]
    results = [pair.submit(prompt, SAMPLED) for prompt in prompts]
    pair.client.wait()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.failed is None, result.failed
        assert [result.output()] == alone.run(prompt, SAMPLED)
    assert results[0].output() != alone.run(prompts[0], changed(SAMPLED, seed=1))[0], "the seed does not matter"


def test_four_samples_are_one_prefill_and_one_handoff(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(77, seed=4), (0, 1, 2, 3)
    commits, handoffs = pair.sink.commits, pair.source.handoffs_completed
    result = pair.run(prompt, SAMPLED, samples=samples)
    assert result.failed is None, result.failed
    pair.until(lambda: pair.source.handoffs_completed > handoffs)
    assert (pair.sink.commits, pair.source.handoffs_completed) == (commits + 1, handoffs + 1)
    outputs = [result.output(sample) for sample in samples]
    assert len({tuple(output) for output in outputs}) == 4
    assert outputs == alone.run(prompt, SAMPLED, samples)
    assert outputs == [alone.run(prompt, SAMPLED, (sample,))[0] for sample in samples]
    assert [pair.run(prompt, SAMPLED, samples=(sample,)).output(sample) for sample in (1, 3)] == [
        outputs[1],
        outputs[3],
    ]


# --- ends at the first token --------------------------------------------------------------------------------


def test_one_token_ends_on_the_prefill_node(pair: Pair, alone: Alone) -> None:
    prompt, commits = random_prompt(40, seed=7), pair.sink.commits
    result = pair.run(prompt, changed(GREEDY, max_tokens=1), samples=(0, 1))
    assert result.failed is None, result.failed
    assert result.finished == {0: "length", 1: "length"}
    assert result.output() == alone.run(prompt, GREEDY)[0][:1]
    pair.check_whole()
    assert pair.sink.commits == commits, "a hand-off without anything to go on with was committed"


def test_eos_at_the_first_token(shm: Pair, alone: Alone) -> None:
    prompt = random_prompt(40, seed=8)
    ((first, *_),) = alone.run(prompt, GREEDY)
    result = shm.run(prompt, changed(GREEDY, stop_token_ids=(first,)))
    assert result.failed is None, result.failed
    assert (result.output(), result.finished) == ([first], {0: "stop"})


def test_some_samples_end_at_the_first_token(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(50, seed=9), (0, 1, 2, 3)
    hot = changed(SAMPLED, temperature=8.0, top_p=1.0, min_p=0.0)
    firsts = [output[0] for output in alone.run(prompt, hot, samples)]
    assert len(set(firsts)) > 1, "choose another seed"
    stopping = changed(hot, stop_token_ids=(firsts[0],))
    expected = alone.run(prompt, stopping, samples)
    result = pair.run(prompt, stopping, samples=samples)
    assert result.failed is None, result.failed
    assert [result.output(sample) for sample in samples] == expected
    assert result.finished[0] == "stop"
    assert len(result.output(0)) == 1


# --- prefix cache -------------------------------------------------------------------------------------------


def test_what_the_decode_node_has_is_not_pushed_again(pair: Pair) -> None:
    prompt = random_prompt(200, seed=11)
    start = pair.pushed_bytes
    first = pair.run(prompt, GREEDY)
    pair.check_whole()
    middle = pair.pushed_bytes
    second = pair.run(prompt, GREEDY)
    assert first.failed is None
    assert second.failed is None
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 192)
    assert first.output() == second.output()
    assert 0 < pair.pushed_bytes - middle < (middle - start) / 4


# --- faults of the transport --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["shm", "tcp"])
@pytest.mark.parametrize("fault", ["corrupt:1", "drop:2", "duplicate:*", "delay:0.002", "drop:1,corrupt:4,duplicate:3"])
def test_a_fault_on_the_way_is_caught_and_mended(way: str, fault: str, alone: Alone) -> None:
    prompts = [random_prompt(length, seed=length) for length in (33, 130)]
    with make_pair(way, prefill={"fault_injection": fault, "chunk": 64}) as pair:
        results = [pair.submit(prompt, GREEDY) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, GREEDY)
        assert (pair.sink.digest_mismatches > 0) == ("corrupt" in fault or "drop" in fault)
        assert pair.sink.commits == 2, "a single fault must not cost the hand-off"
        assert pair.sink.recomputes == 0
        pair.check_whole()


@pytest.mark.parametrize("way", ["shm", "tcp"])
@pytest.mark.parametrize("fault", ["corrupt:*", "drop:*"])
def test_bytes_that_never_come_right_are_computed_again(way: str, fault: str, alone: Alone) -> None:
    prompt, samples = random_prompt(90, seed=12), (0, 1)
    with make_pair(way, prefill={"fault_injection": fault}) as pair:
        for sampling in (GREEDY, changed(SAMPLED, seed=3)):
            result = pair.run(prompt, sampling, samples=samples)
            assert result.failed is None, result.failed
            assert [result.output(sample) for sample in samples] == alone.run(prompt, sampling, samples)
        assert pair.sink.recomputes >= 1
        assert pair.sink.digest_mismatches > 1
        pair.check_whole()


# --- cancels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_cancel_at_any_moment(way: str, alone: Alone) -> None:
    """Writes are slow and the decode node's pool small, so that cancels meet queued claims, pushes and decoding."""
    rng = random.Random(way)
    long = changed(GREEDY, max_tokens=200)
    options = {"decode": {"num_blocks": 60}, "prefill": {"fault_injection": "delay:0.003", "chunk": 64}}
    with make_pair(way, **options) as pair:
        results = []
        for turn in range(24):
            results.append(pair.submit(random_prompt(rng.choice((5, 90, 250)), seed=turn), long))
            pair.client.poll(rng.random() * 0.05)
            if rng.random() < 0.8:
                victim = rng.choice(results)
                for _ in range(rng.choice((1, 1, 3))):
                    pair.cancel(victim)
        for result in results:
            pair.cancel(result)
        pair.client.wait()
        failures = [result.failed for result in results if result.failed is not None]
        assert all("cancelled" in failure.message for failure in failures), failures
        pair.check_whole()
        prompt = random_prompt(90, seed=1)
        assert [pair.run(prompt, GREEDY).output()] == alone.run(prompt, GREEDY), "the nodes do not work any more"


def test_duplicates_of_submit_and_cancel(shm: Pair, alone: Alone) -> None:
    prompt, commits = random_prompt(60, seed=21), shm.sink.commits
    result = shm.submit(prompt, GREEDY, name="twice")
    first = result
    for _ in range(3):
        shm.client.results["twice", 0] = first
        resend(shm, "twice", prompt, GREEDY)
    shm.client.wait(result)
    assert result.failed is None, result.failed
    assert [result.output()] == alone.run(prompt, GREEDY)
    resend(shm, "twice", prompt, GREEDY)  # after its end: answered, not run again
    accepted = result.accepted
    shm.until(lambda: result.accepted >= accepted + 2)
    assert shm.sink.commits == commits + 1
    for _ in range(2):
        shm.cancel(result)
    shm.until(lambda: result.cancelled)
    assert result.finished == {0: "length"}


def resend(pair: Pair, name: str, prompt: list[int], sampling: SamplingParams) -> None:
    """The same Submit again, to both nodes, into the same Result."""
    known = pair.client.results[name, 0]
    pair.submit(prompt, sampling, name=name)
    pair.client.results[name, 0] = known


def test_cancel_before_submit_leaves_nothing(shm: Pair) -> None:
    result = shm.client.results["early", 0] = Result()
    shm.cancel(result)
    shm.until(lambda: result.cancelled)
    again = shm.submit(random_prompt(40, seed=3), GREEDY, name="early")
    shm.until(lambda: again.accepted >= 2)
    shm.client.poll(0.2)
    assert not again.tokens


def test_cancel_of_one_sample(pair: Pair, alone: Alone) -> None:
    prompt, samples = random_prompt(60, seed=22), (0, 1, 2)
    sampling = changed(SAMPLED, max_tokens=60)
    result = pair.submit(prompt, sampling, samples=samples)
    pair.until(lambda: len(result.tokens.get(1, ())) >= 3)
    request_id, attempt = pair.key_of(result)
    for node in (pair.decode, pair.prefill):
        pair.client.send(node.info, Cancel(request_id=request_id, attempt=attempt, sample_indices=(1,)))
    pair.until(lambda: {0, 2} <= result.finished.keys())
    assert 1 not in result.finished
    expected = alone.run(prompt, sampling, samples)
    assert [result.output(0), result.output(2)] == [expected[0], expected[2]]
    assert expected[1][: len(result.output(1))] == result.output(1)


# --- other ends ---------------------------------------------------------------------------------------------


def test_a_lost_router_takes_its_requests_along(alone: Alone) -> None:
    quick = Timeouts(heartbeat_s=0.1, peer_lost_s=1.0, resend_s=0.1, drain_s=10.0)
    slow = {"fault_injection": "delay:0.01", "chunk": 64, "timeouts": quick}
    with make_pair("tcp", decode={"timeouts": quick, "num_blocks": 60}, prefill=slow) as pair:
        other = Client(pair.decode.info, pair.prefill.info)
        results = [
            other.submit(
                f"lost{i}",
                random_prompt(200, seed=i),
                changed(GREEDY, max_tokens=1000),
                decode=pair.decode.info,
                prefill=pair.prefill.info,
            )
            for i in range(6)
        ]
        while not any(result.tokens for result in results):
            other.poll(0.01)
            pair.client.poll(0.0)
        other.close()
        pair.check_whole()
        for node in (pair.decode, pair.prefill):
            assert not node.process.logic.book.entries
        prompt = random_prompt(90, seed=1)
        assert [pair.run(prompt, GREEDY).output()] == alone.run(prompt, GREEDY)


def test_a_small_decode_pool_grants_in_order(alone: Alone) -> None:
    lengths = (300, 20, 250, 100, 333, 15, 180, 320, 60, 290)
    prompts = [random_prompt(length, seed=1000 + length) for length in lengths]
    with make_pair("shm", decode={"num_blocks": 30}) as pair:
        results = [pair.submit(prompt, GREEDY) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, GREEDY)
        pair.check_whole()


def test_the_deadline_ends_a_request_wherever_it_is(pair: Pair) -> None:
    long = changed(GREEDY, max_tokens=1500)
    results = [pair.submit(random_prompt(400, seed=i), long, deadline_s=0.02 + 0.15 * i) for i in range(3)]
    pair.client.wait()
    for result in results:
        assert result.failed is not None
        assert (result.failed.code, result.failed.retryable) == ("deadline_exceeded", False)


# --- attempts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("split", [True, False])
def test_the_next_attempt_goes_on_where_the_client_is(
    shm: Pair, alone: Alone, sampling: SamplingParams, split: bool
) -> None:
    sampling = changed(sampling, max_tokens=60)
    prompt = random_prompt(70, seed=31)
    expected = alone.run(prompt, sampling)[0]
    name = f"attempts-{split}-{sampling.seed}"
    first = shm.submit(prompt, sampling, name=name)
    shm.until(lambda: len(first.tokens.get(0, ())) >= 5)
    seen = first.output()
    num_seen = len(seen)
    assert num_seen < 60, "nothing is left for another attempt"
    peers = {"prefill": shm.prefill.info} if split else {}
    second = shm.client.submit(
        name, [*prompt, *seen], sampling, decode=shm.decode.info, attempt=1, num_prior=num_seen, **peers
    )
    shm.client.wait(second)
    assert second.failed is None, second.failed
    assert min(second.tokens[0]) == num_seen
    assert seen + second.output() == expected
    assert not first.finished, "the old attempt went on"
    shm.cancel(first)


# --- what comes beside the tokens ---------------------------------------------------------------------------


def test_logprobs_and_prompt_logprobs(shm: Pair) -> None:
    prompt = random_prompt(40, seed=41)
    sampling = changed(GREEDY, num_logprobs=4, num_prompt_logprobs=2)
    full = shm.client.submit("full", prompt, sampling, decode=shm.decode.info)
    split = shm.submit(prompt, changed(GREEDY, num_logprobs=4))
    shm.client.wait(full, split)
    assert full.failed is None
    assert split.failed is None
    assert full.output() == split.output()
    for result in (full, split):
        assert len(result.logprobs[0]) == 24
        for token, entry in zip(result.output(), result.logprobs[0], strict=True):
            check_entry(entry, 4)
            assert entry.token_ids[0] == entry.token_ids[1] == token, "greedy takes the best"
            assert entry.rank == 1
    for alone_entry, split_entry in zip(full.logprobs[0], split.logprobs[0], strict=True):
        assert split_entry.logprobs == pytest.approx(alone_entry.logprobs, abs=1e-3)
    assert [entry.token_ids[0] for entry in full.prompt_logprobs] == prompt[1:]
    for entry in full.prompt_logprobs:
        check_entry(entry, 2)


def check_entry(entry, num_top: int) -> None:  # type: ignore[no-untyped-def]
    assert len(entry.token_ids) == len(entry.logprobs) == num_top + 1
    top = entry.logprobs[1:]
    assert list(top) == sorted(top, reverse=True)
    assert sum(math.exp(value) for value in top) <= 1 + 1e-5
    assert all(value <= 0 for value in entry.logprobs)
    assert (entry.rank <= num_top) == (entry.token_ids[0] in entry.token_ids[1:])


@pytest.mark.parametrize(
    ("prompt", "words"), [([5, 512], "outside"), ([-1], "outside"), ([], "at least one"), ([5] * 2049, "2048")]
)
def test_what_can_never_be_served_is_refused_for_good(shm: Pair, prompt: list[int], words: str) -> None:
    for mode_result in (
        shm.run(prompt, GREEDY),
        run_full(shm, prompt),
    ):
        assert mode_result.failed is not None
        assert not mode_result.failed.retryable
        assert words in mode_result.failed.message


def run_full(pair: Pair, prompt: list[int]) -> Result:
    result = pair.client.submit(f"full-{len(pair.client.results)}", prompt, GREEDY, decode=pair.decode.info)
    pair.client.wait(result)
    return result


# --- strangers ----------------------------------------------------------------------------------------------


class ImpostorSink:
    """Poses as the decode node of `pair` towards its prefill node, and answers claims as a test likes."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peer = b""

    def submit(self, name: str, prompt: list[int]) -> Result:
        """To the prefill node, which will claim from this impostor."""
        info, client = self.pair.decode.info, self.pair.client
        client.results[name, 0] = Result()
        message = Submit(
            request_id=name,
            attempt=0,
            mode="prefill",
            prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
            sampling=GREEDY,
            peer=PeerRef(info.node_id, info.epoch, self._address),
        )
        client.send(self.pair.prefill.info, message)
        return client.results[name, 0]

    def expect(self, kind: type, name: str):  # type: ignore[no-untyped-def]
        """The next message of `kind` about `name`; greets, answers KVDrained, drops all else."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            self.pair.client.poll(0.0)
            if not self._socket.poll(5):
                continue
            self._peer, payload = self._socket.recv_multipart()
            message = wire.decode_to_node(payload)
            if isinstance(message, Hello):
                self.send(Welcome(info=self.pair.decode.info))
            elif isinstance(message, KVDrained):
                self.send(KVDrainedAck(request_id=message.request_id, attempt=0, grant_id=message.grant_id))
            if isinstance(message, kind) and message.request_id == name:
                return message
        raise AssertionError(f"no {kind.__name__} about {name}")

    def send(self, message: wire.Message) -> None:
        self._socket.send_multipart([self._peer, wire.encode(message)])

    def grant(self, claim: KVClaim, **changes: object) -> KVGrant:
        """Signed with the cluster's key, for the first blocks of the decode node's pool."""
        num_blocks = -(-claim.num_prompt_tokens // BLOCK)
        fields = {
            "request_id": claim.request_id,
            "attempt": claim.attempt,
            "grant_id": random.getrandbits(63) + 1,
            "source_id": claim.source_id,
            "source_epoch": claim.source_epoch,
            "sink_id": self.pair.decode.info.node_id,
            "sink_epoch": claim.sink_epoch,
            "first_block": 0,
            "block_ids": tuple(range(num_blocks)),
            "num_prompt_tokens": claim.num_prompt_tokens,
            "lease_s": 60.0,
        }
        return self.pair.decode.process.keys.sign_grant(KVGrant(**{**fields, **changes}))  # type: ignore[arg-type]

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def test_a_grant_that_is_not_for_this_handoff_is_refused() -> None:
    """Shared memory: the source writes wherever its grant says, so a grant that slips through destroys KV."""
    with make_pair("shm") as pair:
        impostor = ImpostorSink(pair)
        pool = pair.decode.process.transfer.pool
        try:
            impostor.submit("good", random_prompt(40, seed=1))
            used = impostor.grant(impostor.expect(KVClaim, "good"))
            impostor.send(used)
            impostor.expect(KVReady, "good")
            impostor.send(KVCommitted(request_id="good", attempt=0, grant_id=used.grant_id))
            pair.until(lambda: pair.source.handoffs_completed == 1)
            before, pushed = pool.clone(), pair.pushed_bytes
            assert pushed > 0, "the impostor's grant is honest and was not used: this test would show nothing"

            result = impostor.submit("bad", random_prompt(40, seed=2))
            claim = impostor.expect(KVClaim, "bad")
            good = impostor.grant(claim)
            keys = pair.decode.process.keys
            forged = [
                msgspec.structs.replace(good, signature=bytes(16)),
                msgspec.structs.replace(good, block_ids=(7, 8, 9)),
                msgspec.structs.replace(used, request_id="bad"),
                keys.sign_grant(msgspec.structs.replace(used, request_id="bad")),
                impostor.grant(claim, source_id="prefill-other"),
                impostor.grant(claim, sink_id="decode-other"),
                impostor.grant(claim, first_block=1),
                impostor.grant(claim, num_prompt_tokens=39),
                impostor.grant(claim, block_ids=()),
            ]
            for number, grant in enumerate(forged, 1):
                impostor.send(grant)
                pair.until(lambda number=number: pair.source.grants_refused == number)  # type: ignore[misc]
            dropped = [
                used,
                impostor.grant(claim, request_id="never"),
                impostor.grant(claim, attempt=1),
                impostor.grant(claim, source_epoch=claim.source_epoch + 1),
                impostor.grant(claim, sink_epoch=claim.sink_epoch + 1),
            ]
            for grant in dropped:
                impostor.send(grant)
            impostor.send(KVRefused(request_id="bad", attempt=0, reason="no"))
            impostor.expect(KVDrained, "bad")
            pair.client.wait(result)
            assert result.failed is not None
            assert pair.pushed_bytes == pushed
            assert torch.equal(pool, before), "something was written under a forged grant"
            pair.check_whole()
        finally:
            impostor.close()


def test_a_grant_from_a_connection_that_nobody_asked_for_is_not_heard(shm: Pair) -> None:
    context, control = zmq.Context(), shm.prefill.process.control
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(shm.prefill.info.control_address)
        info = msgspec.structs.replace(shm.decode.info, node_id="decode-stranger", pid=0)
        socket.send(wire.encode(Hello(wire_version=wire.WIRE_VERSION, info=info)))
        assert socket.poll(5000)
        assert isinstance(wire.decode_from_node(socket.recv()), Welcome)
        undecodable, pushed = control.counters.undecodable, shm.pushed_bytes
        claim = KVClaim(request_id="x", attempt=0, source_id="s", source_epoch=1, sink_epoch=2, num_prompt_tokens=BLOCK)
        socket.send(wire.encode(ImpostorSink.grant(_Of(shm), claim)))  # type: ignore[arg-type]
        shm.until(lambda: control.counters.undecodable == undecodable + 1)
        assert shm.pushed_bytes == pushed
    finally:
        socket.close()
        context.term()


@dataclass
class _Of:
    pair: Pair


@pytest.mark.parametrize(
    ("model", "block_size", "hash_block_size", "field_name"),
    [("qwen3", 16, 16, "identity.config"), ("llama", 32, 32, "identity.hash_block_size"), ("llama", 32, 16, "layout")],
)
def test_nodes_that_differ_refuse_each_other(
    shm: Pair, model: str, block_size: int, hash_block_size: int, field_name: str
) -> None:
    options = node_options("prefill", tiny_model(model), transport="shm")
    cache = dataclasses.replace(options.cache, block_size=block_size, hash_block_size=hash_block_size)
    stranger = Node(dataclasses.replace(options, cache=cache))
    client = Client(shm.decode.info, stranger.info)
    try:
        result = client.submit(
            f"differs-{model}-{hash_block_size}", [5] * 40, GREEDY, decode=shm.decode.info, prefill=stranger.info
        )
        client.wait(result)
        assert result.failed is not None
        assert field_name in result.failed.message
        key = next(iter(client.results))
        client.cancel(*key, shm.decode.info)
        stranger.wait_until_whole()
    finally:
        shm.check_whole()
        client.close()
        stranger.stop()
