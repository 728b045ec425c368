"""Running sequences handed from one decode node to another, mid-stream: no token lost, doubled or different."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from split_pair import GREEDY, NIXL, SAMPLED, Alone, changed

from in_process_cluster import Client, Node, Result, node_options
from tandem.engine.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

LONG = 160


@dataclass
class Trio:
    """A prefill node and two decode nodes; `client` stands for their router."""

    prefill: Node
    first: Node
    second: Node
    client: Client

    def submit(self, name: str, prompt: list[int], sampling: SamplingParams, **options: object) -> Result:
        return self.client.submit(name, prompt, sampling, decode=self.first.info, prefill=self.prefill.info, **options)  # type: ignore[arg-type]

    def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.client.poll(0.005)

    def until_decoding(self, result: Result, num_tokens: int = 5) -> None:
        self.until(lambda: all(len(result.tokens.get(s, ())) >= num_tokens for s in range(result.num_samples)))

    def check_whole(self) -> None:
        for node in (self.prefill, self.first, self.second):
            logic = node.process.logic
            node.wait_until_whole()
            self.until(lambda logic=logic: logic.is_empty)  # type: ignore[misc]

    def count(self, name: str) -> float:
        return sum(node.process.logic.status().counters[name] for node in (self.first, self.second))


@contextmanager
def trio(way: str = "shm", **decode: object) -> Iterator[Trio]:
    model = tiny_model("llama")
    roles = (("prefill", {}), ("decode", decode), ("decode", decode))
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
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
def test_a_stream_goes_on_elsewhere_as_if_it_had_stayed(way: str, sampling: SamplingParams, alone: Alone) -> None:
    prompt, sampling = random_prompt(90, seed=5), changed(sampling, max_tokens=LONG)
    with trio(way) as nodes:
        result = nodes.submit("r", prompt, sampling)
        nodes.until_decoding(result)
        moved = nodes.client.migrate(result, 0, prompt, sampling, nodes.first.info, nodes.second.info)
        nodes.client.wait(moved)
        assert moved.failed is None, moved.failed
        assert [message.reason for message in result.migrated] == [""]
        assert not result.finished
        assert [joined(result, moved)] == alone.run(prompt, sampling)
        assert nodes.count("migrations_finished") == 1
        assert 0 < nodes.count("migrations_pause_s") < 1
        nodes.check_whole()
