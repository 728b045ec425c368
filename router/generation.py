"""One prompt of one HTTP request on its way: the machine that decides, the samples' text, and who listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tandem.engine.errors import TandemError
from tandem.engine.messages import TokenLogprobs
from tandem.router.completion import PromptPlan
from tandem.router.request_machine import RequestMachine
from tandem.router.sample_output import Piece, SampleOutput


class GenerationListener(Protocol):
    """Called on the event loop; after `finished` or `failed` nothing more comes."""

    def prompt_logprobs(self, prompt_index: int, entries: tuple[TokenLogprobs, ...]) -> None: ...

    def piece(self, prompt_index: int, sample_index: int, piece: Piece) -> None: ...

    def finished(self, prompt_index: int) -> None: ...

    def failed(self, prompt_index: int, error: TandemError) -> None: ...


@dataclass(eq=False, slots=True)
class Generation:
    prompt_index: int
    plan: PromptPlan
    machine: RequestMachine
    samples: list[SampleOutput]
    listener: GenerationListener
    started_at: float
    submitted_ids: set[str] = field(default_factory=set)  # every sub-request id that nodes have heard of
    first_token_at: float | None = None
    last_token_at: list[float] = field(default_factory=list)  # per sample; 0.0 before its first token
    reason: str = ""  # of the first placement
