"""A head of the served model's own that guesses: loaded with that model, run beside it (docs/speculation.md)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from tandem.engine.contracts.config import NodeOptions, SchedulerOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVLayout, ModelIdentity
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.contracts.model_shape import ModelShape
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.heads.config import EagleConfig, load_eagle_config
from tandem.engine.models.heads.eagle3 import EagleHead
from tandem.engine.models.heads.loader import fill_head
from tandem.engine.models.identity import identity_with_head
from tandem.engine.running.decode_graphs import graph_sizes
from tandem.engine.running.heads.guess_steps import HeadSteps
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.runner_needs import Model
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadTokens
from tandem.engine.scheduling.speculation.options import EagleOptions, read_speculative_config

DRIVER_BYTES_PER_GRAPH = 2 << 20  # of some 20 kernels; a guess
MEASURED_ROWS = (1, 4, 8, 16, 32, 64, 128, 256)  # a guess
REPEATS = 5  # a guess; the shortest counts, since only serving makes what is known longer


@dataclass(frozen=True)
class LoadedHead:
    """A head that its model has taken. What it keeps lies in the pool's own blocks."""

    head: EagleHead
    layout: KVLayout  # of the pool, with its layer
    identity: ModelIdentity  # of the model and it
    twin_bytes: int = 0

    def graph_bytes(self, options: SchedulerOptions, device: torch.device) -> int:
        """Device memory that its graphs and buffers will hold."""
        config, rows = self.head.config, options.max_num_seqs
        row_bytes = self.head.dtype.itemsize * (config.layer.vocab_size + 16 * config.layer.hidden_size)
        return 2 * len(graph_sizes(rows)) * DRIVER_BYTES_PER_GRAPH + 2 * rows * row_bytes


def load_head(
    options: NodeOptions,
    model: Model,
    served: ModelShape,
    max_model_len: int,
    layout: KVLayout,
    identity: ModelIdentity,
) -> LoadedHead | None:
    """None: the node needs none. Prefill nodes need it as decode nodes do: its keys are handed over with the model's.
    Raises ConfigError where the head isn't one for the served model, or that model can't have one."""
    asked = read_speculative_config(options.scheduler.speculative_config)
    if not isinstance(asked, EagleOptions):
        return None
    _check_served(options, model, served, layout)
    assert isinstance(model, DecoderModel)
    folder = resolve_model(asked.model, asked.revision)
    config: EagleConfig = load_eagle_config(folder, served)
    embedding = model.embed_tokens.weight
    head = EagleHead(
        config,
        embedding,
        asked.num_speculative_tokens,
        max_model_len,
        embedding.dtype,
        embedding.device,
        options.attention_backend,
    )
    fill_head(head, folder, options.model.load_format)
    model.take_guess_head(head)
    group = msgspec.structs.replace(layout.group, num_layers=layout.group.num_layers + 1)
    own_identity = identity_with_head(identity, folder, config, options.model.load_format)
    return LoadedHead(head, msgspec.structs.replace(layout, groups=(group,)), own_identity)


def _check_served(options: NodeOptions, model: Model, served: ModelShape, layout: KVLayout) -> None:
    refused = (
        (options.tensor_parallel_size > 1, "eagle3 runs on one GPU a node: leave --tensor-parallel-size out"),
        (
            not isinstance(model, DecoderModel),
            f"eagle3 needs hidden states of {served.architecture} that its modules don't give: choose another method",
        ),
        (
            layout.group.dtype.startswith("float8"),
            "eagle3 keeps its keys beside the model's, in 16 bits or more: leave --kv-cache-dtype out",
        ),
        (layout.group.kind == "latent", "eagle3 keeps keys and values, this model latents: choose another method"),
        (options.compile, "eagle3 doesn't go with --compile: leave one out"),
    )
    for fails, why in refused:
        if fails:
            raise ConfigError(f"--speculative-config: {why}")


class HeadEngine:
    """The head's steps, and the guesser for the node's scheduler."""

    def __init__(self, loaded: LoadedHead, served: ModelRunner, clock: StepClock) -> None:
        """`served` has bound the head's layer. Raises ConfigError where there is no memory for its buffers."""
        assert served.features is not None
        try:
            rows = served.max_decode_rows
            self.steps = HeadSteps(loaded.head, served.features, served.state, rows, served.max_model_len)
        except torch.OutOfMemoryError:
            raise ConfigError("there is no memory for the head's buffers: lower --gpu-memory-utilization") from None
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
            self.steps.guess(asked, ())
            seconds[rows] = min(self._timed(asked) for _ in range(REPEATS)) / self.guesser.num_speculative_tokens
        return seconds

    def _timed(self, asked: Sequence[HeadRow]) -> float:
        began = time.perf_counter()
        self.steps.guess(asked, ())
        return time.perf_counter() - began
