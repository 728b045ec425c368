"""The device side of a step: patches, block copies, forward pass, sampling, and the copy of the tokens to the host.

`execute` only enqueues (on CUDA): a decode row's input is gathered from the slot's token table, where the step before
put it, and the host reads tokens from pinned memory when the step's event has fired.

Shape legend: T tokens of a step, N sampled rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.kv_layout import LayerPlace
from tandem.engine.media.slots import MediaSlots
from tandem.engine.running.at_start.warm_up import every_way_to_sample, extreme_steps
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.drawing import TokenDrawing
from tandem.engine.running.eager_steps import EagerSteps
from tandem.engine.running.encoder_spans import EncoderSpans, SpanPart
from tandem.engine.running.expert_balance import make_expert_balance
from tandem.engine.running.faults import StepFaults
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.graphs.decode_graphs import REPLAYED_TOKENS, DecodeGraphs, rows_needed
from tandem.engine.running.graphs.prompt_graphs import ROWS_BESIDE, DividedModel, PromptGraphs, captured_attention
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.running.runner_needs import AdapterMemory, Followers, Model, QualityProbe
from tandem.engine.running.sampler import SamplingBatch
from tandem.engine.running.step_inputs import StepInputs
from tandem.engine.running.step_result import NO_MEMORY, LaunchedStep
from tandem.engine.scheduling.ports import BetweenLayers, KVConnectorWorker
from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput
from tandem.engine.structured.guides import Guides
from tandem.kernels.api.attention import bind_kv_cache, metadata_backend
from tandem.kernels.api.backend import CapturedAttention
from tandem.kernels.blocks.cache_ops import copy_blocks
from tandem.kernels.products import matmul


class ModelRunner:
    """Runs steps on the pool's device, on the stream that is current when it is called: patches the slots, replays a
    graph or computes kernel by kernel, draws. It is the scheduler's `Runner` (engine/scheduling/ports.py)."""

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
        tell_lost: Callable[[int], None] | None = None,
        places: Sequence[LayerPlace] = (),
    ) -> None:
        """`pool`: [num_blocks, num_kv_heads, num_layers, planes, block_size, head_dim]; the model is bound to it here.
        `followers` are told of everything that is run here, before it is. `guides`: needed where tokens are drawn.
        `media`: needed where prompts hold more than text; `adapters`: where requests may take some. `counts_overflows`:
        each step says how many values fp8 could not hold so far. `quality` looks at steps. `tell_lost`: on ranks that
        are led, tells rank 0 of steps for which this one had no memory. `places` are the layout's."""
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
        self._max_num_seqs = options.max_num_seqs
        self._max_num_tokens = options.max_num_batched_tokens
        self.max_model_len = max_model_len
        self._max_chunk = options.max_prefill_chunk or options.max_num_batched_tokens
        self._faults = StepFaults(model.group or model.expert_group, self.device, tell_lost)
        self._counters = self._faults.counters
        self._balance = make_expert_balance(model)
        self.spans: EncoderSpans | None = None
        if model.encoder is not None:  # but for the spans, positions are the decoder's
            self.max_model_len = model.encoder.facts.max_decoder_len
        self.state = BatchState(
            options.max_num_seqs,
            self.max_model_len,
            block_size,
            model.vocab_size,
            eos_token_ids,
            self.device,
            max((place.table for place in places), default=0),
        )
        self._table_of = dict(zip(model.attention_layers, (place.table for place in places), strict=False))
        bind_kv_cache(model.attention_layers, pool, [place.layer for place in places])
        bind_kv_cache(model.cross_layers, pool)
        layers = (*model.attention_layers.values(), *model.cross_layers.values())
        builder = metadata_backend(layers).get_builder_cls()()
        if model.encoder is not None:
            self.spans = EncoderSpans(
                model.encoder, options.max_num_seqs, block_size, self.device, builder, self._counters
            )
        self.sharing: PrefixSharing | None = None
        if options.share_prefixes:
            self.sharing = PrefixSharing.for_layers(model.attention_layers.values(), self.state, self.max_graph_rows)
        self.features: HeadFeatures | None = None
        if model.guess_head is not None:
            self.features = HeadFeatures(model.guess_head, options.max_num_seqs, self.device)
        most, sharing, spans = options.max_num_batched_tokens, self.sharing, self.spans
        self._inputs = StepInputs(self.state, most, builder, sharing, spans, self.features, self._table_of)
        self._drawing = TokenDrawing(self.state, model.group, self._faults, guides, quality, counts_overflows)
        parts = self.state, self._inputs, self._drawing, self._faults
        self._eager = EagerSteps(model, *parts, worker_connector, media, self.features)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._may_replay = True
        if worker_connector is not None:
            worker_connector.register_kv_cache(pool)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput, between_layers: BetweenLayers | None = None) -> LaunchedStep:
        """Launches one step, in the order of effect that `SchedulerOutput` states. Raises OutOfMemoryError in a group
        where there isn't even memory to stand in: the process must end then, since the other ranks wait for it."""
        self._drawing.catch_up()
        connector = self._connector
        if connector is not None and self._is_odd(output):
            connector.settle()
        if self.model.group is not None:
            self.model.group.begin_step()
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
        if self.features is not None:
            self.features.forget(output.new_slots)
        if output.copies:
            copies = ((each.source, each.destination, each.num_tokens) for each in output.copies)
            copy_blocks(self.pool, *map(list, zip(*copies, strict=True)))
        step = LaunchedStep(output.step_id, failed_slots=failed_slots)
        if self._followers is not None:
            step.is_lost = partial(self._was_lost, self._followers, output.step_id)
        if connector is not None and output.connector_meta is not None:
            connector.start_load_kv(output.connector_meta, between_layers)
            step.find_spoiled = partial(connector.spoiled_slots, output.step_id)
        if self.model.expert_group is not None and output.rows:
            self.model.expert_group.begin_step(rows_needed(output))
        is_replayed = self._launch(output, span_parts, step)
        if connector is not None and (output.connector_meta is not None or not is_replayed):
            connector.wait_for_save()
        self._drawing.end(step)
        if self._balance is not None:
            self._balance.step_launched()
        return step

    @property
    def counters(self) -> dict[str, float]:
        return {**self._counters, **({} if self._balance is None else self._balance.counters())}

    def _is_odd(self, output: SchedulerOutput) -> bool:
        """Whether more is launched than most steps need."""
        encodes = self.spans is not None or self._media is not None
        return encodes or bool(output.copies or output.forks or output.adapter_loads)

    def _was_lost(self, followers: Followers, step_id: int) -> bool:
        lost = followers.have_lost(step_id)
        self._counters["steps_out_of_memory"] += lost
        return lost

    def _launch(self, output: SchedulerOutput, span_parts: Sequence[SpanPart], step: LaunchedStep) -> bool:
        """Runs the encoder for what the step needs of it, then the decoder. Returns whether a graph was replayed."""
        if self.spans is not None:
            try:
                self.spans.compute(span_parts)
            except torch.OutOfMemoryError as error:
                self._faults.on_out_of_memory(sum(part.end - part.start for part in span_parts), error)
                step.fail(NO_MEMORY)
                return False
        if output.rows and self._replay(output, step):
            return True
        self._eager.compute(output, step)
        return False

    def _replay(self, output: SchedulerOutput, step: LaunchedStep) -> bool:
        """Runs a decode step, or small chunks of prompts, by replaying a graph. False: no graph fits this step, or the
        device had no memory for what comes beside it; what has run already may be run again, to the same effect."""
        graphs = self._graphs
        if graphs is None or not (self._may_replay and graphs.fit_group):
            return False
        if self._media is not None and self._media.touch(output.rows):
            return False
        rows: Sequence[ScheduledRow] = output.rows
        if not output.is_decode:
            if not output.is_only_rows or not graphs.takes(rows):
                return False
            rows = output.token_rows()
        elif output.has_drafts and not graphs.takes(rows):
            return False
        logits_NV = None
        try:
            logits_NV = graphs.run(rows)[: len(output.samples)]
            self._drawing.draw(output, logits_NV, step, graphs.batch)
        except torch.OutOfMemoryError as error:
            self._faults.on_out_of_memory(output.num_tokens, error)
            if self.model.group is None:
                return False
            if logits_NV is None:
                raise  # nobody knows how far the graph has come
            self._faults.lose(step)
            self._drawing.forgo(output.samples, logits_NV[:1])
        except Exception as error:
            self._faults.on_launch_failure("a CUDA graph", "launching kernel by kernel", error)
            return False
        return True

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
            hidden_TH = self._eager.forward(inputs, None)
            self._eager.forward(inputs, self._inputs.last_tokens(inputs, range(len(rows))))
            logits_NV = self.model.project(hidden_TH[:num_samples])
            for batch in every_way_to_sample(num_samples, self.model.vocab_size, self.device):
                self._drawing.choose(logits_NV, batch)
            if self._adapters is not None:
                self._adapters.fill_with_rank(1)  # what the slots hold before anything was brought: zeros
                self._eager.forward(self._inputs.build_dummy(rows, adapter=1), None)
                self._adapters.fill_with_rank(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def graph_sizes(self) -> Sequence[int]:
        """The tokens of the graphs that run small steps, rising; none before they are captured, or where none are."""
        return () if self._graphs is None else self._graphs.sizes

    @property
    def prompt_graph_sizes(self) -> Sequence[int]:
        """The same of the graphs that run steps with prompts."""
        return () if self._prompt_graphs is None else self._prompt_graphs.sizes

    @torch.inference_mode()
    def run_dummy(self, rows: Sequence[ScheduledRow]) -> None:
        """Runs one greedy step of such rows (single tokens first). Writes no KV and leaves the batch state as it is."""
        self._drawing.catch_up()
        if self._followers is not None:
            self._followers.announce("dummy", SchedulerOutput(0, tuple(rows), ()))
        if self._graphs is not None and self._graphs.takes(rows):
            logits_NV = self._graphs.run_dummy(sum(row.num_tokens for row in rows))[: len(rows)]
        else:
            inputs = self._inputs.build_dummy(rows)
            wanted = self._inputs.last_tokens(inputs, range(len(rows)))
            logits_NV = self.model.project(self._eager.forward(inputs, wanted))
        self._drawing.choose(logits_NV, SamplingBatch())

    def capture_decode_steps(self, prompt_tokens: int = 0, prompt_attention: bool = False) -> None:
        """Captures decode steps, so that from here on they replay graphs, and steps with prompts of up to so many
        tokens, where the model can be divided, with their attention where that is asked for and can be. CUDA only,
        once, after `warmup`."""
        assert self._graphs is None, "captured once"
        assert self.device.type == "cuda"
        if self._followers is not None:
            self._followers.announce("capture")
        graphs = self.new_graphs()
        graphs.capture()
        self._prompt_graphs = self.new_prompt_graphs(prompt_tokens, prompt_attention)
        if self._prompt_graphs is not None:
            self._prompt_graphs.capture()
            self._eager.replay(self._prompt_graphs)
        self._graphs = graphs

    def replay_graphs(self, may_replay: bool) -> None:
        """Says whether the steps from here on may be replayed, where graphs were captured."""
        self._may_replay = may_replay
        self._eager.replay(self._prompt_graphs if may_replay else None)

    def new_prompt_graphs(self, max_tokens: int, with_attention: bool = False) -> PromptGraphs | None:
        """Graphs for steps with up to so many tokens of prompts beside some decodes, not yet captured. None: for none,
        or the model can't be divided, or other nodes compute its experts. `with_attention`: in the graphs where it can
        be."""
        group = self.model.group
        if not max_tokens or self.model.expert_group:
            return None
        most = min(max_tokens + ROWS_BESIDE, self._max_num_tokens)
        if group is not None and group.most_captured_rows is not None:
            most = min(most, group.most_captured_rows)
        if not isinstance(self.model, DividedModel) or not self.model.can_be_divided:
            return None
        captured: Sequence[CapturedAttention] = ()
        if with_attention:
            limits = self._max_num_seqs, most, self.max_model_len
            captured = captured_attention(self.model.attention_layers, self._table_of, *limits)
        parts = captured, self._table_of, group
        return PromptGraphs(self.model, self._inputs, most, self.device, torch.cuda.CUDAGraph, *parts)

    def new_graphs(self) -> DecodeGraphs:
        """Graphs for this runner's steps, not yet captured."""
        rows, length = self.max_graph_rows, self.max_model_len
        shift_S = None if self._media is None else self._media.shift_S
        parts = shift_S, self.spans, self.features, self._table_of
        batch = DecodeBatch(self.model, self.state, rows, length, *parts)
        return DecodeGraphs(batch, self.sharing, self._adapters is not None, self.model.expert_group)

    @property
    def max_decode_rows(self) -> int:
        return min(self._max_num_seqs, self._max_num_tokens)

    @property
    def max_graph_rows(self) -> int:
        """Rows of the largest captured step: every sequence's next token, or short prompts beside them."""
        return min(max(self._max_num_seqs, REPLAYED_TOKENS), self._max_num_tokens)
