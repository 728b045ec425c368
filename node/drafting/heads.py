"""A head of the served model's own that guesses: loaded with that model, run beside it (docs/speculation.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import torch

from tandem.engine.contracts.config import NodeOptions, SchedulerOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVLayout, ModelIdentity
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.heads.eagle3 import EagleHead
from tandem.engine.models.heads.eagle3_config import load_eagle_config
from tandem.engine.models.heads.eagle3_loader import fill_head
from tandem.engine.models.heads.mtp_config import load_mtp_config
from tandem.engine.models.heads.mtp_loader import load_mtp_head
from tandem.engine.models.heads.taps import GuessHead, HeadedModel
from tandem.engine.models.identity import identity_with_head
from tandem.engine.running.graphs.decode_graphs import graph_sizes
from tandem.engine.running.heads.guess_steps import HeadFollowers, HeadSteps
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.runner_needs import Model
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadTokens
from tandem.engine.scheduling.speculation.options import EagleOptions, MtpOptions, read_speculative_config

if TYPE_CHECKING:
    from tandem.engine.models.hf.model import HFModel

DRIVER_BYTES_PER_GRAPH = 2 << 20  # of some 20 kernels; a guess
MEASURED_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)  # a guess
REPEATS = 5  # a guess; the shortest counts, since only serving makes what is known longer


@dataclass(frozen=True)
class LoadedHead:
    """A head that its model has taken. What it keeps lies in the pool's own blocks."""

    head: GuessHead
    layout: KVLayout  # of the pool, with its layer
    identity: ModelIdentity  # of the model and it
    twin_bytes: int = 0

    def graph_bytes(self, options: SchedulerOptions, device: torch.device) -> int:
        """Device memory that its graphs and buffers will hold."""
        head, rows = self.head, options.max_num_seqs
        row_bytes = head.dtype.itemsize * (head.vocab_size + 16 * head.hidden_size)
        return 2 * len(graph_sizes(rows)) * DRIVER_BYTES_PER_GRAPH + 2 * rows * row_bytes


def reads_mtp(options: NodeOptions) -> bool:
    """Whether the node's head is a layer of the model's own checkpoint."""
    return isinstance(read_speculative_config(options.scheduler.speculative_config), MtpOptions)


def load_head(
    options: NodeOptions,
    model: Model,
    folder: Path,
    max_model_len: int,
    layout: KVLayout,
    identity: ModelIdentity,
) -> LoadedHead | None:
    """None: the node needs none. Prefill nodes need it as decode nodes do: its keys are handed over with the model's,
    which lies in `folder`. Raises ConfigError where the head isn't one for the served model, or that model can't have
    one."""
    asked = read_speculative_config(options.scheduler.speculative_config)
    if not isinstance(asked, EagleOptions | MtpOptions):
        return None
    served = cast("HeadedModel", model)
    if isinstance(asked, MtpOptions):
        _check(options, layout, "mtp")
        head, config = _mtp(asked, options, model, folder)
    else:
        _check(options, layout, "eagle3")
        folder = resolve_model(asked.model, asked.revision)
        head, config = _eagle(asked, options, served, folder, max_model_len)
    served.take_guess_head(head)
    group = layout.group
    scales = {"k_scales": (*group.k_scales, 1.0), "v_scales": (*group.v_scales, 1.0)} if group.k_scales else {}
    group = msgspec.structs.replace(group, num_layers=group.num_layers + 1, **scales)
    own_identity = identity_with_head(identity, folder, config, options.model.load_format)
    return LoadedHead(head, msgspec.structs.replace(layout, groups=(group,)), own_identity)


def _eagle(
    asked: EagleOptions, options: NodeOptions, model: HeadedModel, folder: Path, max_model_len: int
) -> tuple[GuessHead, msgspec.Struct]:
    """The head, and what identifies it beside its weights."""
    config, embedding = load_eagle_config(folder, model.config), model.embedding_VE
    sizes = config, embedding, asked.num_speculative_tokens, max_model_len, embedding.dtype
    whole = EagleHead(*sizes, "meta", options.attention_backend)
    head = EagleHead(*sizes, embedding.device, options.attention_backend, model.group)
    return fill_head(head, whole, folder, options.model.load_format), config


def _mtp(asked: MtpOptions, options: NodeOptions, model: Model, folder: Path) -> tuple[GuessHead, msgspec.Struct]:
    """The same of the layer in the model's own folder."""
    rest = asked.num_speculative_tokens, options.model.load_format, options.attention_backend
    if isinstance(model, DecoderModel):
        config = load_mtp_config(folder, model.config)
        return load_mtp_head(folder, config, model, *rest), config
    from tandem.engine.models.heads.hf_mtp_loader import load_hf_mtp_head  # importing this takes seconds

    hf_model = cast("HFModel", model)
    return load_hf_mtp_head(folder, hf_model, *rest), hf_model.config


def _check(options: NodeOptions, layout: KVLayout, method: str) -> None:
    """Raises ConfigError where no head can be beside what is asked."""
    refused = (
        (
            layout.group.kind == "latent" and method == "eagle3",
            "eagle3 keeps keys and values, this model latents: choose another method",
        ),
        (options.compile, f"{method} doesn't go with --compile: leave one out"),
    )
    for fails, why in refused:
        if fails:
            raise ConfigError(f"--speculative-config: {why}")


def make_head_steps(head: GuessHead, served: ModelRunner, followers: HeadFollowers | None = None) -> HeadSteps:
    """The steps of a head whose layer `served` has bound. Raises ConfigError where there is no memory for its
    buffers."""
    assert served.features is not None
    try:
        rows, length = served.max_decode_rows, served.max_model_len
        return HeadSteps(head, served.features, served.state, rows, length, followers)
    except torch.OutOfMemoryError:
        raise ConfigError("there is no memory for the head's buffers: lower --gpu-memory-utilization") from None


class HeadEngine:
    """The head's steps, and the guesser for the node's scheduler."""

    def __init__(
        self, loaded: LoadedHead, served: ModelRunner, clock: StepClock, followers: HeadFollowers | None = None
    ) -> None:
        """`served` has bound the head's layer. `followers`: the other ranks, which take part in each step. Raises
        ConfigError where there is no memory for its buffers."""
        self.steps = make_head_steps(loaded.head, served, followers)
        self.guesser = HeadTokens(self.steps, loaded.head.num_speculative_tokens, clock)

    def warm_up(self, captures: bool, measures: bool) -> None:
        """Compiles its kernels, captures its graphs, measures its steps."""
        if self.steps.device.type == "cuda":
            self.steps.warm_up()
        if captures:
            self.steps.capture()
        if measures:
            self.guesser.times.measured(self._seconds())

    def _seconds(self) -> dict[int, float]:
        """Rows -> seconds of a step of theirs, the host's share included."""
        seconds: dict[int, float] = {}
        for rows in MEASURED_ROWS:
            if rows > self.steps.sizes[-1]:
                break
            asked = [HeadRow(-1, 0, 0, self.guesser.num_speculative_tokens, 0, 0)] * rows  # of nobody
            self._timed(asked)
            seconds[rows] = min(self._timed(asked) for _ in range(REPEATS)) / self.guesser.num_speculative_tokens
        return seconds

    def _timed(self, asked: Sequence[HeadRow]) -> float:
        began = time.perf_counter()
        if see := self.steps.guess(asked, ()):
            see()
        return time.perf_counter() - began
