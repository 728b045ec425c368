"""The runner on CPU: steps made by hand, tokens that transformers makes, and the buffers that graphs replay over."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from handmade_steps import BLOCK, MAX_LEN, RecordingConnector, decode_step, make_runner, new_slot, prompt_step

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models import mixture_layer
from tandem.engine.running.at_start.warm_up import extreme_steps
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import graph_sizes
from tandem.engine.scheduling.step import (
    BlockAppend,
    BlockCopy,
    ForkSlot,
    RunnerOutput,
    SampleRow,
    ScheduledRow,
    SchedulerOutput,
    StepMeta,
)
from tandem.kernels.products import few_rows
from tandem.kernels.products.matmul import linear, linear_silu_mul
from tandem.kernels.products.matmul_plans import prompt_slices
from tandem.kernels.reference import few_rows as twins
from tiny_models import random_prompt, reference_greedy, tiny_model


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_two_sequences_make_the_tokens_that_transformers_makes(kind: str) -> None:
    runner = make_runner(tiny_model(kind))
    prompts = {0: random_prompt(33, seed=2), 2: random_prompt(5, seed=1)}
    blocks = {0: (7, 3, 11), 2: (5,)}
    made = {slot: [] for slot in prompts}
    results = [runner.execute(prompt_step(prompts, blocks)).result()]
    appended = {0: 3, 2: 1}
    for step in range(1, 24):
        positions = {slot: len(prompt) + step - 1 for slot, prompt in prompts.items()}
        appends = [BlockAppend(s, appended[s], 12 + s * 3 + appended[s]) for s, p in positions.items() if p % BLOCK == 0
                   and p // BLOCK >= appended[s]]  # fmt: skip
        for append in appends:
            appended[append.slot] += 1
        results.append(runner.execute(decode_step(step, positions, block_appends=tuple(appends))).result())
    for result in results:
        for slot, token in zip(prompts, result.token_ids.tolist(), strict=True):
            made[slot].append(token)
    for slot, prompt in prompts.items():
        assert made[slot] == reference_greedy(tiny_model(kind), prompt, 24).token_ids


def test_a_prompt_in_chunks_samples_only_at_its_end() -> None:
    runner = make_runner(tiny_model("llama"))
    prompt = random_prompt(33, seed=2)
    first = SchedulerOutput(0, (ScheduledRow(1, 0, 16),), (), new_slots=(new_slot(1, prompt, (4, 9, 2)),))
    assert runner.execute(first).result().token_ids.size == 0
    second = SchedulerOutput(1, (ScheduledRow(1, 16, 17),), (SampleRow(0, 1, 33, 0, 0),))
    expected = reference_greedy(tiny_model("llama"), prompt, 1).token_ids
    assert runner.execute(second).result().token_ids.tolist() == expected


def test_forks_share_full_blocks_and_copy_the_tail() -> None:
    runner = make_runner(tiny_model("llama"))
    prompt = random_prompt(20, seed=5)
    step = SchedulerOutput(
        0,
        (ScheduledRow(0, 0, 20),),
        (SampleRow(0, 3, 20, 1, 0), SampleRow(0, 0, 20, 0, 0)),
        new_slots=(new_slot(0, prompt, (4, 9)),),
        forks=(ForkSlot(3, 0, 20, (4, 13), sample_index=1),),
    )
    first = runner.execute(step).result().token_ids.tolist()
    copy = (BlockCopy(9, 13, 4),)
    made = [first, runner.execute(decode_step(1, {3: 20, 0: 20}, copies=copy)).result().token_ids.tolist()]
    made += [runner.execute(decode_step(i, {3: 19 + i, 0: 19 + i})).result().token_ids.tolist() for i in range(2, 8)]
    expected = reference_greedy(tiny_model("llama"), prompt, 8).token_ids
    assert [pair[0] for pair in made] == expected
    assert [pair[1] for pair in made] == expected


def test_prompt_logprobs_predict_the_prompts_own_tokens() -> None:
    runner = make_runner(tiny_model("llama"))
    prompt = random_prompt(20, seed=5)
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=2, num_logprobs=1)
    step = SchedulerOutput(
        0,
        (ScheduledRow(0, 0, 20, prompt_logprobs=True),),
        (SampleRow(0, 0, 20, 0, 0),),
        new_slots=(new_slot(0, prompt, (4, 9), sampling),),
    )
    result: RunnerOutput = runner.execute(step).result()
    entries = result.prompt_logprobs[0]
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    assert all(len(entry.token_ids) == 3 for entry in entries)
    assert result.logprobs[0] is not None
    assert result.logprobs[0].token_ids[0] == result.token_ids[0]


def test_hooks_run_around_each_layer_only_when_the_connector_has_metadata() -> None:
    connector = RecordingConnector()
    runner = make_runner(tiny_model("llama"), connector=connector)
    prompt = {0: random_prompt(5, seed=1)}
    assert connector.calls == ["register"]
    runner.execute(prompt_step(prompt, {0: (1,)}))
    assert connector.calls == ["register", "saved"]
    connector.calls.clear()
    output = decode_step(1, {0: 5}, connector_meta=StepMeta())  # type: ignore[arg-type]
    runner.execute(output)
    num_layers = len(runner.model.attention_layers)
    assert connector.calls == ["start", *["wait", "save"] * num_layers, "saved"]


def test_warm_up_writes_no_kv_and_no_state() -> None:
    runner = make_runner(tiny_model("llama"), max_chunk=40)
    runner.pool.fill_(7.0)
    tokens = runner.state.token_ids_SC.clone()
    runner.warmup()
    assert bool((runner.pool == 7.0).all())
    assert torch.equal(runner.state.token_ids_SC, tokens)


def fused_products_by_twins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has steps of few rows take the way that they take on a GPU; the names of what they call."""
    calls = []

    def called(owner: ModuleType, name: str, twin: Callable[..., Any]) -> None:
        monkeypatch.setattr(owner, name, lambda *args, **named: (calls.append(name), twin(*args, **named))[1])

    def add_mixture(residual: torch.Tensor, norm: tuple[torch.Tensor, float], *experts: Any) -> None:
        normed = twins.normed(residual, *norm).to(residual)
        residual += mixture_layer.mixture(normed, *experts)

    monkeypatch.setattr(few_rows, "serves", lambda x, products: bool(products))
    monkeypatch.setattr(mixture_layer, "takes_few", lambda *sizes: True)

    def norm_linear(x: torch.Tensor, *rest: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        gain, eps, weight = rest[:3]
        return twins.norm_linear(x, gain, eps, weight).to(dtype or x.dtype)

    called(few_rows, "norm_linear", norm_linear)
    called(
        few_rows,
        "norm_linear_silu_mul",
        lambda x, gain, eps, both: linear_silu_mul(twins.normed(x, gain, eps).to(x), both),
    )
    called(few_rows, "add_linear", lambda residual, x, weight, bias: residual.add_(linear(x, weight)))
    called(mixture_layer, "add_mixture", add_mixture)
    return calls


def test_warm_up_has_every_number_of_wanted_tokens_that_has_a_kernel() -> None:
    plain = [len(rows) for rows in extreme_steps(512, 512, 512, 48)]
    steps = list(extreme_steps(512, 512, 512, 48, every_size=True))
    assert [len(rows) for rows in steps] == [*plain, 2, 4, 8, 16, 32, 1, 1, 1]
    assert [rows[0].num_tokens for rows in steps[-3:]] == [64, 128, 256], "as many tokens as are never decodes"
    assert max(rows[0].num_tokens for rows in extreme_steps(100, 100, 512, 48, every_size=True)) == 100


@pytest.mark.parametrize("max_chunk", [8192, 2048, 1000])
def test_warm_up_has_a_large_step_that_is_not_of_whole_tiles(max_chunk: int) -> None:
    """Products of whole tiles end in SiLU and keep nothing between, so others need the most memory."""
    full, _, beside, *_ = extreme_steps(8192, max_chunk, 100000, 256)
    num_full, num_beside = (sum(row.num_tokens for row in rows) for rows in (full, beside))
    assert (num_full, num_beside) == (8192, 8064)
    for num_outputs in range(16, 1 << 16, 16):
        assert not prompt_slices(num_beside, num_outputs)
    assert prompt_slices(num_full, 28672)
    assert max(row.num_tokens for row in beside) <= max_chunk


@pytest.mark.parametrize(("max_num_tokens", "max_chunk"), [(1, 1), (4, 1)])
def test_warm_up_of_steps_of_single_tokens_has_no_prompts(max_num_tokens: int, max_chunk: int) -> None:
    steps = list(extreme_steps(max_num_tokens, max_chunk, 512, max_num_tokens))
    assert steps
    assert all(row.num_tokens == 1 for rows in steps for row in rows)
    assert all(steps), "a step without rows can't be computed"


class TestDecodeBatch:
    def test_padded_buffers_give_the_logits_of_a_step_built_anew(self) -> None:
        runner = make_runner(tiny_model("llama"))
        prompts = {0: random_prompt(33, seed=2), 2: random_prompt(5, seed=1)}
        tokens = runner.execute(prompt_step(prompts, {0: (7, 3, 11), 2: (5,)})).result().token_ids
        before = runner.pool.clone()
        batch = DecodeBatch(runner.model, runner.state, 4, MAX_LEN)
        rows = [ScheduledRow(2, 5, 1), ScheduledRow(0, 33, 1)]
        with torch.inference_mode():
            batch.fill(rows, 4)
            logits = batch.forward(4)[:2]
            batch.store(logits.argmax(-1))
        assert runner.state.token_ids_SC[2, 5] == tokens[1]
        stored = [int(runner.state.token_ids_SC[2, 6]), int(runner.state.token_ids_SC[0, 34])]
        expected = [reference_greedy(tiny_model("llama"), prompts[slot], 2).token_ids[1] for slot in (2, 0)]
        assert stored == expected
        changed = (runner.pool != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [5, 11]  # the padding rows wrote nothing

    @pytest.mark.parametrize("kind", ["llama", "mixtral"])
    def test_a_layer_of_few_rows_has_no_norms_between(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a GPU does with one or two rows, by twins of its products."""
        calls = fused_products_by_twins(monkeypatch)
        runner = make_runner(tiny_model(kind))
        prompt = random_prompt(33, seed=2)
        made = runner.execute(prompt_step({0: prompt}, {0: (7, 3, 11)})).result().token_ids.tolist()
        assert calls == []
        batch = DecodeBatch(runner.model, runner.state, 1, MAX_LEN)
        with torch.inference_mode():
            batch.fill([ScheduledRow(0, 33, 1)], 1)
            made.append(int(batch.forward(1).argmax()))
        assert made == reference_greedy(tiny_model(kind), prompt, 2).token_ids
        of_mlp = ["norm_linear", "add_mixture"] if kind == "mixtral" else ["norm_linear_silu_mul", "add_linear"]
        assert calls == ["norm_linear", "add_linear", *of_mlp] * len(runner.model.attention_layers)

    def test_sizes_hold_every_batch_and_waste_little(self) -> None:
        for most in (1, 3, 64, 256, 700):
            sizes = graph_sizes(most)
            assert sizes == sorted(set(sizes))
            assert sizes[-1] == most
            for rows in range(1, most + 1):
                padded = next(size for size in sizes if size >= rows)
                assert padded - rows < max(8, rows / 3)


def test_a_step_counts_as_decode_only_when_a_graph_can_run_it() -> None:
    plain = decode_step(0, {0: 5, 1: 9})
    assert plain.is_decode
    assert not decode_step(0, {0: 5}, connector_meta=StepMeta()).is_decode  # type: ignore[arg-type]
    assert not decode_step(0, {0: 5}, forks=(ForkSlot(1, 0, 5, (1,), 1),)).is_decode
    assert not SchedulerOutput(0, (ScheduledRow(0, 0, 2),), (SampleRow(0, 0, 2, 0, 0),)).is_decode
    assert not SchedulerOutput(0, (ScheduledRow(0, 0, 1),), ()).is_decode
    with_logprobs = (ScheduledRow(0, 0, 1, prompt_logprobs=True),)
    assert not SchedulerOutput(0, with_logprobs, (SampleRow(0, 0, 1, 0, 0),)).is_decode
