"""A prefill node and two decode nodes in one process, between which running sequences move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from in_process_cluster import Client, Node, Result, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tiny_models import tiny_model

Media = tuple[MediaItem, ...]


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

    def migrate(
        self, result: Result, prompt: list[int], sampling: SamplingParams, sample: int = 0, media: Media = ()
    ) -> Result:
        return self.client.migrate(result, sample, prompt, sampling, self.first.info, self.second.info, media=media)

    def move_one(
        self, name: str, prompt: list[int], sampling: SamplingParams, media: Media = ()
    ) -> tuple[Result, Result]:
        """A request moves while it decodes: what came from both nodes when it has ended. The first waits with it, for
        nodes that have yet to connect may take longer for that than the request runs."""
        self.first.hold_after(8)
        result = self.submit(name, prompt, sampling, media=media)
        self.until_decoding(result)
        moved = self.migrate(result, prompt, sampling, media=media)
        self.until(lambda: moved.done and bool(result.migrated))
        self.first.go_on()
        return result, moved

    def check_whole(self) -> None:
        for node in (self.prefill, self.first, self.second):
            logic = node.process.logic
            node.wait_until_whole()
            self.until(lambda logic=logic: logic.is_empty)  # type: ignore[misc]

    def count(self, name: str) -> float:
        return sum(node.process.logic.status({}).counters[name] for node in (self.first, self.second))


@contextmanager
def trio(
    way: str = "shm", second: dict[str, object] | None = None, model: Path | None = None, **decode: object
) -> Iterator[Trio]:
    """Of the tiny llama, or another. `decode` are options of both decode nodes, unless the second has its own."""
    model = model or tiny_model("llama")
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
