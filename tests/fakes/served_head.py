"""A model's runner with a head beside it, and what heads of every kind are asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from decode_trio import Trio, joined
from eagle_heads import SIZE, next_tokens
from handmade_steps import BLOCK, NUM_BLOCKS, RunsDirectly, new_slot, with_windows
from node_child import NodeChild
from split_pair import changed
from tiny_adapters import ALL, tiny_adapter

from in_process_cluster import Client, Node, client_of, node_options
from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.config import LoraOptions, NodeOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.heads.guess_steps import HeadSteps
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.speculation.head_tokens import HeadRow
from tandem.engine.scheduling.step import (
    UNSEEN,
    BlockAppend,
    ForkSlot,
    SampleRow,
    ScheduledRow,
    SchedulerOutput,
)
from tandem.node.drafting.heads import LoadedHead
from tandem.node.setup import load
from tiny_models import VOCAB, random_prompt

# A decode node does all that one does.
ONE_AND_SPLIT = [pytest.param(["unified"], marks=pytest.mark.slow), ["decode", "prefill"]]
BLOCKS = (4, 9, 2, 20)
PROMPT = [7 * place % SIZE for place in range(90)]  # of models that walk
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


class Published(Protocol):
    def guesses(self, token_ids: list[int], count: int) -> tuple[list[int], float]:
        """What follows these tokens, and by how much each guess was better than the next best at least."""


class ServedHead:
    """The runner of a node with such options, and what it has computed of slot 1."""

    def __init__(self, options: NodeOptions, num_guesses: int) -> None:
        loaded = load(options)
        assert isinstance(loaded.draft, LoadedHead)
        self.head: Any = loaded.draft.head
        group = loaded.layout.group
        pool = allocate_pool(loaded.layout, NUM_BLOCKS * group.blocks_each, loaded.device)
        self.runner = ModelRunner(loaded.model, pool, options.scheduler, BLOCK, 512, (), places=group.places)
        assert self.runner.features is not None
        self.steps = HeadSteps(self.head, self.runner.features, self.runner.state, 16, 512)
        self.num_guesses = num_guesses

    def run(self, rows: list[ScheduledRow], samples: list[SampleRow], **parts: object) -> list[int]:
        step = SchedulerOutput(0, tuple(rows), tuple(samples), **parts)  # type: ignore[arg-type]
        return self.runner.execute(with_windows(step, self.runner, NUM_BLOCKS)).result().token_ids.tolist()

    def prompt(self, prompt: list[int], chunk: int) -> list[int]:
        """Computes a prompt in two chunks: its tokens, and the one drawn."""
        self.run([ScheduledRow(1, 0, chunk)], [], new_slots=(new_slot(1, prompt, BLOCKS),))
        rest = ScheduledRow(1, chunk, len(prompt) - chunk)
        return [*prompt, *self.run([rest], [SampleRow(0, 1, len(prompt), 0, 0)])]

    def guesses(self, token_ids: list[int]) -> list[int]:
        row = HeadRow(1, len(token_ids) - 1, token_ids[-1], self.num_guesses, 0, 0)
        see = self.steps.guess([row], ())
        assert see is not None
        [made] = see()
        return made


def check_guesses(served: ServedHead, published: Published, next_token: Callable[[list[int]], int]) -> None:
    """Behind a prompt in chunks, a token of its own, and a step with drafts of which the second is wrong."""
    tokens = served.prompt(random_prompt(37, seed=3), 21)
    seen: list[int] = []

    def check() -> None:
        expected, lead = published.guesses(tokens, served.num_guesses)
        assert lead > 1e-3, "the reference itself is undecided"
        assert served.guesses(tokens) == expected
        seen.extend(expected)

    check()
    tokens += served.run([ScheduledRow(1, 37, 1)], [SampleRow(0, 1, 38, 0, 1)])
    check()
    right = next_token(tokens)
    drafts = [right, (right + 1) % VOCAB, 5]
    rows = [ScheduledRow(1, 38 + place, 1) for place in range(4)]
    samples = [SampleRow(place, 1, 39 + place, 0, 2 + place, draft) for place, draft in enumerate([-1, *drafts])]
    drawn = served.run(rows, samples)
    assert drawn[0] == right
    tokens += drawn[:2]  # the second draft was wrong, and what its place drew is the sequence's own
    check()
    assert len(set(seen)) > 3, "a head that says little tests little"
    _check_unseen(served, next_token, tokens)


def _check_unseen(served: ServedHead, next_token: Callable[[list[int]], int], tokens: list[int]) -> None:
    """A step that is launched before anybody has seen the drafts that it checks."""
    newest, expected = len(tokens) - 1, served.guesses(tokens)
    see = served.steps.guess([HeadRow(1, newest, tokens[-1], served.num_guesses, 0, 0)], (), in_place=True)
    assert see is not None
    rows = [ScheduledRow(1, newest + place, 1) for place in range(1 + served.num_guesses)]
    samples = [
        SampleRow(place, 1, newest + 1 + place, 0, newest + place, UNSEEN if place else -1)
        for place in range(len(rows))
    ]
    drawn = served.run(rows, samples)
    assert see() == [expected]
    assert drawn == [next_token(tokens + expected[:place]) for place in range(len(rows))]


def check_fork(served: ServedHead, published: Published) -> None:
    """A prompt's second chunk as rows of one token, as graphs run it, longer than what is kept of a slot; then a
    sample that forks, of whom each guesses for itself, one fewer than the other, in blocks that come with the guess."""
    prompt = random_prompt(32, seed=5)
    runner = served.runner
    graphs = RunsDirectly(DecodeBatch(runner.model, runner.state, 32, 512, features=runner.features))
    served.run([ScheduledRow(1, 0, 20)], [], new_slots=(new_slot(1, prompt, BLOCKS[:2]),))
    rows = [ScheduledRow(1, position, 1) for position in [30, *range(20, 30)]]  # sampled rows come first
    with torch.inference_mode():
        graphs.run(rows)
    samples = [SampleRow(0, 3, 32, 1, 0), SampleRow(0, 1, 32, 0, 0)]
    forks = (ForkSlot(3, 1, 32, BLOCKS[:2], sample_index=1),)
    made = served.run([ScheduledRow(1, 31, 1)], samples, forks=forks)
    expected, lead = published.guesses([*prompt, made[0]], served.num_guesses)
    assert lead > 1e-3
    fewer = served.num_guesses - 1
    order = [HeadRow(1, 32, made[1], served.num_guesses, 0, 0), HeadRow(3, 32, made[0], fewer, 1, 0)]
    appends = [BlockAppend(1, 2, 21), BlockAppend(3, 2, 22)]
    see = served.steps.guess(order, appends)
    assert see is not None
    assert see() == [expected, expected[:-1]]


# --- heads that know their model, which walks over its tokens ----------------------------------------------------


def walk(first: int, count: int) -> list[int]:
    following, tokens = next_tokens(), [first]
    for _ in range(count - 1):
        tokens.append(int(following[tokens[-1]]))
    return tokens


def nodes_of(roles: list[str], make_options: Callable[[str], NodeOptions]) -> tuple[list[Node], dict]:
    """Nodes, and where requests go: the first decodes, a second computes prompts."""
    nodes = [Node(make_options(role)) for role in roles]
    return nodes, {"decode": nodes[0].info, "prefill": nodes[1].info if len(nodes) > 1 else None}


def check_moved(options_of: Callable[[str], NodeOptions]) -> None:
    """A stream that moves takes along what its head keeps."""
    nodes = [Node(options_of(role)) for role in ("prefill", "decode", "decode")]
    with client_of(nodes) as client:
        result, moved = Trio(*nodes, client).move_one("walk", PROMPT, changed(GREEDY, max_tokens=150))
        assert joined(result, moved) == walk(int(next_tokens()[PROMPT[-1]]), 150)
        counts = nodes[2].process.logic.scheduler.spec_counters
        assert counts["spec_accepted_tokens"] >= 0.8 * counts["spec_draft_tokens"] > 20, counts


def check_adapters(
    model: Path, plain: Path, config: str, prompt: list[int], folder: Path, targets: Sequence[str] = ALL
) -> None:
    """Outputs of an adapter, and beside log-probabilities of prompts, are with a head what they are without. `plain`:
    the model's folder as adapters are made for it; `folder` gets one, of these products."""
    adapter = tiny_adapter(folder, plain, seed=5, targets=targets)
    ref = AdapterRef(str(adapter), read_adapter(str(adapter)).digest)
    seen, drafted = [], 0
    for each in ("", config):
        lora = LoraOptions(enable_lora=True)
        node = Node(node_options("unified", model, speculative_config=each, lora=lora, chunk=32))
        with client_of([node]) as client:
            adapted = client.submit("adapted", prompt, GREEDY, decode=node.info, adapter=ref)
            unadapted = client.submit("plain", prompt, changed(GREEDY, num_prompt_logprobs=1), decode=node.info)
            client.wait()
            assert adapted.failed is unadapted.failed is None
            seen.append((adapted.output(), unadapted.output()))
        drafted = node.process.logic.scheduler.spec_counters.get("spec_draft_tokens", 0)
    assert seen[0] == seen[1]
    assert seen[0][0] != seen[0][1]
    assert drafted > 0


def check_knowing(nodes: list[Node], where: dict, most_steps: int) -> None:
    """Its guesses are right of a prompt in chunks; of one whose blocks are cached; of samples that fork. What lacks is
    the feature before the first step here, and so a guess or two."""
    out = walk(int(next_tokens()[PROMPT[-1]]), 60)
    with client_of(nodes) as client:
        scheduler = nodes[0].process.logic.scheduler
        for name, samples in (("chunks", (0,)), ("cached", (0,)), ("forked", (0, 1))):
            num_steps, before = scheduler.num_steps, scheduler.spec_counters
            result = client.submit(name, PROMPT, GREEDY, samples=samples, **where)
            client.wait(result)
            assert result.failed is None, result.failed
            assert [result.output(sample) for sample in samples] == [out for _ in samples]
            counts = {key: count - before[key] for key, count in scheduler.spec_counters.items()}
            assert counts["spec_accepted_tokens"] >= 0.8 * counts["spec_draft_tokens"] > 20, (name, counts)
            assert scheduler.num_steps - num_steps <= most_steps


def check_knowing_on_ranks(
    ranks: dict[str, int], model: Path, config: str, transport: str = "shm", **options: object
) -> None:
    """A prompt's guesses are right on nodes of so many ranks each, by role, wherever its KV came from; twice, the
    second time from the cache. Nodes are processes of their own, and nothing is known of what steps take, so that all
    that is likely is guessed."""
    shared = {"model": str(model), "speculative_config": config, "measures": False, **options}
    children = {role: NodeChild((role,), transport, num_ranks=count, **shared) for role, count in ranks.items()}
    infos = {role: child.infos[0] for role, child in children.items()}
    decode = infos.get("decode") or infos["unified"]
    client, out = Client(*infos.values()), walk(int(next_tokens()[PROMPT[-1]]), 60)
    try:
        for name in ("chunks", "cached"):
            result = client.submit(name, PROMPT, GREEDY, decode=decode, prefill=infos.get("prefill"))
            client.wait(result)
            assert result.failed is None, result.failed
            assert result.output() == out
        client.until(lambda: client.statuses[decode.node_id].counters.get("spec_draft_tokens", 0) > 40)
        counts = client.statuses[decode.node_id].counters
        assert counts["spec_accepted_tokens"] >= 0.8 * counts["spec_draft_tokens"], counts
    finally:
        client.close()
        for child in children.values():
            child.stop()
