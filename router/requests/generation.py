"""One prompt of one HTTP request on its way: the machine that decides, the samples' text, and who listens."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Protocol

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.wire.parts import Targets, TokenLogprobs
from tandem.router.placing.placement import Placement
from tandem.router.recent.story import MOST_TEXT, RequestStory
from tandem.router.requests.actions import RequestSpec
from tandem.router.requests.machine import RequestMachine
from tandem.router.requests.sample_output import ChatLogprobs, Piece, SampleOutput, TextLogprobs
from tandem.router.text.completion import PromptPlan, echo_text
from tandem.router.text.openai_api import CompletionBody
from tandem.router.text.request_headers import RequestHeaders
from tandem.router.text.tokenizer import PROMPT_TAIL, Tokenizer, names_of

PROMPT_OF_SEVERAL = re.compile(r"-p\d+$")  # what CompletionService adds to a completion's id
ID_DIGITS = 32  # of an id that `Asked` makes up


class GenerationListener(Protocol):
    """What takes a generation's output, on the event loop. After `finished` or `failed` nothing more comes."""

    def pooled(self, prompt_index: int, values: bytes) -> None:
        """Takes what a model that pools made of the prompt: float32 little-endian."""

    def prompt_logprobs(self, prompt_index: int, entries: tuple[TokenLogprobs, ...]) -> None: ...

    def piece(self, prompt_index: int, sample_index: int, piece: Piece) -> None: ...

    def finished(self, prompt_index: int) -> None: ...

    def failed(self, prompt_index: int, error: TandemError) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    """One prompt's generation. Times are monotonic seconds."""

    prompt_index: int
    plan: PromptPlan
    machine: RequestMachine
    samples: list[SampleOutput]
    listener: GenerationListener
    started_at: float
    story: RequestStory
    node_ids: dict[str, None] = field(default_factory=dict)  # of all nodes that were asked, in that order
    submitted_ids: set[str] = field(default_factory=set)  # every sub-request id that nodes have heard of
    placed_at: float | None = None  # for the first time
    first_token_at: float | None = None
    last_token_at: list[float] = field(default_factory=list)  # per sample; 0.0 before its first token
    placement: Placement | None = None  # the first
    moved_samples: set[int] = field(default_factory=set)  # to another node, and no token has come from there yet

    @property
    def num_tokens(self) -> int:
        """Counts its prompt, and all that has come out."""
        return self.plan.num_prompt_tokens + sum(sample.num_tokens for sample in self.samples)


class GenerationFactory:
    """Makes generations of plans: a machine and the samples' output for each."""

    def __init__(self, options: RouterOptions, tokenizer: Tokenizer) -> None:
        self._options, self._tokenizer = options, tokenizer

    def make(
        self,
        request_id: str,
        index: int,
        body: CompletionBody,
        plan: PromptPlan,
        listener: GenerationListener,
        now: float,
        said: RequestHeaders,
    ) -> Generation:
        samples = self._samples(body, plan)
        machine = RequestMachine(self._spec(request_id, body, plan, said), now)
        story = _story(request_id, body, machine.spec, plan.num_prompt_tokens, said, now)
        return Generation(index, plan, machine, samples, listener, now, story, last_token_at=[0.0] * body.num_generated)

    def _spec(self, request_id: str, body: CompletionBody, plan: PromptPlan, said: RequestHeaders) -> RequestSpec:
        timeouts = self._options.timeouts
        return RequestSpec(
            request_id=request_id,
            prompt_token_ids=plan.token_ids,
            sampling=plan.sampling,
            pair_start=plan.pair_start,
            num_samples=body.num_generated,
            priority=body.priority or 0,
            targets=Targets.of_milliseconds(body.ttft_target_ms, body.tpot_target_ms, body.itl_max_ms).or_else(
                said.targets
            ),
            use_prefix_cache=body.use_prefix_cache is not False and plan.sampling.num_prompt_logprobs is None,
            secrecy=plan.secrecy,
            cache_share=plan.cache_share,
            adapter=plan.adapter,
            media=plan.media,
            session=said.session,
            max_attempts=self._options.max_attempts,
            deadline_s=min(timeouts.request_s, body.timeout or timeouts.request_s, said.timeout_s),
            queue_s=self._options.node_wait_s or timeouts.connect_s,
            accept_s=timeouts.connect_s,
        )

    def _samples(self, body: CompletionBody, plan: PromptPlan) -> list[SampleOutput]:
        prompt_tail = [token_id for token_id in plan.token_ids[-PROMPT_TAIL:].tolist() if token_id >= 0]
        offset = len(echo_text(plan, self._tokenizer)) if body.echo else 0
        names = names_of(self._tokenizer, body.return_tokens_as_token_ids)
        return [
            SampleOutput(
                names,
                self._tokenizer.detokenizer(prompt_tail, plan.shown_ids),
                body.stops,
                body.logprobs,
                plan.sampling.min_tokens,
                offset,
                ChatLogprobs if plan.is_chat else TextLogprobs,
                bool(body.include_stop_str_in_output),
                plan.sampling.length_penalty,
            )
            for _ in range(body.num_generated)
        ]


def _story(
    request_id: str, body: CompletionBody, spec: RequestSpec, num_prompt_tokens: int, said: RequestHeaders, now: float
) -> RequestStory:
    """A story that begins now. It can be asked for by the id of the answer, with or without its kind, by X-Request-Id,
    and by the name that nodes know it by."""
    own = PROMPT_OF_SEVERAL.sub("", request_id)
    names = [own, request_id, said.request_id]
    if body.request_id is not None:
        names += [body.request_id, own[:-ID_DIGITS] + body.request_id]
    return RequestStory(
        request_id=request_id,
        names=tuple(dict.fromkeys(name[:MOST_TEXT] for name in names if name)),
        started_at=now,
        clock_at=time.time(),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=spec.sampling.max_tokens,
        num_samples=spec.num_samples,
        targets=spec.targets,
    )
