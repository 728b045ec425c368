"""Small steps as graphs would run them, on CPU: chunks of prompts as rows of one token make the usual tokens."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from handmade_steps import BLOCK, RecordingConnector, direct_graphs, make_runner, new_slot, prompt_step

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running import drawing
from tandem.engine.running.graphs.decode_graphs import MAX_CHUNK_READS
from tandem.engine.scheduling.step import ForkSlot, SampleRow, ScheduledRow, SchedulerOutput, StepMeta
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.products import few_rows_attention
from tandem.kernels.products.few_rows_scratch import MOST_ROWS
from tandem.kv_connector.protocol.jobs import StepMoves
from tiny_models import random_prompt, reference_greedy, tiny_model

SLOT_BLOCKS = {0: (7, 3, 11), 2: (5, 6, 2)}


def steps(prompts: dict[int, list[int]], sampling: SamplingParams) -> list[SchedulerOutput]:
    """Slot 0's prompt in two chunks, the second beside all of slot 2's; then both decode, then slot 2 alone."""
    first, second = len(prompts[0]), len(prompts[2])
    entering = {slot: new_slot(slot, prompt, SLOT_BLOCKS[slot], sampling) for slot, prompt in prompts.items()}
    return [
        SchedulerOutput(0, (ScheduledRow(0, 0, BLOCK),), (), new_slots=(entering[0],)),
        SchedulerOutput(
            1,
            (ScheduledRow(2, 0, second), ScheduledRow(0, BLOCK, first - BLOCK)),
            (SampleRow(1, 0, first, 0, 0), SampleRow(0, 2, second, 0, 0)),
            new_slots=(entering[2],),
        ),
        SchedulerOutput(
            2,
            (ScheduledRow(0, first, 1), ScheduledRow(2, second, 1)),
            (SampleRow(0, 0, first + 1, 0, 1), SampleRow(1, 2, second + 1, 0, 1)),
        ),
        SchedulerOutput(3, (ScheduledRow(2, second + 1, 1),), (SampleRow(0, 2, second + 2, 0, 2),)),
    ]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_chunks_as_rows_make_the_same_tokens(kind: str, sampling: SamplingParams) -> None:
    prompts = {0: random_prompt(33, seed=2), 2: random_prompt(5, seed=1)}
    tokens, pools = [], []
    for replayed in (False, True):
        runner = make_runner(tiny_model(kind))
        graphs = direct_graphs(runner)
        if replayed:
            runner._graphs = graphs
        results = [runner.execute(step).result().token_ids.tolist() for step in steps(prompts, sampling)]
        assert graphs.num_runs == (len(results) if replayed else 0)
        tokens.append(results)
        pools.append(runner.pool)
    assert tokens[0] == tokens[1]
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=1e-5)
    if sampling.greedy:
        assert [step[0] for step in tokens[1][1:3]] == reference_greedy(tiny_model(kind), prompts[0], 2).token_ids


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=3, presence_penalty=0.7)]
)
@pytest.mark.parametrize("lacking", ["replay", "way to the host"])
def test_a_replay_without_memory_is_computed_otherwise(
    monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams, lacking: str
) -> None:
    prompts = {0: random_prompt(33, seed=2), 2: random_prompt(5, seed=1)}
    tokens = []
    for fails in (False, True):
        runner = make_runner(tiny_model("llama"))
        runner._graphs = graphs = direct_graphs(runner)
        where = (graphs.batch, "store_most_likely") if sampling.greedy else (drawing, "to_host")
        where = (graphs, "run") if lacking == "replay" else where
        for step in steps(prompts, sampling):
            with monkeypatch.context() as patch:
                if fails:
                    patch.setattr(*where, once_without_memory(*where))
                tokens.append(runner.execute(step).result().token_ids.tolist())
        assert (runner.counters["steps_out_of_memory"] > 0) == fails
    half = len(tokens) // 2
    assert tokens[:half] == tokens[half:]


def once_without_memory(owner: object, name: str) -> Callable[..., object]:
    """The function, that raises the first time that it has done its work."""
    work, lacks = getattr(owner, name), iter([True])

    def lacking(*args: object) -> object:
        done = work(*args)
        if next(lacks, False):
            raise torch.OutOfMemoryError("tried to allocate more than there is")
        return done

    return lacking


def test_which_steps_are_replayed() -> None:
    runner = make_runner(tiny_model("llama"))
    graphs = direct_graphs(runner)
    assert graphs.takes([ScheduledRow(0, 0, runner.max_graph_rows)])
    assert not graphs.takes([ScheduledRow(0, 0, runner.max_graph_rows), ScheduledRow(1, 9, 1)])
    assert graphs.takes([ScheduledRow(0, MAX_CHUNK_READS // 4, 2), ScheduledRow(1, 10**6, 1)])
    assert not graphs.takes([ScheduledRow(0, MAX_CHUNK_READS // 2, 4)])
    chunk, sample = ScheduledRow(0, 0, 8), SampleRow(0, 0, 8, 0, 0)
    assert SchedulerOutput(0, (chunk,), (sample,)).is_only_rows
    assert not SchedulerOutput(0, (chunk,), (sample, SampleRow(0, 1, 8, 1, 0))).is_only_rows
    assert not SchedulerOutput(0, (chunk,), (sample,), forks=(ForkSlot(1, 0, 8, (1,), 1),)).is_only_rows
    assert not SchedulerOutput(0, (chunk,), (), connector_meta=StepMeta()).is_only_rows
    assert not SchedulerOutput(0, (ScheduledRow(0, 0, 8, prompt_logprobs=True),), (sample,)).is_only_rows


def test_tokens_of_one_prompt_never_run_in_one_launch() -> None:
    """In the attention of few rows none sees what another stores."""
    runner = make_runner(tiny_model("llama"))
    graphs = direct_graphs(runner)
    for num_tokens in range(2, MOST_ROWS + 1):
        chunk = [ScheduledRow(0, position, 1) for position in range(num_tokens)]
        decodes = [ScheduledRow(slot, 40, 1) for slot in range(num_tokens)]
        padding = [ScheduledRow(-1, 0, 1)] * num_tokens
        assert graphs.graph_for(chunk)[0] > MOST_ROWS
        assert graphs.graph_for([*chunk[:2], *decodes[1:]])[0] > MOST_ROWS
        least = next(size for size in graphs.sizes if size >= num_tokens)
        assert graphs.graph_for(decodes) == graphs.graph_for(padding) == (least, "plain")
    small = direct_graphs(runner, MOST_ROWS)
    assert small.takes([ScheduledRow(slot, 40, 1) for slot in range(MOST_ROWS)])
    assert not small.takes([ScheduledRow(0, 0, 2)])


def test_few_tokens_of_one_prompt_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where decodes of few rows attend in one launch."""
    monkeypatch.setattr(few_rows_attention, "has_kernel", lambda device: True)
    runner = make_runner(tiny_model("llama"))
    graphs = direct_graphs(runner, MOST_ROWS)
    assert graphs.num_graphs == len(graphs.sizes) + len(graphs.sizes_of["following"])
    for num_tokens in range(2, MOST_ROWS + 1):
        chunk = [ScheduledRow(0, position, 1) for position in range(num_tokens)]
        decodes = [ScheduledRow(slot, 40, 1) for slot in range(num_tokens)]
        assert graphs.takes(chunk)
        assert graphs.takes([ScheduledRow(0, 0, num_tokens)])
        least = next(size for size in graphs.sizes if size >= num_tokens)
        assert graphs.graph_for(chunk) == graphs.graph_for([*chunk[:2], *decodes[2:]]) == (least, "following")
        assert graphs.graph_for(decodes) == (least, "plain")
    many = [ScheduledRow(0, position, 1) for position in range(MOST_ROWS + 1)]
    assert not graphs.takes(many)
    assert direct_graphs(runner, 2 * MOST_ROWS).graph_for(many) == (16, "plain")


def test_a_steps_words_may_be_filled_anywhere() -> None:
    """Also those of a size that came first in a pass without gradients."""
    runner = make_runner(tiny_model("llama"))
    batch, row = direct_graphs(runner, MOST_ROWS).batch, ScheduledRow(1, 5, 1)
    with torch.inference_mode():
        batch.fill([row], 4)
    for size in (4, 3):
        batch.fill([row] * 2, size)
        assert batch._words.buffer(size)[:, :size].tolist() == [[1, 1, *[-1] * (size - 2)], [5, 5, *[0] * (size - 2)]]


def test_attention_is_told_of_rows_that_follow() -> None:
    """Of steps launched kernel by kernel and of graphs' passes: they may be of few rows."""
    runner = make_runner(tiny_model("llama"))
    runner.execute(prompt_step({0: random_prompt(9, seed=1), 1: random_prompt(9, seed=2)}, {0: (1,), 1: (2,)}))
    drafts = [ScheduledRow(0, 9 + place, 1) for place in range(3)]
    assert runner._inputs.build(drafts).metadata.rows_follow
    assert not runner._inputs.build([drafts[0], ScheduledRow(1, 9, 1)]).metadata.rows_follow
    batch, seen = direct_graphs(runner, MOST_ROWS).batch, []
    for follows in (False, True):
        batch.fill(drafts, 4)
        handle = runner.model.register_forward_pre_hook(
            lambda *_: seen.append(get_forward_context().any_metadata().rows_follow)
        )
        with torch.inference_mode():
            batch.forward(4, rows_follow=follows)
        handle.remove()
    assert seen == [False, True]


def test_a_step_whose_pushes_come_behind_it_is_replayed_between_its_hooks() -> None:
    diary = RecordingConnector()
    runner = make_runner(tiny_model("llama"), connector=diary)
    runner._graphs = graphs = direct_graphs(runner)
    (first, *_), behind = steps({0: random_prompt(33, seed=2), 2: random_prompt(5, seed=1)}, SamplingParams()), []
    for by_layer in (False, True):
        diary.calls.clear()
        meta = StepMoves(0, by_layer=by_layer)
        runner.execute(msgspec.structs.replace(first, connector_meta=meta))
        behind.append((graphs.num_runs, diary.calls[0], diary.calls[-1], "save" in diary.calls))
    assert behind == [(1, "start", "saved", False), (1, "start", "saved", True)]


def test_dummy_steps_write_nothing() -> None:
    runner = make_runner(tiny_model("llama"))
    runner._graphs = graphs = direct_graphs(runner)
    runner.pool.fill_(7.0)
    runner.run_dummy([ScheduledRow(0, 0, 1), ScheduledRow(0, 0, 9)])
    assert graphs.num_runs == 1
    assert bool((runner.pool == 7.0).all())
    assert not runner.state.token_ids_SC.any()
