"""The last part of a step: tokens drawn of its logits, and their way to the host.

Shape legend: N sampled rows, V vocabulary, M rows that follow grammars, W words of 32 tokens each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from tandem.engine.device.upload import upload
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.faults import StepFaults
from tandem.engine.running.runner_needs import QualityProbe
from tandem.engine.running.sampler import Logprobs, SamplingBatch, TokenMasks, sample
from tandem.engine.running.step_result import NO_MEMORY, HostLogprobs, LaunchedStep, to_host
from tandem.engine.scheduling.step import SampleRow, SchedulerOutput
from tandem.engine.structured.guides import GuidedSamples, Guides
from tandem.kernels.blocks.quantization import overflow_counter


class DrawnRows(Protocol):
    """Rows of a replayed step, in the order of its samples."""

    def store(self, token_R: torch.Tensor) -> None: ...

    def store_most_likely(self, logits_RV: torch.Tensor) -> torch.Tensor: ...


class TokenDrawing:
    """Draws each step's tokens: at once, or, if some must follow grammars, when those know the tokens of the step
    before; until then it is put off. The event behind the tokens is the step's end."""

    def __init__(
        self,
        state: BatchState,
        group: TensorParallel | None,
        faults: StepFaults,
        guides: Guides | None = None,
        quality: QualityProbe | None = None,
        counts_overflows: bool = False,
    ) -> None:
        """`group`: the ranks that share the model, if there are several. `counts_overflows`: each step says how many
        values fp8 could not hold so far."""
        self._state = state
        self._group = group
        self._faults = faults
        self._guides = guides
        self._quality = quality
        self._device = state.device
        self._overflows = overflow_counter(state.device) if counts_overflows else None
        self._newest: LaunchedStep | None = None

    def catch_up(self) -> None:
        """Draws the newest step's tokens, if that was put off: they are the next step's input."""
        if self._newest is not None:
            self._newest.sample()

    def end(self, step: LaunchedStep) -> None:
        """Closes a step of which all is launched but what was put off."""
        if not step.is_put_off:
            self._mark_end(step)
        if self._quality is not None:
            self._quality.measure(self._state)
        self._newest = step

    def draw(
        self,
        output: SchedulerOutput,
        logits_NV: torch.Tensor,
        step: LaunchedStep,
        replayed: DrawnRows | None = None,
    ) -> None:
        """Draws the tokens of the step's samples. `replayed`: of a step that was, which stores tokens with what it has
        at hand where every row is greedy and asks for nothing else."""
        if not output.samples:
            return
        if self._quality is not None:
            self._quality.take(output, logits_NV, self._state)
        if replayed is not None and self._state.are_plain(output.samples):
            if self._group is None:
                step.token_ids = replayed.store_most_likely(logits_NV)
                return
            token_N, _ = self.choose(logits_NV, SamplingBatch())
            replayed.store(token_N)
            step.token_ids = to_host(token_N)
            return
        step.guided = None if self._guides is None else self._guides.of(output.samples)
        if step.guided is None:
            self._sample(output.samples, logits_NV, step)
            return
        step.put_off(partial(self._sample_guided, output.samples, logits_NV, step, step.guided, self._newest))
        if self._group is not None:
            step.sample()  # what the ranks exchange keeps its order, and what follows a step waits for all of them

    @torch.inference_mode()
    def _sample_guided(
        self,
        samples: Sequence[SampleRow],
        logits_NV: torch.Tensor,
        step: LaunchedStep,
        guided: GuidedSamples,
        before: LaunchedStep | None,
    ) -> None:
        """Fills the masks, while the device computes the logits, and draws."""
        if before is not None:
            before.tell_guides()
        host_MW = torch.empty(guided.mask_shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        guided.fill(host_MW.numpy())
        [row_M] = upload([np.array(guided.indices, np.int64)], self._device)
        masks = TokenMasks(row_M, host_MW.to(self._device, non_blocking=True))
        try:
            self._sample(samples, logits_NV, step, masks)
        except torch.OutOfMemoryError as error:
            if self._group is not None:
                raise  # the other ranks wait for this one's part
            self._faults.on_out_of_memory(len(samples), error)
            step.fail(NO_MEMORY)
        self._mark_end(step)

    def _sample(
        self, samples: Sequence[SampleRow], logits_NV: torch.Tensor, step: LaunchedStep, masks: TokenMasks | None = None
    ) -> None:
        """Samples, writes the tokens into the slots' tables and starts their way to the host. Counting them comes last:
        it alone may not happen twice when memory runs out and the step is run again."""
        batch, slot_N, position_N = self._state.sampling_batch(samples)
        token_N, logprobs = self.choose(logits_NV, replace(batch, masks=masks))
        self._state.write_tokens(slot_N, position_N, token_N)
        step.token_ids = to_host(token_N)
        if logprobs is not None:
            settings = self._state.settings[[s.slot for s in samples]]
            num_logprobs, targets = settings["num_logprobs"], np.flatnonzero(settings["num_logprobs"] >= 0)
            step.beams = frozenset(np.flatnonzero(settings["beam"]).tolist())
            step.logprobs = HostLogprobs.fetch(logprobs, targets, num_logprobs[targets])
        self._state.count_outputs(samples, slot_N, token_N)

    def choose(self, logits_NV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """Does what `sample` does, with logits as the model projects them. In a group rank 0 draws, and every rank gets
        its tokens: on the device, so that the next step can be launched before the host has seen them."""
        group = self._group
        if group is None:
            return sample(logits_NV, batch)
        if batch.is_greedy:
            return group.argmax(logits_NV), None
        all_logits_NV = group.gather_logits(logits_NV)
        if group.shard.rank:
            return group.from_rank_0(torch.empty(len(logits_NV), dtype=torch.int64, device=self._device)), None
        token_N, logprobs = sample(all_logits_NV, batch)
        return group.from_rank_0(token_N), logprobs

    def forgo(self, samples: Sequence[SampleRow], logits_1V: torch.Tensor) -> None:
        """Takes part in the exchanges by which ranks draw the tokens of `samples`, on a rank that has not computed
        their logits; `logits_1V` stands in for those."""
        assert self._group is not None
        self._group.stand_in({1: len(samples)})
        batch, _, _ = self._state.sampling_batch(samples)
        if batch.is_greedy:
            self._group.argmax(logits_1V)
            return
        self._group.gather_logits(logits_1V)
        self._group.from_rank_0(torch.zeros(1, dtype=torch.int64, device=self._device))

    def _mark_end(self, step: LaunchedStep) -> None:
        if self._overflows is not None:
            step.num_overflows = to_host(self._overflows.clone())
        if self._device.type == "cuda":
            step.event = torch.cuda.Event()
            step.event.record()
