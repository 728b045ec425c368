"""Tokens guessed ahead on a GPU: rows of decode graphs, whose output is that of steps without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from handmade_steps import new_slot
from tokenizers import Tokenizer

import tandem.deploy
from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import SampleRow, ScheduledRow, SchedulerOutput
from tandem.engine.scheduling.times.step_times import StepTimes
from tandem.node.setup import load

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = "cuda"
DEMO = Path(tandem.deploy.__file__).parent / "demo_model"
GUESSING = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
DRAFTING = json.dumps({"method": "draft_model", "model": str(DEMO), "num_speculative_tokens": 3})
CODE = """def read_lines(path, encoding):
    with open(path, encoding=encoding) as file:
        return file.readlines()

"""
ASKED = {
    "greedy": SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=200, temperature=0.5, seed=3, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=60, temperature=0.0, frequency_penalty=0.05, ignore_eos=True),
}


def serve(speculative_config: str) -> tuple[dict[str, list[int]], dict[str, int], dict[str, float]]:
    """Outputs and steps of each request, one after another, and what became of guesses. In float32, where two tokens
    are hardly ever equal but for the last bits."""
    options = node_options("unified", DEMO, device="cuda", block_size=64, speculative_config=speculative_config)
    node = Node(type(options)(**{**vars(options), "model": ModelOptions(str(DEMO), dtype="float32")}))
    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(CODE * 4).ids
    outputs, steps = {}, {}
    with client_of([node]) as client:
        scheduler = node.process.logic.scheduler
        for name, sampling in ASKED.items():
            before = scheduler.num_steps
            result = client.submit(name, prompt, sampling, decode=node.info)
            client.wait(result)
            assert result.failed is None, result.failed
            outputs[name], steps[name] = result.output(), scheduler.num_steps - before
        return outputs, steps, scheduler.spec_counters


def test_outputs_are_those_without_guesses() -> None:
    plain, plain_steps, _ = serve("")
    guessed, steps, counters = serve(GUESSING)
    print(f"steps without: {plain_steps}, with: {steps}, {counters}")
    assert guessed == plain
    assert steps["greedy"] <= plain_steps["greedy"] / 1.5


def test_a_draft_model_changes_no_output() -> None:
    plain, _, _ = serve("")
    guessed, steps, counters = serve(DRAFTING)
    print(f"steps: {steps}, {counters}")
    assert guessed == plain


def test_a_draft_model_that_is_the_model_is_nearly_always_right() -> None:
    """Parts of prompts, rows of one and of two tokens, as graphs: the same tokens as the model's own. Nothing is known
    of what steps take here, so that all that is likely is guessed, whatever it costs."""
    options = node_options("unified", DEMO, device="cuda", block_size=64, speculative_config=DRAFTING)
    node = Node(type(options)(**{**vars(options), "model": ModelOptions(str(DEMO), dtype="float32")}))
    assert node.process.drafting is not None
    prompt = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(CODE * 4).ids
    with client_of([node]) as client:
        scheduler = node.process.logic.scheduler
        scheduler.state.step_times = StepTimes()
        for name in ("greedy", "drawn"):
            client.submit(name, prompt, ASKED[name], decode=node.info)
        client.wait()
        counters = scheduler.spec_counters
        print(counters)
        assert counters["spec_accepted_tokens"] > 0.9 * counters["spec_draft_tokens"] > 200


@pytest.mark.parametrize("graphs", [True, False])
def test_few_rows_of_a_sequence_see_each_other(graphs: bool) -> None:
    """In 16 bits, where decodes of few rows attend in one launch, in which none sees what another stores."""
    options = node_options("unified", DEMO, device=DEVICE, block_size=64)
    loaded = load(options)
    pool = allocate_pool(loaded.layout, 16, loaded.device)
    runner = ModelRunner(loaded.model, pool, options.scheduler, 64, 512, ())
    runner.warmup()
    if graphs:
        runner.capture_decode_steps()
    tokens = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(CODE * 4).ids[:70]
    asked = SamplingParams(temperature=0.0, num_logprobs=0)

    def step(slot: int, start: int, count: int) -> list[float]:
        """Checks so many tokens from `start` on, as drafts behind the first; how likely what each draws is."""
        rows = [ScheduledRow(slot, start + place, 1) for place in range(count)]
        samples = [SampleRow(place, slot, row.start + 1, 0, 1, tokens[row.start]) for place, row in enumerate(rows)]
        result = runner.execute(SchedulerOutput(0, tuple(rows), tuple(samples))).result()
        return [entry.logprobs[0] for entry in result.logprobs if entry is not None]

    for slot in (1, 2):
        entering = new_slot(slot, tokens[:50], (2 * slot, 2 * slot + 1), asked)
        runner.execute(SchedulerOutput(0, (ScheduledRow(slot, 0, 50),), (), new_slots=(entering,))).result()
    for start, count in ((50, 2), (52, 4), (56, 8)):
        alone = [step(2, start + place, 1)[0] for place in range(count)]
        assert step(1, start, count) == pytest.approx(alone, abs=0.1)
