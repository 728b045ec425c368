"""Steps launched kernel by kernel, or layer by layer where a prompt's graphs fit: any mix of rows, in pieces where the
device has little memory.

Shape legend: T tokens of a step, N sampled rows, L log-probabilities, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem.engine.media.encoder import EncodeError, MediaInputs
from tandem.engine.media.slots import MediaSlots
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.drawing import TokenDrawing
from tandem.engine.running.faults import StepFaults
from tandem.engine.running.graphs.prompt_graphs import PromptGraphs
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.running.runner_needs import Model
from tandem.engine.running.sampler import logprobs_of
from tandem.engine.running.step_inputs import ForwardInputs, StepInputs
from tandem.engine.running.step_pieces import StepPiece, split_step
from tandem.engine.running.step_result import NO_MEMORY, HostLogprobs, LaunchedStep
from tandem.engine.scheduling.ports import KVConnectorWorker
from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.products.fused_ops import unfused
from tandem.kernels.products.rotary_attention import WantedTokens

SMALLEST_PIECE = 16  # tokens; a device without memory for so few has none to go on with; a guess


class EagerSteps:
    """Computes what no graph was captured for, layer by layer with the connector's hooks beside them."""

    def __init__(
        self,
        model: Model,
        state: BatchState,
        inputs: StepInputs,
        drawing: TokenDrawing,
        faults: StepFaults,
        connector: KVConnectorWorker | None = None,
        media: MediaSlots | None = None,
        features: HeadFeatures | None = None,
    ) -> None:
        self._model = model
        self._state = state
        self._inputs = inputs
        self._drawing = drawing
        self._faults = faults
        self._connector = connector
        self._media = media
        self._features = features
        self._prompt_graphs: PromptGraphs | None = None
        # How many rows ranks exchange in the pass of the newest step, a graph's or its own; None: that isn't decided.
        self._rows_exchanged: int | None = None

    def replay(self, graphs: PromptGraphs | None) -> None:
        """Has these graphs computed what they take, from now on. None: nothing is replayed."""
        self._prompt_graphs = graphs

    def compute(self, output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs any mix of rows and draws. When memory doesn't suffice, it runs them again in ever smaller pieces, to
        the same effect. If even the smallest pieces do not fit, or other ranks compute it as one, the step's requests
        fail."""
        if not output.rows:
            self._wait_for_layers(output)
            self._save_layers(output)
            return
        pieces, self._rows_exchanged = split_step(output, output.num_tokens), None
        while True:
            try:
                self._try_pieces(pieces, output, step)
                break
            except EncodeError as error:
                step.fail(str(error))
                break
            except torch.OutOfMemoryError as error:
                largest = max(piece.num_tokens for piece in pieces)
                self._faults.on_out_of_memory(largest, error)
                if self._model.group is not None and self._rows_exchanged is None and self._prompt_graphs is not None:
                    raise  # nobody knows how many rows the other ranks exchange
            if self._model.group is not None:
                self._forgo(output, step, self._model.group)
                break
            if largest <= SMALLEST_PIECE:
                step.fail(NO_MEMORY)
                break
            pieces = split_step(output, largest // 2)
        if self._model.group is not None:
            self._model.group.end_step(len(output.samples))

    def forward(
        self,
        inputs: ForwardInputs,
        wanted: WantedTokens | None,
        hooks: KVConnectorWorker | None = None,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        """The decoder's hidden states `[wanted tokens, H]`, all of them where `wanted` is None."""
        context = self._context(inputs, hooks)
        graphs, self._rows_exchanged = self._prompt_graphs, len(inputs.positions_T)
        if graphs is not None and media is None and graphs.takes(inputs, wanted):
            self._rows_exchanged = graphs.size_of(self._rows_exchanged)
            if not graphs.have_run(inputs, wanted):
                self._settle()
            try:
                return graphs.forward(inputs, wanted, context)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._faults.on_launch_failure("a prompt's graph", "launching kernel by kernel", error)
        self._settle()
        self._faults.counters["steps_launched"] += 1
        return self._launch(inputs, wanted, context, media)

    def _context(self, inputs: ForwardInputs, hooks: KVConnectorWorker | None = None) -> ForwardContext:
        return ForwardContext(
            attn_metadata=inputs.metadata if inputs.by_layer is None else inputs.by_layer,
            no_compile_layers=self._model.attention_layers,
            hooks=hooks,
            adapters=inputs.adapters,
        )

    def _launch(
        self,
        inputs: ForwardInputs,
        wanted: WantedTokens | None,
        context: ForwardContext,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        with set_forward_context(context):
            if media is not None:
                return self._model(inputs.input_ids_T, inputs.positions_T, wanted, media)
            hidden_NH = self._model(inputs.input_ids_T, inputs.positions_T, wanted)
            if self._features is not None:
                assert inputs.links_3T is not None
                self._features.note(inputs.input_ids_T, inputs.positions_T, inputs.links_3T)
            return hidden_NH

    def _settle(self) -> None:
        if self._connector is not None:
            self._connector.settle()

    def _forgo(self, output: SchedulerOutput, step: LaunchedStep, group: TensorParallel) -> None:
        """Takes part in what the other ranks exchange of this step, in a pass over two tokens, of which one is wanted.
        Raises OutOfMemoryError where there is no memory for zeros, either: then the process must end."""
        self._faults.lose(step)
        every, num_samples = any(row.prompt_logprobs for row in output.rows), len(output.samples)
        group.stand_in({2: self._rows_exchanged or output.num_tokens, 1: num_samples})
        inputs = self._inputs.build_dummy((ScheduledRow(0, 0, 2),))
        wanted = None if every else self._inputs.last_tokens(inputs, (0,))
        hidden_NH = self._launch(inputs, wanted, self._context(inputs))[:1]
        for row in output.rows if every else ():
            for _, count in self._state.prompt_logprob_runs(row):
                group.stand_in({1: count})
                self._model.compute_logits(hidden_NH)
        if output.samples:
            self._drawing.forgo(output.samples, self._model.project(hidden_NH))

    def _try_pieces(self, pieces: Sequence[StepPiece], output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs the step piece by piece; if a launch fails that no other backend could take over, once more without
        fused operations, to the same effect."""
        try:
            self._compute_pieces(pieces, output, step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._faults.on_launch_failure("a fused operation", "torch", error)
            with unfused():
                self._compute_pieces(pieces, output, step)

    def _compute_pieces(self, pieces: Sequence[StepPiece], output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs the step piece by piece. The connector's hooks see it as a whole: they are called beside its layers when
        there is one piece, else before and after all of them."""
        step.prompt_logprobs = []
        if len(pieces) == 1:
            hooks = self._connector if output.connector_meta is not None else None
            hidden_NH = self._compute_piece(pieces[0], output, step, hooks)
        else:
            self._settle()  # before its own waits: what follows them is launched
            self._wait_for_layers(output)
            parts = [self._compute_piece(piece, output, step) for piece in pieces]
            self._save_layers(output)
            order = np.argsort([index for piece in pieces for index in piece.samples])
            hidden_NH = torch.cat(parts)[torch.from_numpy(order).to(self._state.device)]
        self._state.fork(output.forks)
        if self._features is not None:
            self._features.fork(output.forks)
        if self._media is not None:
            self._media.fork(output.forks)
        if output.samples:
            self._drawing.draw(output, self._model.project(hidden_NH), step)

    def _compute_piece(
        self, piece: StepPiece, output: SchedulerOutput, step: LaunchedStep, hooks: KVConnectorWorker | None = None
    ) -> torch.Tensor:
        """The hidden states of the piece's samples; its prompts' log-probabilities are added to the step."""
        inputs = self._inputs.build(piece.rows)
        last = self._inputs.last_tokens(inputs, piece.sampled)
        media = None
        if self._media is not None:
            media = self._media.of(piece.rows, inputs.first_token_R, inputs.positions_T)
        if not any(row.prompt_logprobs for row in output.rows):
            return self.forward(inputs, last, hooks, media)
        hidden_TH = self.forward(inputs, None, hooks, media)
        step.prompt_logprobs = [*step.prompt_logprobs, *self._prompt_logprobs(piece, inputs, hidden_TH)]
        return hidden_TH[last.index]

    def _prompt_logprobs(self, piece: StepPiece, inputs: ForwardInputs, hidden_TH: torch.Tensor) -> list[HostLogprobs]:
        """How likely the prompt's own next tokens were, for the rows of `piece` that ask, a bounded run of positions
        at a time. `hidden_TH` has every token of the piece. Targets are indices of the step's scheduled rows."""
        parts = []
        for index, row in enumerate(piece.rows):
            wanted = int(self._state.settings["num_prompt_logprobs"][row.slot])
            for first, count in self._state.prompt_logprob_runs(row):
                begin = int(inputs.first_token_R[index]) + first
                after = row.start + first + 1
                # Within a span of media there are none: the router leaves them out.
                target_L = self._state.token_ids_SC[row.slot, after : after + count].to(torch.int64).clamp_min(0)
                logits_LV = self._model.compute_logits(hidden_TH[begin : begin + count])
                logprobs = logprobs_of(logits_LV, target_L, wanted)
                parts.append(HostLogprobs.fetch(logprobs, np.full(count, piece.parents[index]), np.full(count, wanted)))
        return parts

    def _wait_for_layers(self, output: SchedulerOutput) -> None:
        """Tells the connector, before a step that it can't see layer by layer, that all layers begin."""
        if self._connector is not None and output.connector_meta is not None:
            for name in self._model.attention_layers:
                self._connector.wait_for_kv_layer(name)

    def _save_layers(self, output: SchedulerOutput) -> None:
        """Tells the connector, after a step that it can't see layer by layer, that all layers are written."""
        if self._connector is not None and output.connector_meta is not None:
            for name, layer in self._model.attention_layers.items():
                self._connector.save_kv_layer(name, layer.kv_cache[0], None)
