"""Steps with prompts as graphs between attentions, over graphs that need no GPU: what is computed without them, but for
the rounding of products of more rows, whatever is in the step."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import msgspec
import pytest
import torch
from handmade_steps import CPU, RecordingConnector, chunk_step, decode_step, make_runner, prompt_step, with_windows
from recorded_graphs import NativeCaptured, RecordedGraph, Recorder

from tandem.engine.contracts.kv_layout import push_groups
from tandem.engine.running.graphs.prompt_graphs import PromptGraphs, prompt_graph_sizes
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import BlockCopy, SchedulerOutput, StepMeta
from tandem.kernels.api import selection
from tiny_models import random_prompt, reference_greedy, tiny_model

LARGEST = 80  # tokens
ROWS = 40  # of one token, where attention is captured
# Attention is launched between the graphs, or in them.
both_ways = pytest.mark.parametrize("captured", [False, True], ids=["between", "inside"])


def with_graphs(
    folder: Path, connector: RecordingConnector | None = None, captured: bool = False, apart: bool = False
) -> tuple[ModelRunner, Recorder, list[NativeCaptured]]:
    runner, recorder = make_runner(folder, connector=connector, apart=apart), Recorder()
    attention = [NativeCaptured(recorder, ROWS) for _ in runner.state.tables_SB] if captured else []
    graphs = PromptGraphs(
        runner.model, runner._inputs, LARGEST, CPU, recorder.graph, attention, table_of=runner._table_of
    )
    with recorder:
        graphs.capture()
    runner._eager.replay(graphs)
    return runner, recorder, attention


# Not of experts: on a CPU how many tokens each gets decides on what torch calls.
@both_ways
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "qwen2_hybrid"])
def test_any_mix_of_rows_is_computed_as_without_graphs(kind: str, captured: bool) -> None:
    """Also where layers that slide have block tables of their own."""
    folder, apart = tiny_model(kind), kind == "qwen2_hybrid"
    replaying, recorder, attention = with_graphs(folder, captured=captured, apart=apart)
    plain = make_runner(folder, apart=apart)
    assert len(plain.state.tables_SB) == (4 if apart else 1)
    num_layers = len(plain.model.attention_layers)
    num_segments = len(push_groups(num_layers)) if captured else num_layers
    assert recorder.num_graphs == len(prompt_graph_sizes(LARGEST, ROWS if captured else 1)) * num_segments
    rng, prompts = random.Random(1), {1: random_prompt(20, seed=2), 2: random_prompt(5, seed=3)}
    steps, long = [prompt_step(prompts, {1: (20, 21, 22), 2: (23, 19)})], random_prompt(100, seed=4)
    begin = 0
    while begin < len(long):
        end = min(len(long), begin + rng.choice((1, 7, 31, 33, 64)))
        steps.append(chunk_step(len(steps), 0, long, begin, end, 19 + len(steps), 4 + len(steps)))
        begin = end
    replays = 0
    for step in (with_windows(each, plain) for each in steps):
        replays += step.num_tokens <= LARGEST
        tokens = [each.execute(step).result().token_ids.tolist() for each in (replaying, plain)]
        assert tokens[0] == tokens[1]
        torch.testing.assert_close(replaying.pool, plain.pool, rtol=1e-4, atol=1e-5)
        assert torch.equal(replaying.pool == 0, plain.pool == 0), "padding is written nowhere"
    assert replays == len(steps) > 3
    assert all(each.num_filled == replays for each in attention)


@both_ways
def test_the_tokens_are_those_of_transformers(captured: bool) -> None:
    runner, _, _ = with_graphs(tiny_model("llama"), captured=captured)
    prompt = random_prompt(33, seed=2)
    made = runner.execute(prompt_step({0: prompt}, {0: (7, 3, 11, 2)})).result().token_ids.tolist()
    for step in range(1, 12):
        made += runner.execute(decode_step(step, {0: 32 + step})).result().token_ids.tolist()
    assert made == reference_greedy(tiny_model("llama"), prompt, 12).token_ids


@both_ways
def test_the_connector_sees_each_layer_in_turn(captured: bool) -> None:
    """One after the other, or as many at a time as are pushed together; the last by itself."""
    connector = RecordingConnector()
    runner, recorder, _ = with_graphs(tiny_model("llama_deep"), connector, captured)
    step = prompt_step({0: random_prompt(40, seed=5)}, {0: (3, 4, 5)})
    meta = SchedulerOutput(step.step_id, step.rows, step.samples, new_slots=step.new_slots, connector_meta=StepMeta())
    made = runner.execute(meta).result().token_ids.tolist()
    plain = make_runner(tiny_model("llama_deep"))
    assert made == plain.execute(step).result().token_ids.tolist()
    groups = push_groups(len(runner.model.attention_layers)) if captured else [range(1)] * 10
    assert [len(layers) for layers in groups[:3]] == ([4, 4, 1] if captured else [1, 1, 1])
    expected = [call for layers in groups for call in (*["wait"] * len(layers), *["save"] * len(layers))]
    assert connector.calls == ["register", "start", *expected, "saved"]
    assert recorder.num_graphs == len(prompt_graph_sizes(LARGEST, ROWS if captured else 1)) * len(groups)


@both_ways
def test_what_may_load_a_kernel_is_launched_when_no_stream_waits(captured: bool) -> None:
    """A first step of its size, or with so many wanted tokens, and what has no graph."""
    connector = RecordingConnector()
    runner, _, _ = with_graphs(tiny_model("llama"), connector, captured)
    long, blocks = random_prompt(LARGEST + 1, seed=6), tuple(range(1, 8))

    def settled_by(*steps: SchedulerOutput) -> list[int]:
        before = [connector.num_settled]
        for step in steps:
            runner.execute(step).result()
            before.append(connector.num_settled)
        return [after - before for before, after in itertools.pairwise(before)]

    prompts = {1: random_prompt(40, seed=5), 2: random_prompt(30, seed=4)}
    one, two = ({slot: prompts[slot] for slot in slots} for slots in ((1,), (1, 2)))
    places = {1: (8, 9, 10), 2: (11, 12, 13)}
    first, again = (prompt_step(one, places, step_id) for step_id in (0, 1))
    assert settled_by(first, again) == [1, 0]
    assert settled_by(prompt_step(two, places, 2), prompt_step(two, places, 3)) == [1, 0], "two wanted tokens"
    assert settled_by(*(prompt_step({0: long}, {0: blocks}, step_id) for step_id in (4, 5))) == [1, 1], "no graph"
    copy = BlockCopy(8, 14, 4)
    assert settled_by(msgspec.structs.replace(again, step_id=6, copies=(copy,))) == [1]


def test_a_larger_step_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = with_graphs(tiny_model("llama"))
    monkeypatch.setattr(RecordedGraph, "replay", lambda _: pytest.fail("it has no graph"))
    prompt = random_prompt(LARGEST + 1, seed=6)
    made = runner.execute(prompt_step({0: prompt}, {0: tuple(range(1, 8))})).result().token_ids.tolist()
    assert made == reference_greedy(tiny_model("llama"), prompt, 1).token_ids


def test_a_graph_that_cannot_be_launched_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = with_graphs(tiny_model("llama"))

    def fail(graph: RecordedGraph) -> None:
        raise RuntimeError("CUDA error: too many resources requested for launch")

    monkeypatch.setattr(RecordedGraph, "replay", fail)
    before = sum(selection.fallback_counts().values())
    prompt = random_prompt(33, seed=2)
    made = runner.execute(prompt_step({0: prompt}, {0: (7, 3, 11)})).result().token_ids.tolist()
    assert made == reference_greedy(tiny_model("llama"), prompt, 1).token_ids
    assert sum(selection.fallback_counts().values()) == before + 1


def test_who_profiles_sees_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = with_graphs(tiny_model("llama"))
    monkeypatch.setattr(RecordedGraph, "replay", lambda _: pytest.fail("it was told not to"))
    runner.replay_graphs(False)
    runner.execute(prompt_step({0: random_prompt(33, seed=2)}, {0: (7, 3, 11)})).result()


def test_none_are_made_where_none_are_asked_for() -> None:
    runner = make_runner(tiny_model("llama"))
    assert runner.new_prompt_graphs(0) is None
    graphs = runner.new_prompt_graphs(10_000)
    assert graphs is not None
    assert graphs.sizes[-1] == 96, "a step has no more tokens"


def test_rows_for_which_attention_has_no_room_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = with_graphs(tiny_model("llama"), captured=True)
    monkeypatch.setattr(NativeCaptured, "takes", lambda *_: False)
    monkeypatch.setattr(RecordedGraph, "replay", lambda _: pytest.fail("it has no graph"))
    prompt = random_prompt(33, seed=2)
    made = runner.execute(prompt_step({0: prompt}, {0: (7, 3, 11)})).result().token_ids.tolist()
    assert made == reference_greedy(tiny_model("llama"), prompt, 1).token_ids


def test_attention_that_cannot_be_captured_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> torch.Tensor:
        raise ValueError("query rows lie on each other")

    monkeypatch.setattr(NativeCaptured, "attend", refuse)
    runner, recorder, attention = with_graphs(tiny_model("llama"), captured=True)
    assert recorder.num_graphs == len(prompt_graph_sizes(LARGEST)) * len(runner.model.attention_layers)
    prompt = random_prompt(33, seed=2)
    made = runner.execute(prompt_step({0: prompt}, {0: (7, 3, 11)})).result().token_ids.tolist()
    assert made == reference_greedy(tiny_model("llama"), prompt, 1).token_ids
    assert [each.num_filled for each in attention] == [0]


def test_sizes() -> None:
    assert prompt_graph_sizes(2112) == [32, *range(64, 2113, 64)]
    assert prompt_graph_sizes(16) == [16]
    assert prompt_graph_sizes(528, 256) == [256, 320, 384, 448, 512, 528]
