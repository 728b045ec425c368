"""Scheduler, step loop, late device and what a client would have received, checked after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from fake_connector import FakeConnector
from fake_tiers import FakeTiers

from fake_runner import FakeRunner, next_candidates, next_token, stop_ids
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.hashing import Secrecy, root_hash
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef, FirstToken
from tandem.engine.scheduling.beams.search import BeamSearch
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.ports import NoShares
from tandem.engine.scheduling.prompt_order import PromptOrder
from tandem.engine.scheduling.request import (
    BeamsEvent,
    EngineEvent,
    FailedEvent,
    PromptLogprobsEvent,
    Request,
    TokensEvent,
)
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.speculation.draft_model import DraftedTokens
from tests.fakes.made_requests import made_request

BLOCK = 4
EOS = 7
MAX_MODEL_LEN = 64
SALTS = (b"", b"tenant")
ADAPTERS = (0, 1, 2, 3)  # 0: none
TierSizes = tuple[int, int, int, int]  # host blocks, disk blocks, lag, bad_every: as FakeTiers takes them


def root_for_salt(salt: bytes) -> bytes:
    return root_hash(b"model", salt)


def expected(
    prompt: Sequence[int], sample_index: int, sampling: SamplingParams, num_prior: int = 0
) -> tuple[list[int], str]:
    """Output and finish reason, straight from the definition: one sequence, no cache, no batch."""
    tokens: list[int] = []
    while True:
        banned = stop_ids(sampling, [EOS]) if num_prior + len(tokens) < sampling.min_tokens else set()
        tokens.append(next_token((*prompt, *tokens), sample_index, banned))
        if tokens[-1] in stop_ids(sampling, [EOS]):
            return tokens, "stop"
        if num_prior + len(tokens) >= sampling.max_tokens or len(prompt) + len(tokens) >= MAX_MODEL_LEN:
            return tokens, "length"


def expected_beams(prompt: Sequence[int], sampling: SamplingParams) -> list[tuple[list[int], str]]:
    """The same of each sample of a beam search."""
    search = BeamSearch(sampling, stop_ids(sampling, [EOS]), min(sampling.max_tokens, MAX_MODEL_LEN - len(prompt)))
    while not search.is_over:
        outputs = [[each.token_id for each in beam.path()] for beam in search.beams]
        search.advance([next_candidates((*prompt, *known), len(known), sampling, [EOS]) for known in outputs])
    return [([b.token_id for b in h.beam.path()], h.beam.finish_reason or "") for h in search.hypotheses]


class NobodyAgrees(NoShares):
    """Whoever is asked for help with a prompt declines."""

    def next_part(self, request: Request, room: int) -> tuple[int, int] | None:
        request.go_alone()
        return request.num_computed_tokens, request.num_launched_tokens


class HalfRight:
    """A `Guesser` of what the fake model will say, and now and then of something else."""

    num_speculative_tokens = 4

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def could_guess(self, request: Request, count: int) -> int:
        return count

    def seconds(self, num_sequences: int) -> float:
        return 0.0

    def keep(self, running: Collection[Request]) -> None: ...

    def guess(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: self._guesses(request, count) for request, count in wanted.items()}

    def _guesses(self, request: Request, count: int) -> list[int]:
        known = request.known_token_ids().tolist()
        start = len(known)
        while len(known) < start + count:
            num_output = len(known) - request.prompt.num_true_tokens
            sampling = request.prompt.sampling
            banned = stop_ids(sampling, [EOS]) if num_output < sampling.min_tokens else set()
            token = next_token(known, request.sample_indices[0], banned)
            known.append(token if self._rng.random() < 0.75 else self._rng.randrange(13))
        return known[start:]


class Harness:
    """`external` counts block references that a test holds outside of the scheduler."""

    def __init__(
        self,
        num_blocks: int = 32,
        pipelined: bool = True,
        caching: bool = True,
        keeps_finished: bool = True,
        limits_prompt_work: bool = False,
        pool: BlockPool | None = None,
        prompt_order: PromptOrder | None = None,
        tiers: TierSizes | None = None,
        clock: StepClock | None = None,
        num_adapter_slots: int = 2,
        speculates: bool = False,
        draft: FakeRunner | None = None,
        window: int = 0,
        num_windows: int = 0,
        **options: float,
    ) -> None:
        """`speculates`: half of what is guessed is right; `draft`: what it draws is guessed. `window`: how many
        tokens every layer of the model sees, itself included; 0: all. With `num_windows`, how many window blocks a
        block has, some layers see all, the others `window` tokens."""
        self.options = SchedulerOptions(
            **{"max_num_seqs": 8, "max_num_batched_tokens": 16, **options}  # type: ignore[arg-type]
        )
        slides = BlockWindow(window, BLOCK, num_windows) if window else NO_WINDOW
        self.pool = pool or BlockPool(num_blocks, caching, window=slides)
        self.connector = FakeConnector(self.pool, keeps_finished)
        self.runner = FakeRunner(self.pool.num_blocks, BLOCK, self.options.max_num_seqs, [EOS])
        self.runner.window, self.runner.num_windows = slides.num_tokens, num_windows
        self.tiers = None if tiers is None else FakeTiers(self.pool, self.runner, *tiers)
        drafted = None if draft is None else DraftedTokens(draft, 4, BLOCK, MAX_MODEL_LEN, StepClock(lambda: 0.0))
        self.scheduler = Scheduler(
            SchedulerState(
                self.options,
                self.pool,
                block_size=BLOCK,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=[EOS],
                root_for_salt=root_for_salt,
                limits_prompt_work=limits_prompt_work,
                connector=self.connector,
                prompt_order=prompt_order,
                tiers=None if self.tiers is None else self.tiers.manager,
                clock=clock,
                num_adapter_slots=num_adapter_slots,
                shares=NobodyAgrees(),
            ),
            guesser=HalfRight() if speculates else drafted,
        )
        self.core = EngineCore(self.scheduler, self.runner, pipelined, self.runner.find_saturated)
        self.external: Counter[int] = Counter()
        self.requests: dict[str, Request] = {}
        self.samples: dict[str, tuple[int, ...]] = {}  # as submitted: forks take theirs along
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.failed: dict[str, str] = {}
        self.num_faults = 0  # as many are expected
        self.prompt_logprobs: dict[str, list[int]] = {}  # positions
        self._arrivals = 0

    # --- in -------------------------------------------------------------------------------------------------

    def request(self, name: str, prompt: Sequence[int], samples: Sequence[int] = (0,), **settings: Any) -> Request:
        """`settings`: fields of Prompt by name, the salt, an adapter by number, how many nodes may compute it;
        everything else goes to SamplingParams (EOS is ignored)."""
        self._arrivals += 1
        fields = ("priority", "mode", "num_prior_output_tokens", "use_prefix_cache", "targets", "waited_s")
        own = {key: settings.pop(key) for key in fields if key in settings}
        adapter, num_nodes = settings.pop("adapter", 0), settings.pop("num_nodes", 1)
        own["adapter"] = AdapterRef("", bytes([adapter])) if adapter else None
        own["secrecy"] = Secrecy(settings.pop("salt", b""))  # without a context: here KV is of tokens alone
        sampling = SamplingParams(**{"ignore_eos": True, "seed": adapter, **settings})
        tokens = np.array(prompt, np.int32)
        request = made_request(name, tokens, sampling, samples, arrival=self._arrivals, **own)
        if num_nodes > 1:
            request.get_help(num_nodes)
        self.requests[name] = request
        self.samples[name] = tuple(samples)
        return request

    def add(self, name: str, prompt: Sequence[int], samples: Sequence[int] = (0,), **settings: Any) -> Request:
        request = self.request(name, prompt, samples, **settings)
        self.scheduler.state.add(request)
        return request

    def commit(self, request: Request, block_ids: list[int]) -> None:
        """As a decode node does when a peer has written the prompt's KV into `block_ids`."""
        prompt = request.prompt.token_ids.tolist()
        if request.prompt.sampling.beam_width:
            candidates = next_candidates(prompt, 0, request.prompt.sampling, [EOS])
            self.scheduler.beams.add_committed(request, block_ids, candidates, 0)
            return
        first_tokens = []
        for sample in request.sample_indices:
            token = expected(prompt, sample, request.prompt.sampling)[0][0]
            ended = token in stop_ids(request.prompt.sampling, [EOS]) or request.prompt.sampling.max_tokens == 1
            self.tokens[request.key.request_id, sample] = [token]
            if ended:
                self.finished[request.key.request_id, sample] = "first"
            first_tokens.append(FirstToken(sample, token, ended))
        self.scheduler.state.add_committed(request, block_ids, first_tokens)

    # --- steps ----------------------------------------------------------------------------------------------

    def step(self) -> list[EngineEvent]:
        events = self.core.step()
        for event in events:
            self._take(event)
        if self.tiers is not None:
            self.tiers.turn(is_idle=not self.core.has_work())
        self.check()
        return events

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def check(self) -> None:
        roots = [root_for_salt(salt) for salt in SALTS]
        held = self.external + self.connector.references
        if self.tiers is not None:
            held += self.tiers.manager.promoter.references()
            self.tiers.check(roots)
        self.scheduler.state.check_integrity(held)
        assert self.scheduler.state.num_faults <= self.num_faults, "a request was given up for an error of ours"
        self.runner.check_cached(self.pool, roots)

    def _take(self, event: EngineEvent) -> None:
        name = event.request.key.request_id
        if isinstance(event, TokensEvent):
            key = (name, event.sample_index)
            assert key not in self.finished, "a token came after the end"
            assert name not in self.failed, "a token came after the failure"
            tokens = self.tokens.setdefault(key, [])
            num_prior = event.request.prompt.num_prior_output_tokens
            assert event.output_index == num_prior + len(tokens), "a token is missing or doubled"
            assert event.logprobs is not None
            assert [each.token_ids for each in event.logprobs] == [(each,) for each in event.token_ids]
            tokens += event.token_ids
            if event.finish_reason:
                self.finished[key] = event.finish_reason
            assert event.stop_token_id == (event.token_ids[-1] if event.finish_reason == "stop" else None)
        elif isinstance(event, BeamsEvent):
            assert name not in self.failed, "beams came after the failure"
            for found in event.outputs:
                assert (name, found.sample_index) not in self.finished, "a sample ended twice"
                self.tokens[name, found.sample_index] = list(found.token_ids)
                self.finished[name, found.sample_index] = found.finish_reason
        elif isinstance(event, FailedEvent):
            assert name not in self.failed, "a request failed twice"
            self.failed[name] = event.code
        else:
            assert isinstance(event, PromptLogprobsEvent)
            assert name not in self.prompt_logprobs, "prompt logprobs came twice"
            assert not any(key[0] == name for key in self.tokens), "prompt logprobs came after a token"
            self.prompt_logprobs[name] = [entry.rank for entry in event.entries]

    # --- verdicts -------------------------------------------------------------------------------------------

    def assert_output(self, name: str, sample: int = 0) -> None:
        """The sample ran to its end and got exactly what the definition says."""
        request = self.requests[name]
        prior = request.prompt.num_prior_output_tokens
        if request.prompt.sampling.beam_width:
            found = expected_beams(request.prompt.token_ids.tolist(), request.prompt.sampling)
            assert (self.tokens[name, sample], self.finished[name, sample]) == [*found, *[([], "stop")] * 8][sample]
            return
        tokens, reason = expected(request.prompt.token_ids.tolist(), sample, request.prompt.sampling, prior)
        assert self.tokens.get((name, sample)) == tokens
        assert self.finished[name, sample] in (reason, "first")

    def abort_one(self, chance: random.Random) -> None:
        """Aborts some request, and forgets it."""
        aborted = chance.choice(list(self.requests))
        self.scheduler.state.abort(AttemptKey(aborted, 0))
        del self.requests[aborted]

    def run_to_the_end(self) -> None:
        """Runs all requests that aren't forgotten to their right ends, until nothing is copied any more."""
        self.run()
        self.settle()
        for name in self.requests:
            self.assert_output(name)
        self.assert_empty()

    def settle(self, limit: int = 300) -> None:
        """Idle turns, until nothing is copied any more."""
        for _ in range(limit):
            self.step()
            if self.tiers is None or not self.tiers.is_busy:
                return
        raise AssertionError("the tiers copy for ever")

    def assert_empty(self) -> None:
        assert not +self.external, "the test holds blocks"
        self.scheduler.assert_empty()


def prompt_that_stops(earliest: int, latest: int) -> tuple[list[int], list[int]]:
    """A prompt whose output meets EOS first at an index in the range, and that output."""
    for seed in range(1000):
        tokens, reason = expected([seed, 1, 4], 0, SamplingParams(max_tokens=30))
        if reason == "stop" and earliest <= len(tokens) - 1 <= latest:
            return [seed, 1, 4], tokens
    raise AssertionError("no such prompt")


def receive(
    harness: Harness, name: str, prompt: list[int], samples: tuple[int, ...] = (0,), **sampling: int
) -> Request:
    """A peer's KV: hits that the node has, and granted blocks that the peer writes."""
    request = harness.request(name, prompt, samples, mode="decode", **sampling)
    harness.scheduler.state.kv.extend_hashes(request)
    hits = harness.pool.match_prefix(request.block_hashes)
    harness.pool.touch(hits)
    granted = harness.pool.allocate_grantable(-(-len(prompt) // BLOCK) - len(hits))
    assert granted is not None
    harness.runner.peer_blocks |= set(granted)
    start = len(hits) * BLOCK
    for position in range(start, len(prompt)):
        block_id = granted[(position - start) // BLOCK]
        harness.runner.memory[block_id][position % BLOCK] = tuple(prompt[: position + 1])
    harness.runner.peer_blocks -= set(granted)
    harness.commit(request, hits + granted)
    harness.check()
    return request
