"""The device side of a step: patches, block copies, forward pass, sampling, and the copy of the tokens to the host.

`execute` only enqueues (on CUDA): a decode row's input is gathered from the slot's token table, where the step before
put it, and the host reads tokens from pinned memory when the step's event has fired.

Shape legend: T tokens of a step, R rows, N sampled rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.device.upload import upload
from tandem.engine.media.encoder import EncodeError, MediaInputs
from tandem.engine.media.slots import MediaSlots
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.decode_graphs import REPLAYED_TOKENS, DecodeGraphs
from tandem.engine.running.encoder_spans import EncoderSpans, SpanPart
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.running.prompt_logprobs import prompt_logprobs
from tandem.engine.running.runner_needs import AdapterMemory, Followers, Model, QualityProbe
from tandem.engine.running.sampler import Logprobs, SamplingBatch, TokenMasks, sample
from tandem.engine.running.step_inputs import ForwardInputs, StepInputs
from tandem.engine.running.step_pieces import StepPiece, split_step
from tandem.engine.running.step_result import NO_MEMORY, HostLogprobs, LaunchedStep, to_host
from tandem.engine.running.warm_up import every_way_to_sample, extreme_steps
from tandem.engine.scheduling.ports import BetweenLayers, KVConnectorWorker
from tandem.engine.scheduling.step import SampleRow, ScheduledRow, SchedulerOutput
from tandem.engine.structured.guides import GuidedSamples, Guides
from tandem.kernels.api.attention import bind_kv_cache, metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.selection import count_fallback, is_launch_failure
from tandem.kernels.blocks.cache_ops import copy_blocks
from tandem.kernels.blocks.quantization import overflow_counter
from tandem.kernels.products import matmul
from tandem.kernels.products.fused_ops import unfused
from tandem.kernels.products.rotary_attention import WantedTokens

logger = logging.getLogger(__name__)
SMALLEST_PIECE = 16  # tokens; a device without memory for so few has none to go on with; a guess


class ModelRunner:
    """Implements `interfaces.Runner` on the pool's device, on the stream that is current when it is called."""

    def __init__(
        self,
        model: Model,
        pool: torch.Tensor,
        options: SchedulerOptions,
        block_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        worker_connector: KVConnectorWorker | None = None,
        followers: Followers | None = None,
        guides: Guides | None = None,
        media: MediaSlots | None = None,
        adapters: AdapterMemory | None = None,
        counts_overflows: bool = False,
        quality: QualityProbe | None = None,
    ) -> None:
        """`pool` `[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]`; the model is bound to it here.
        `followers` are told of everything that is run here, before it is. `guides`: needed where tokens are drawn.
        `media`: needed where prompts hold more than text; `adapters`: where requests may take some.
        `counts_overflows`: each step says how many values fp8 could not hold so far. `quality` looks at steps."""
        assert pool.dim() == 6, f"not a pool: {pool.shape}"
        assert pool.shape[4] == block_size, f"not a pool of {block_size}-token blocks: {pool.shape}"
        self.model = model
        self.pool = pool
        self.device = pool.device
        self._connector = worker_connector
        self._followers = followers
        self._guides = guides
        self._media = media
        self._adapters = adapters
        self._quality = quality
        self._overflows = overflow_counter(pool.device) if counts_overflows else None
        self._newest: LaunchedStep | None = None
        self._max_num_seqs = options.max_num_seqs
        self._max_num_tokens = options.max_num_batched_tokens
        self.max_model_len = max_model_len
        self._max_chunk = options.max_prefill_chunk or options.max_num_batched_tokens
        self.counters = {"steps_out_of_memory": 0}
        self.spans: EncoderSpans | None = None
        if model.encoder is not None:  # all but the spans has the decoder's positions
            self.max_model_len = model.encoder.facts.max_decoder_len
        self.state = BatchState(
            options.max_num_seqs, self.max_model_len, block_size, model.vocab_size, eos_token_ids, self.device
        )
        bind_kv_cache(model.attention_layers, pool)
        bind_kv_cache(model.cross_layers, pool)
        layers = (*model.attention_layers.values(), *model.cross_layers.values())
        builder = metadata_backend(layers).get_builder_cls()()
        if model.encoder is not None:
            self.spans = EncoderSpans(
                model.encoder, options.max_num_seqs, block_size, self.device, builder, self.counters
            )
        self.sharing: PrefixSharing | None = None
        if options.share_prefixes:
            self.sharing = PrefixSharing.for_layers(model.attention_layers.values(), self.state, self.max_graph_rows)
        self._inputs = StepInputs(self.state, options.max_num_batched_tokens, builder, self.sharing, self.spans)
        self._graphs: DecodeGraphs | None = None
        self._may_replay = True
        if worker_connector is not None:
            worker_connector.register_kv_cache(pool)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, between_layers: BetweenLayers | None = None) -> LaunchedStep:
        """Launches one step, in the order of effect that `SchedulerOutput` states. Raises OutOfMemoryError in a group,
        where the process must end then: the other ranks compute the step as one, and wait for this one's part."""
        if self._newest is not None:
            self._newest.sample()  # its tokens are this step's input
        if self._followers is not None:
            self._followers.announce("step", output)
        for load in output.adapter_loads:
            assert self._adapters is not None, "no slot was made for adapters"
            self._adapters.load(load.slot, load.ref)
        span_parts: list[SpanPart] = []
        if self.spans is not None:
            output, span_parts = self.spans.take_off(output)
        failed_slots = self.state.apply(output.new_slots, output.block_appends, output.samples)
        if self._guides is not None:
            self._guides.apply(output.new_slots, output.forks)
        if self._media is not None:
            failed_slots |= self._media.apply(output.new_slots)
        if output.copies:
            copies = ((each.source, each.destination, each.num_tokens) for each in output.copies)
            copy_blocks(self.pool, *map(list, zip(*copies, strict=True)))
        step = LaunchedStep(output.step_id, failed_slots=failed_slots)
        connector = self._connector
        if connector is not None and output.connector_meta is not None:
            connector.start_load_kv(output.connector_meta, between_layers)
            step.find_spoiled = partial(connector.spoiled_slots, output.step_id)
        is_replayed = self._launch(output, span_parts, step)
        if connector is not None and (output.connector_meta is not None or not is_replayed):
            connector.wait_for_save()
        if not step.is_put_off:
            self._mark_end(step)
        if self._quality is not None:
            self._quality.measure(self.state)
        self._newest = step
        return step

    def _mark_end(self, step: LaunchedStep) -> None:
        if self._overflows is not None:
            step.num_overflows = to_host(self._overflows.clone())
        if self.device.type == "cuda":
            step.event = torch.cuda.Event()
            step.event.record()

    def _launch(self, output: SchedulerOutput, span_parts: Sequence[SpanPart], step: LaunchedStep) -> bool:
        """Runs the encoder for what the step needs of it, then the decoder. Returns whether a graph was replayed."""
        if self.spans is not None:
            try:
                self.spans.compute(span_parts)
            except torch.OutOfMemoryError as error:
                self._on_out_of_memory(sum(part.end - part.start for part in span_parts), error)
                step.fail(NO_MEMORY)
                return False
        if not output.rows:
            self._wait_for_layers(output)
            self._save_layers(output)
            return False
        if self._replay(output, step):
            return True
        self._compute(output, step)
        return False

    def _replay(self, output: SchedulerOutput, step: LaunchedStep) -> bool:
        """Runs a decode step, or small chunks of prompts, by replaying a graph. False: no graph fits this step, or the
        device had no memory for what comes beside it; what has run already may be run again, to the same effect."""
        graphs = self._graphs
        if graphs is None or not self._may_replay or (self._media is not None and self._media.touch(output.rows)):
            return False
        rows: Sequence[ScheduledRow] = output.rows
        if not output.is_decode:
            if not output.is_only_rows or not graphs.takes(rows):
                return False
            rows = output.token_rows()
        elif output.has_drafts and not graphs.takes(rows):
            return False
        try:
            self._run_graph(graphs, rows, output, step)
        except torch.OutOfMemoryError as error:
            self._on_out_of_memory(output.num_tokens, error)
            return False
        except Exception as error:
            self._fall("a CUDA graph", "launching kernel by kernel", error)
            return False
        return True

    def _run_graph(
        self, graphs: DecodeGraphs, rows: Sequence[ScheduledRow], output: SchedulerOutput, step: LaunchedStep
    ) -> None:
        logits_NV = graphs.run(rows)[: len(output.samples)]
        if not output.samples:
            return
        if self._quality is not None:
            self._quality.take(output, logits_NV, self.state)
        if self.state.are_plain(output.samples):
            token_N, _ = self._choose(logits_NV, SamplingBatch())
            graphs.batch.store(token_N)
            step.token_ids = to_host(token_N)
        else:
            self._sample(output.samples, logits_NV, step)

    def _compute(self, output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs any mix of rows, layer by layer. When memory doesn't suffice, it runs them again in ever smaller pieces,
        to the same effect. If even the smallest pieces do not fit, the step's requests fail."""
        pieces = split_step(output, output.num_tokens)
        while True:
            try:
                self._try_pieces(pieces, output, step)
                break
            except EncodeError as error:
                step.fail(str(error))
                break
            except torch.OutOfMemoryError as error:
                largest = max(piece.num_tokens for piece in pieces)
                self._on_out_of_memory(largest, error)
            if largest <= SMALLEST_PIECE:
                step.fail(NO_MEMORY)
                break
            pieces = split_step(output, largest // 2)
        if self.model.group is not None:
            self.model.group.end_step(len(output.samples))

    def _on_out_of_memory(self, num_tokens: int, error: torch.OutOfMemoryError) -> None:
        if self.model.group is not None:
            raise error
        logger.warning("%d tokens at once ran out of memory: %s", num_tokens, error)
        self.counters["steps_out_of_memory"] += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fall(self, failed: str, following: str, error: Exception) -> None:
        """Counts a launch failure after which the step is computed in another way. Raises any other error, and all of
        them in a group, where the other ranks would go on in the old way."""
        if self.model.group is not None or not is_launch_failure(error):
            raise error
        count_fallback(failed, following, error)

    def _try_pieces(self, pieces: Sequence[StepPiece], output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs the step piece by piece; if a launch fails that no other backend could take over, once more without
        fused operations, to the same effect."""
        try:
            self._compute_pieces(pieces, output, step)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._fall("a fused operation", "torch", error)
            with unfused():
                self._compute_pieces(pieces, output, step)

    def _compute_pieces(self, pieces: Sequence[StepPiece], output: SchedulerOutput, step: LaunchedStep) -> None:
        """Runs the step piece by piece. The connector's hooks see it as a whole: they are called beside its layers when
        there is one piece, else before and after all of them."""
        hooks = self._connector if output.connector_meta is not None else None
        every = any(row.prompt_logprobs for row in output.rows)
        step.prompt_logprobs = []
        wanted: list[torch.Tensor] = []
        if len(pieces) > 1:
            self._wait_for_layers(output)
        for piece in pieces:
            inputs = self._inputs.build(piece.rows)
            last = self._inputs.last_tokens(inputs, piece.sampled)
            media = (
                None if self._media is None else self._media.of(piece.rows, inputs.first_token_R, inputs.positions_T)
            )
            hidden_TH = self._forward(inputs, None if every else last, hooks if len(pieces) == 1 else None, media)
            if every:
                step.prompt_logprobs += prompt_logprobs(self.model, self.state, piece, inputs, hidden_TH)
                hidden_TH = hidden_TH[last.index]
            wanted.append(hidden_TH)
        if len(pieces) > 1:
            self._save_layers(output)
        self.state.fork(output.forks)
        if self._media is not None:
            self._media.fork(output.forks)
        if output.samples:
            hidden_NH = wanted[0]
            if len(pieces) > 1:
                order = np.argsort([index for piece in pieces for index in piece.samples])
                hidden_NH = torch.cat(wanted)[torch.from_numpy(order).to(self.device)]
            logits_NV = self.model.project(hidden_NH)
            if self._quality is not None:
                self._quality.take(output, logits_NV, self.state)
            self._sample(output.samples, logits_NV, step)

    def _wait_for_layers(self, output: SchedulerOutput) -> None:
        """Tells the connector, before a step that it can't see layer by layer, that all layers begin."""
        if self._connector is not None and output.connector_meta is not None:
            for name in self.model.attention_layers:
                self._connector.wait_for_kv_layer(name)

    def _save_layers(self, output: SchedulerOutput) -> None:
        """Tells the connector, after a step that it can't see layer by layer, that all layers are written."""
        if self._connector is not None and output.connector_meta is not None:
            for name, layer in self.model.attention_layers.items():
                self._connector.save_kv_layer(name, layer.kv_cache[0], None)

    def _forward(
        self,
        inputs: ForwardInputs,
        wanted: WantedTokens | None,
        hooks: KVConnectorWorker | None = None,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        context = ForwardContext(
            attn_metadata=inputs.metadata,
            no_compile_layers=self.model.attention_layers,
            hooks=hooks,
            adapters=inputs.adapters,
        )
        with set_forward_context(context):
            if media is not None:
                return self.model(inputs.input_ids_T, inputs.positions_T, wanted, media)
            return self.model(inputs.input_ids_T, inputs.positions_T, wanted)

    def _sample(self, samples: Sequence[SampleRow], logits_NV: torch.Tensor, step: LaunchedStep) -> None:
        """Draws tokens: at once, or, if some must follow grammars, once the tokens of the step before are known."""
        step.guided = None if self._guides is None else self._guides.of(samples)
        if step.guided is None:
            self._draw(samples, logits_NV, step)
            return
        step.put_off(partial(self._draw_guided, samples, logits_NV, step, step.guided, self._newest))
        if self.model.group is not None:
            step.sample()  # what the ranks exchange keeps its order, and what follows a step waits for all of them

    @torch.inference_mode()
    def _draw_guided(
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
        host_MW = torch.empty(guided.mask_shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        guided.fill(host_MW.numpy())
        [row_M] = upload([np.array(guided.indices, np.int64)], self.device)
        masks = TokenMasks(row_M, host_MW.to(self.device, non_blocking=True))
        try:
            self._draw(samples, logits_NV, step, masks)
        except torch.OutOfMemoryError as error:
            self._on_out_of_memory(len(samples), error)
            step.fail(NO_MEMORY)
        self._mark_end(step)

    def _draw(
        self, samples: Sequence[SampleRow], logits_NV: torch.Tensor, step: LaunchedStep, masks: TokenMasks | None = None
    ) -> None:
        """Samples, writes the tokens into the slots' tables and starts their way to the host. Counting them comes last:
        it alone may not happen twice when memory runs out and the step is run again."""
        batch, slot_N, position_N = self.state.sampling_batch(samples)
        token_N, logprobs = self._choose(logits_NV, replace(batch, masks=masks))
        self.state.write_tokens(slot_N, position_N, token_N)
        step.token_ids = to_host(token_N)
        if logprobs is not None:
            settings = self.state.settings[[s.slot for s in samples]]
            num_logprobs, targets = settings["num_logprobs"], np.flatnonzero(settings["num_logprobs"] >= 0)
            step.beams = frozenset(np.flatnonzero(settings["beam"]).tolist())
            step.logprobs = HostLogprobs.fetch(logprobs, targets, num_logprobs[targets])
        self.state.count_outputs(samples, slot_N, token_N)

    def _choose(self, logits_NV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
        """`sample`, of logits as the model projects them. In a group rank 0 draws, and every rank gets its tokens:
        on the device, so that the next step can be launched before the host has seen them."""
        group = self.model.group
        if group is None:
            return sample(logits_NV, batch)
        if batch.is_greedy:
            return group.argmax(logits_NV), None
        all_logits_NV = group.gather_logits(logits_NV)
        if group.shard.rank:
            return group.from_rank_0(torch.empty(len(logits_NV), dtype=torch.int64, device=self.device)), None
        token_N, logprobs = sample(all_logits_NV, batch)
        return group.from_rank_0(token_N), logprobs

    @torch.inference_mode()
    def warmup(self) -> None:
        """Runs the worst step that can come (a full prompt budget, every slot sampling with filters) and a decode step.

        Writes no KV and leaves the batch state as it is.
        """
        if self._followers is not None:
            self._followers.announce("warm_up")
        matmul.prepare(self.device)
        if self.spans is not None:
            self.spans.warm_up()
        sizes = (self._max_num_tokens, self._max_chunk, self.max_model_len, self.max_decode_rows)
        for rows in extreme_steps(*sizes, every_size=self.device.type == "cuda"):
            inputs = self._inputs.build_dummy(rows)
            num_samples = min(self._max_num_seqs, inputs.metadata.num_tokens)
            hidden_TH = self._forward(inputs, None)
            self._forward(inputs, self._inputs.last_tokens(inputs, range(len(rows))))
            logits_NV = self.model.project(hidden_TH[:num_samples])
            for batch in every_way_to_sample(num_samples, self.model.vocab_size, self.device):
                self._choose(logits_NV, batch)
            if self._adapters is not None:
                self._adapters.fill_with_rank(1)  # what the slots hold before anything was brought: zeros
                self._forward(self._inputs.build_dummy(rows, adapter=1), None)
                self._adapters.fill_with_rank(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def run_dummy(self, rows: Sequence[ScheduledRow]) -> None:
        """Runs one greedy step of such rows (single tokens first). Writes no KV and leaves the batch state as it is."""
        if self._followers is not None:
            self._followers.announce("dummy", SchedulerOutput(0, tuple(rows), ()))
        if self._graphs is not None and self._graphs.takes(rows):
            logits_NV = self._graphs.run_dummy(sum(row.num_tokens for row in rows))[: len(rows)]
        else:
            inputs = self._inputs.build_dummy(rows)
            logits_NV = self.model.project(self._forward(inputs, self._inputs.last_tokens(inputs, range(len(rows)))))
        self._choose(logits_NV, SamplingBatch())

    def capture_decode_steps(self) -> None:
        """Captures decode steps, so that from here on they replay graphs. CUDA only, once, after `warmup`."""
        assert self._graphs is None, "captured once"
        assert self.device.type == "cuda"
        if self._followers is not None:
            self._followers.announce("capture")
        graphs = self.new_graphs()
        graphs.capture()
        self._graphs = graphs

    def replay_graphs(self, may_replay: bool) -> None:
        """Says whether the steps from here on may be replayed, where graphs were captured."""
        self._may_replay = may_replay

    def new_graphs(self) -> DecodeGraphs:
        """Graphs for this runner's steps, not yet captured."""
        has_adapters = self._adapters is not None
        rows, length = self.max_graph_rows, self.max_model_len
        shift_S = None if self._media is None else self._media.shift_S
        return DecodeGraphs(self.model, self.state, rows, length, self.sharing, shift_S, has_adapters, self.spans)

    @property
    def max_decode_rows(self) -> int:
        return min(self._max_num_seqs, self._max_num_tokens)

    @property
    def max_graph_rows(self) -> int:
        """Rows of the largest captured step: every sequence's next token, or short prompts beside them."""
        return min(max(self._max_num_seqs, REPLAYED_TOKENS), self._max_num_tokens)
