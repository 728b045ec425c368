"""Running sequences handed from one decode node to another, mid-stream: no token lost, doubled or different."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from split_pair import GREEDY, NIXL, SAMPLED, Alone, changed

from in_process_cluster import Client, Node, Result, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kv_connector.protocol.outcomes import ENDED, OUTGROWN
from tiny_models import random_prompt, tiny_model

LONG = 90


@dataclass
class Trio:
    """A prefill node and two decode nodes; `client` stands for their router."""

    prefill: Node
    first: Node
    second: Node
    client: Client

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams, **options: object) -> Result:
        return self.client.submit(name, prompt, sampling, decode=self.first.info, prefill=self.prefill.info, **options)  # type: ignore[arg-type]

    def until(self, condition: Callable[[], bool]) -> None:
        self.client.until(condition)

    def until_decoding(self, result: Result, num_tokens: int = 5) -> None:
        self.until(lambda: all(len(result.tokens.get(s, ())) >= num_tokens for s in range(result.num_samples)))

    def migrate(self, result: Result, prompt: list[int], sampling: SamplingParams, sample: int = 0) -> Result:
        return self.client.migrate(result, sample, prompt, sampling, self.first.info, self.second.info)

    def move_one(self, name: str, prompt: list[int], sampling: SamplingParams) -> tuple[Result, Result]:
        """A request moves while it decodes: what came from both nodes when it has ended. Nodes that have yet to connect
        may take longer for that than the request runs."""
        for attempt in range(3):
            result = self.submit(f"{name}-{attempt}", prompt, sampling)
            self.until_decoding(result)
            moved = self.migrate(result, prompt, sampling)
            self.until(lambda result=result, moved=moved: moved.done or any(m.reason for m in result.migrated))  # type: ignore[misc]
            if moved.done:
                return result, moved
            assert {message.reason for message in result.migrated} <= {ENDED, OUTGROWN}
        raise AssertionError("each time it had ended before it could move")

    def check_whole(self) -> None:
        for node in (self.prefill, self.first, self.second):
            logic = node.process.logic
            node.wait_until_whole()
            self.until(lambda logic=logic: logic.is_empty)  # type: ignore[misc]

    def count(self, name: str) -> float:
        return sum(node.process.logic.status({}).counters[name] for node in (self.first, self.second))


@contextmanager
def trio(way: str = "shm", second: dict[str, object] | None = None, **decode: object) -> Iterator[Trio]:
    """`decode` are options of both decode nodes, unless the second has its own."""
    model = tiny_model("llama")
    roles = (("prefill", {}), ("decode", decode), ("decode", decode if second is None else second))
    nodes = [Node(node_options(role, model, transport=way, **options)) for role, options in roles]
    made = Trio(*nodes, Client(*(node.info for node in nodes)))
    try:
        yield made
    finally:
        made.client.close()
        for node in nodes:
            node.stop()


def joined(before: Result, after: Result, sample: int = 0) -> list[int]:
    """Tokens of both attempts by output index; asserts that they agree where both say something, without a gap."""
    old, new = before.tokens[sample], after.tokens.get(sample, {})
    assert all(old[index] == new[index] for index in old.keys() & new.keys()), "the two nodes contradict each other"
    both = {**old, **new}
    assert sorted(both) == list(range(len(both))), "a token is missing"
    return [both[index] for index in range(len(both))]


@pytest.mark.parametrize("way", ["shm", NIXL, "tcp", "local"])
def test_a_stream_goes_on_elsewhere_as_if_it_had_stayed(way: str, alone: Alone) -> None:
    prompts = [random_prompt(90, seed=5), random_prompt(33, seed=6)]
    with trio(way) as nodes:
        ways = {"greedy": GREEDY, "seeded": SAMPLED, "logprobs": changed(GREEDY, num_logprobs=1)}
        ways["guided"] = changed(SAMPLED, grammar="start: /([a-z]{3} ){50,}/")
        for name, sampling in ways.items():
            prompt, sampling = prompts[name == "seeded"], changed(sampling, max_tokens=LONG)
            result, moved = nodes.move_one(name, prompt, sampling)
            assert moved.failed is None, moved.failed
            assert [message.reason for message in result.migrated] == [""]
            assert not result.finished
            assert [joined(result, moved)] == alone.run(prompt, sampling)
            if sampling.num_logprobs is None:
                assert min(moved.tokens[0]) == moved.num_prior, "what the source may not have told is told again"
        assert nodes.count("migrations_finished") == 4
        assert nodes.count("migrations_pause_s") > 0
        nodes.check_whole()


def test_samples_of_one_prompt_share_its_blocks_at_the_target(alone: Alone) -> None:
    prompt, sampling, samples = random_prompt(200, seed=8), changed(SAMPLED, max_tokens=LONG), (0, 1, 2, 3)
    with trio() as nodes:
        nodes.first.hold_after(20)
        result = nodes.submit("r", prompt, sampling, samples=samples)
        nodes.until_decoding(result)
        moved, pushed = [], []
        for sample in samples:
            before = nodes.first.process.transfer.counters["kv_pushed_bytes"]
            moved.append(nodes.migrate(result, prompt, sampling, sample))
            nodes.until(lambda: len(result.migrated) == len(moved))
            pushed.append(nodes.first.process.transfer.counters["kv_pushed_bytes"] - before)
        nodes.first.go_on()
        nodes.client.wait(*moved)
        assert [joined(result, each, sample) for sample, each in enumerate(moved)] == alone.run(
            prompt, sampling, samples
        )
        assert max(pushed[1:]) < pushed[0], "the prompt's blocks were sent again"
        nodes.check_whole()


def test_there_and_back_again(alone: Alone) -> None:
    prompt, sampling = random_prompt(120, seed=9), changed(SAMPLED, max_tokens=300)
    with trio() as nodes:
        here, there = nodes.first, nodes.second
        here.hold_after(20)
        result = nodes.submit("r", prompt, sampling)
        nodes.until_decoding(result)
        output: list[int] = []
        for _ in range(3):
            there.hold_after(40)
            moved = nodes.client.migrate(result, 0, prompt, sampling, here.info, there.info, prior=output)
            nodes.until(lambda moved=moved: len(moved.tokens.get(0, ())) >= 20)  # type: ignore[misc]
            assert not result.finished
            output = [*output, *result.output()][: min(moved.tokens[0])]
            assert len(output) == min(moved.tokens[0]), "a token is missing"
            result, here, there = moved, there, here
        here.go_on()
        there.go_on()
        nodes.client.wait(result)
        assert [[*output, *result.output()]] == alone.run(prompt, sampling)
        nodes.check_whole()


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16)])
def test_blocks_of_another_size(sizes: tuple[int, int], alone: Alone) -> None:
    prompt, sampling = random_prompt(150, seed=15), changed(SAMPLED, max_tokens=LONG)
    with trio(block_size=sizes[0], second={"block_size": sizes[1]}) as nodes:
        result, moved = nodes.move_one("r", prompt, sampling)
        assert [message.reason for message in result.migrated] == [""]
        assert [joined(result, moved)] == alone.run(prompt, sampling)
        nodes.check_whole()


@pytest.mark.parametrize("fault", ["corrupt:1", "drop:1,duplicate:2", "corrupt:*"])
def test_bytes_that_arrive_wrong_are_sent_again_or_computed(fault: str, alone: Alone) -> None:
    prompt, sampling = random_prompt(90, seed=5), changed(SAMPLED, max_tokens=LONG)
    with trio(fault_injection=fault) as nodes:
        result, moved = nodes.move_one("r", prompt, sampling)
        assert [joined(result, moved)] == alone.run(prompt, sampling)
        sink = nodes.second.process.logic.handoffs.sink.counters  # type: ignore[attr-defined]
        assert sink.digest_mismatches > 0
        assert (sink.recomputes == 1) == ("*" in fault)
        nodes.check_whole()


@pytest.mark.parametrize("side", ["first", "second", "both"])
def test_a_cancel_at_any_moment_leaves_nothing(side: str) -> None:
    rng = random.Random(side)
    prompt, sampling = random_prompt(150, seed=4), changed(GREEDY, max_tokens=400)
    with trio(fault_injection="delay:0.01") as nodes:
        for turn in range(8):
            result = nodes.submit(f"r{turn}", prompt, sampling)
            nodes.until_decoding(result, 2)
            moved = nodes.migrate(result, prompt, sampling)
            nodes.client.poll(rng.random() * 0.08)
            old, new = (f"r{turn}", 0), (f"r{turn}-s0", 10)
            if side != "second":
                nodes.client.cancel(*old, nodes.first.info)
            if side != "first":
                nodes.client.cancel(*new, nodes.second.info)
            nodes.client.poll(0.02)
            nodes.until(lambda: len(result.migrated) == 1 or result.cancelled)  # noqa: B023
            nodes.client.cancel(*old, nodes.first.info)
            nodes.client.cancel(*new, nodes.second.info)
            nodes.until(lambda: moved.cancelled and result.cancelled)  # noqa: B023
        assert nodes.count("migrations_started") > 0
        nodes.check_whole()
