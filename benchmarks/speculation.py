"""Decoding with tokens guessed ahead beside decoding without: the same engine, requests and lengths, in one run.

    python benchmarks/speculation.py [MODEL_FOLDER] [--load-format dummy] [--drafts 3 4] [--chance 0.7] [--streams 1 64]
                                     [--tokens 256] [--max-model-len 2048] [--eager]
                                     [--draft-model FOLDER | --head FOLDER]

With a draft model or a head its steps take their time; without one guesses are looked up, which takes next to
none. Dummy weights say nothing that could be guessed, so acceptance is imposed: each draft counts as right with
probability `--chance`, whatever the model draws. The work is that of real drafts; the text is nonsense. `right` is the
share of drafts that counted, `guess ms` what guessing itself takes a step, `idle` how long the device waits for the
host behind a step with drafts, as the node measures it.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tandem.deploy
import tandem.engine.scheduling.scheduler as scheduler_module
from engine import Engine, make_request
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running.at_start.step_measure import measure_step_times
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.planner import StepPlan
from tandem.engine.scheduling.request import FailedEvent, Request, TokensEvent
from tandem.engine.scheduling.speculation.lookups import LookedUpTokens
from tandem.engine.scheduling.speculation.options import PromptLookup, read_speculative_config
from tandem.engine.scheduling.speculation.speculator import Speculator
from tandem.engine.scheduling.speculation.verdicts import Run, runs_of

DEMO = str(Path(tandem.deploy.__file__).parent / "demo_model")
NUM_PROMPT_TOKENS = 128
LOOKUP = '{"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
DRAFT = '{"method": "draft_model", "model": "%s", "num_speculative_tokens": 16}'
MTP = '{"method": "mtp", "num_speculative_tokens": 16}'
HEAD = '{"method": "eagle3", "model": "%s", "num_speculative_tokens": 16}'


class AnyTokens(LookedUpTokens):
    """Guesses anything, after it has looked."""

    def __init__(self) -> None:
        options = read_speculative_config(LOOKUP)
        assert isinstance(options, PromptLookup)
        super().__init__(options)
        self._random = random.Random(1)

    def could_guess(self, request: Request, count: int) -> int:
        super().could_guess(request, count)  # takes its time as well
        return count

    def guess(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        return {request: [self._random.randrange(10, 400) for _ in range(count)] for request, count in wanted.items()}


class Imposed(Speculator):
    """Draws which guesses are right, in place of the device, and makes them so."""

    def __init__(self, engine: Engine, num_drafts: int, chance: float) -> None:
        self._num_drafts = num_drafts
        scheduler = engine.core.scheduler
        guesser = AnyTokens() if engine.drafting is None else engine.drafting.guesser
        super().__init__(guesser, scheduler.state, lambda: scheduler.pace.lead_s)
        self._chance, self._random = chance, random.Random(0)
        self.seconds, self.num_plans = 0.0, 0
        scheduler_module.runs_of = self.runs_of  # type: ignore[attr-defined]

    @property
    def num_speculative_tokens(self) -> int:
        return self._num_drafts

    def add_drafts(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        guess_s = super().add_drafts(plan)
        self.seconds += time.perf_counter() - began
        self.num_plans += 1
        return guess_s

    def stall_s_beside(self, num_streams: int) -> float:
        """For how long the device waited lately behind a step of so many streams with drafts; 0.0: it had none."""
        return self._gains[num_streams.bit_length()].stall_s

    def runs_of(self, drafts: Sequence[int], token_ids: list[int]) -> list[Run]:
        is_right = False
        for index, draft in enumerate(drafts):
            if draft >= 0 and (is_right or drafts[index - 1] < 0):
                is_right = self._random.random() < self._chance
                token_ids[index - 1] = draft if is_right else (draft + 1) % 400
        return runs_of(drafts, token_ids)


class Decoded(NamedTuple):
    """What was made while all streams ran."""

    seconds: float
    num_tokens: int
    num_steps: int

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def decode(engine: Engine, streams: int, tokens: int) -> Decoded:
    """From when all have their first token until the first ends: with drafts some end sooner than others, and what the
    rest takes is a figure of fewer streams."""
    scheduler = engine.core.scheduler
    rng = np.random.default_rng(streams)
    begun: set[str] = set()
    for index in range(streams):
        prompt = rng.integers(10, 400, NUM_PROMPT_TOKENS, dtype=np.int32)
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        scheduler.state.add(make_request(f"r{index}", prompt, sampling))
    began_at, num_steps, num_tokens = 0.0, 0, 0
    decoded: Decoded | None = None
    while engine.core.has_work():
        for event in engine.core.step():
            assert not isinstance(event, FailedEvent), event
            if isinstance(event, TokensEvent):
                begun.add(event.request.key.request_id)
                num_tokens += len(event.token_ids)
        if len(begun) == streams and not began_at:
            began_at, num_steps, num_tokens = time.perf_counter(), scheduler.num_steps, 0
        if began_at and decoded is None and len(scheduler.state.queues.running) < streams:
            decoded = Decoded(time.perf_counter() - began_at, num_tokens, scheduler.num_steps - num_steps)
    assert decoded is not None, "all streams have ended"
    return decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--chance", type=float, default=0.7)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--draft-model", default="", help="a folder; loaded as the model is")
    parser.add_argument("--head", default="", help="the folder of an EAGLE-3 head; loaded as the model is")
    parser.add_argument("--mtp", action="store_true", help="guess by the layer in the model's own checkpoint")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    config, clock = DRAFT % args.draft_model if args.draft_model else "", StepClock(time.monotonic)
    if args.head:
        config = HEAD % args.head
    if args.mtp:
        config = MTP
    engine = Engine(
        args.model, args.load_format, not args.eager, args.max_model_len, speculative_config=config, clock=clock
    )
    if engine.on_gpu:
        times = engine.core.scheduler.state.step_times
        measure_step_times(engine.runner, 1024, times)
        print("step of rows, ms:", *(f"{rows}: {1e3 * times.seconds(rows):.2f}" for rows in (16, 64, 128, 256, 512)))
        if engine.drafting is not None:
            times = engine.drafting.guesser.times
            print("of the draft, ms:    ", *(f"{rows}: {1e3 * times.seconds(rows):.2f}" for rows in (16, 64, 128)))
    decode(engine, 2, 16)
    names = ("drafts", "ms/token", "tok/s", "speed", "steps", "right", "guess ms", "idle ms")
    print("streams", *(f"{name:>8}" for name in names))
    for streams in args.streams:
        engine.core.scheduler.speculator = None
        plain = decode(engine, streams, args.tokens)
        show(streams, 0, plain, plain, "", "", "")
        for num_drafts in args.drafts:
            engine.core.scheduler.speculator = guesser = Imposed(engine, num_drafts, args.chance)
            drafted = decode(engine, streams, args.tokens)
            share = guesser.counters["spec_accepted_tokens"] / max(1, guesser.counters["spec_draft_tokens"])
            host_ms, idle_ms = 1e3 * guesser.seconds / guesser.num_plans, 1e3 * guesser.stall_s_beside(streams)
            rest = f"{share:.2f}", f"{host_ms:.3f}", f"{idle_ms:.3f}"
            show(streams, num_drafts, drafted, plain, *rest)


def show(streams: int, drafts: int, made: Decoded, plain: Decoded, *rest: str) -> None:
    print(f"{streams:7} {drafts:8} {1e3 * streams / made.rate:8.3f} {made.rate:8.0f} {made.rate / plain.rate:8.2f} "
          f"{made.num_steps:8}", *(f"{each:>8}" for each in rest), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
