"""How far logits are from those of KV in the dtype that is computed in, measured on some of the steps that are served.

A sampled step's row is computed once more from its tokens, as one prompt without a cache: nothing of it was ever
quantised, on this node or on the way to it. So the pool needs no room for it, and captured steps are measured as well.

Shape legend: T tokens of the row's sequence, N sampled rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.media.slots import MediaSlots
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.runner_needs import Model
from tandem.engine.running.step_result import to_host
from tandem.engine.scheduling.step import SampleRow, SchedulerOutput
from tandem.kernels.api.attention import metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context

MAX_PENDING = 16  # results on their way from the device; a guess


class _Taken(NamedTuple):
    """What one row of a step was told: its sequence's first `num_tokens` tokens gave these logits [V]."""

    slot: int
    num_tokens: int
    logits_V: torch.Tensor


class KVQuality:
    """Implements `QualityProbe` for one runner. Counters grow by each measured row: `kv_quality_error` by the size of
    the logits' error over that of the logits, both about their means; `kv_quality_changes` by whether another token
    than the exact logits' was the most likely one."""

    def __init__(self, model: Model, rate: float, max_tokens: int, media: MediaSlots | None = None) -> None:
        """Measures a row of `rate` of the steps, of sequences of up to `max_tokens`. Raises ConfigError for a model
        whose rows can't be computed a second time."""
        for reason, is_so in (
            ("--tensor-parallel-size", model.group is not None),
            ("a model with an encoder", model.encoder is not None),
        ):
            if is_so:
                raise ConfigError(f"--kv-quality-sample-rate can't be served with {reason}: leave one of them out")
        self._model, self._rate, self._max_tokens, self._media = model, rate, max_tokens, media
        self._layers = {name: layer.over_another_cache() for name, layer in model.attention_layers.items()}
        self._random = random.Random(0)
        self._taken: _Taken | None = None
        self._pending: deque[tuple[torch.cuda.Event | None, torch.Tensor]] = deque()
        self._counters = {"kv_quality_samples": 0.0, "kv_quality_error": 0.0, "kv_quality_changes": 0.0}

    def take(self, output: SchedulerOutput, logits_NV: torch.Tensor, state: BatchState) -> None:
        """Keeps the logits of one row of the step, if this step is to be measured."""
        self._taken = None
        if len(self._pending) >= MAX_PENDING or self._random.random() >= self._rate:
            return
        fit = [index for index, sample in enumerate(output.samples) if self._fits(output, sample, state)]
        if fit:
            index = self._random.choice(fit)
            sample = output.samples[index]
            self._taken = _Taken(sample.slot, sample.position, logits_NV[index].clone())

    def measure(self, state: BatchState) -> None:
        """Enqueues the row's second pass, if `take` kept one, behind everything that the step has launched."""
        if self._taken is None:
            return
        taken, self._taken = self._taken, None
        try:
            found = to_host(self._compare(taken, state))
        except torch.OutOfMemoryError:
            return  # this row is not measured
        event = None
        if found.is_pinned():
            event = torch.cuda.Event()
            event.record()
        self._pending.append((event, found))

    def counters(self) -> dict[str, float]:
        """The sums of what has come from the device by now."""
        while self._pending and ((event := self._pending[0][0]) is None or event.query()):
            error, is_changed = self._pending.popleft()[1].tolist()
            self._counters["kv_quality_samples"] += 1
            self._counters["kv_quality_error"] += error
            self._counters["kv_quality_changes"] += is_changed
        return self._counters

    def _fits(self, output: SchedulerOutput, sample: SampleRow, state: BatchState) -> bool:
        """Whether the row reads KV of earlier steps, and its sequence is text by the model's own weights."""
        row = output.rows[sample.row]
        return (
            row.start > 0
            and sample.draft < 0  # its table holds what was drawn by now, and no longer what was guessed
            and sample.position <= self._max_tokens
            and not state.settings["adapter"][sample.slot]
            and not (self._media is not None and self._media.has_items(sample.slot))
        )

    def _compare(self, taken: _Taken, state: BatchState) -> torch.Tensor:
        """float32 [2]: the error's size over that of the exact logits; 1.0 if the most likely tokens differ."""
        length, device = np.array([taken.num_tokens], np.int64), state.device
        nowhere = torch.full((taken.num_tokens,), -1, dtype=torch.int64, device=device)
        no_blocks = torch.zeros((1, state.max_blocks), dtype=torch.int32, device=device)
        builder = metadata_backend(self._model.attention_layers.values()).get_builder_cls()()
        metadata = builder.build(length, length, no_blocks, nowhere, device)
        ids_T = state.token_ids_SC[taken.slot, : taken.num_tokens].clone()
        with set_forward_context(ForwardContext(metadata, self._layers)):
            hidden_TH = self._model(ids_T, torch.arange(taken.num_tokens, device=device))
        exact_V = self._model.project(hidden_TH[-1:])[0].float()
        served_V = taken.logits_V.float()
        is_changed = (served_V.argmax() != exact_V.argmax()).float()
        exact_V, served_V = exact_V - exact_V.mean(), served_V - served_V.mean()
        error = (served_V - exact_V).norm() / exact_V.norm().clamp_min(1e-30)
        return torch.stack((error, is_changed))


def make_kv_quality(model: Model, options: NodeOptions, media: MediaSlots | None) -> KVQuality | None:
    """The probe that `options` ask for; None: nothing is to be measured. Raises ConfigError for a model that can't
    be."""
    if not options.cache.kv_quality_sample_rate:
        return None
    return KVQuality(model, options.cache.kv_quality_sample_rate, options.scheduler.max_num_batched_tokens, media)
