"""What a runner is given: the model that it runs, and who takes part in its steps or looks at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.media.encoder import MediaEncoder, MediaInputs
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.encoder_spans import Encoder
from tandem.engine.running.graphs.decode_batch import DecoderLike
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.kernels.api.attention import Attention
from tandem.kernels.products.rotary_attention import WantedTokens

if TYPE_CHECKING:
    from tandem.engine.models.heads.taps import GuessHead


class Model(DecoderLike, Protocol):
    """A model as the runner uses it. `group` are the ranks that share it out, `expert_group` nodes that share its
    experts out; None: this process holds all of it."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: WantedTokens | None = None,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        """Hidden states [wanted tokens, hidden size] of T tokens, of all of them where `wanted` is None. `media` is for
        models that have a `media_encoder`."""

    @property
    def group(self) -> TensorParallel | None: ...

    @property
    def expert_group(self) -> ExpertGroup | None: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def media_encoder(self) -> MediaEncoder | None: ...

    @property
    def encoder(self) -> Encoder | None: ...

    @property
    def cross_layers(self) -> Mapping[str, Attention]: ...

    @property
    def guess_head(self) -> GuessHead | None: ...

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """int32 [layers with experts, experts]: how many tokens chose each so far; None: nobody counts."""

    def compile_forward(self) -> None: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class AdapterMemory(Protocol):
    """The device's slots for adapters."""

    @property
    def num_slots(self) -> int: ...

    def load(self, slot: int, ref: AdapterRef) -> None:
        """Enqueues the copy of an adapter into a slot, behind the steps that were launched."""

    def fill_with_rank(self, rank: int) -> None: ...


class QualityProbe(Protocol):
    """Compares what some steps computed with what exact KV gives (engine/precision/kv_quality.py)."""

    def take(self, output: SchedulerOutput, logits_NV: torch.Tensor, state: BatchState) -> None:
        """Hears of each step's logits, before tokens are drawn of them."""

    def measure(self, state: BatchState) -> None:
        """Enqueues what it has to compute, once the step is launched."""


class Followers(Protocol):
    """The other ranks, as rank 0 leads them."""

    def announce(
        self, verb: Literal["step", "dummy", "warm_up", "capture"], step: SchedulerOutput | None = None
    ) -> None: ...

    def have_lost(self, step_id: int) -> bool:
        """Whether a rank had no memory for this step, which has ended, or for an earlier one."""
        ...
