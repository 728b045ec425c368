"""The steps of a head that guesses: a token of each sequence after another, each fed by the one before on the device.

The first is behind a sequence's newest token and the model's feature before it; each of the others behind a guess and
the head's own hidden state. A step reads slots and block tables of the model's batch state; tokens come from the host
once and go back once. On CUDA a step is a graph, but for drawing.

Legend: R rows, G rows of a graph, E hidden size, V vocabulary.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from tandem.engine.process.process_log import RateLimited
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.graphs.decode_batch import ROW_MULTIPLE, metadata_of_rows
from tandem.engine.running.graphs.decode_graphs import graph_sizes, without_garbage
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.running.sampler import SamplingBatch, sample
from tandem.engine.running.step_result import to_host
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadVerb
from tandem.engine.scheduling.step import BlockAppend, SampleRow
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.products.fused_ops import argmax_tokens
from tandem.kernels.sampling.decode_buffers import DecodeInputs
from tandem.kernels.sampling.decode_inputs import gather_decode_inputs, store_tokens

if TYPE_CHECKING:
    from tandem.engine.models.heads.taps import GuessHead

limited = RateLimited(logging.getLogger(__name__))
StepKind = Literal["first", "later"]  # by the model's feature, by the head's own


class HeadFollowers(Protocol):
    """The other ranks, as rank 0 leads them: they do the same with their share of the head."""

    def announce_head(self, verb: HeadVerb, rows: Sequence[HeadRow], appends: Sequence[BlockAppend]) -> None: ...


class HeadSteps:
    """The head of one runner, whose layer must be bound. Implements `HeadRunner`."""

    def __init__(
        self,
        head: GuessHead,
        features: HeadFeatures,
        state: BatchState,
        max_rows: int,
        max_model_len: int,
        followers: HeadFollowers | None = None,
    ) -> None:
        """`followers`: the ranks that do each step along with this one; None: there are none, or this is one."""
        self._followers = followers
        self._head, self._features, self._state = head, features, state
        self._max_model_len, self.device = max_model_len, state.device
        self.sizes = graph_sizes(max_rows)
        rows = -(-max_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        # Slots, slots whose tables take the guess (-1: nobody's), positions, tokens.
        self._words = torch.zeros((4, rows), dtype=torch.int64, device=self.device)
        self._words[:2] = -1
        self._guessed = torch.zeros((head.num_speculative_tokens + 1, rows), dtype=torch.int64, device=self.device)
        self._place = torch.zeros(1, dtype=torch.int64, device=self.device)  # of the newest step in `_guessed`
        self._inputs = DecodeInputs.allocate(rows, state.max_blocks, self.device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._hidden_RE = torch.zeros((rows, head.hidden_size), dtype=head.dtype, device=self.device)
        # For rows that draw. Tokens that the head doesn't have stay at -inf.
        self._logits_RV = torch.full((rows, state.vocab_size), -torch.inf, dtype=head.dtype, device=self.device)
        self._graphs: dict[tuple[int, StepKind], torch.cuda.CUDAGraph] = {}

    @property
    def may_place(self) -> bool:
        """Not where other ranks are: what they check has to be the same, to the last guess."""
        return self._followers is None

    @torch.inference_mode()
    def guess(
        self, rows: Sequence[HeadRow], appends: Sequence[BlockAppend], in_place: bool = False
    ) -> Callable[[], list[list[int]]] | None:
        """The guesses, as `HeadRunner` has them; valid until the next call. Raises OutOfMemoryError where other ranks
        wait for this one's part."""
        self._announce("guess", rows, appends)
        try:
            drawn = self._launch(rows, appends, in_place)
        except torch.OutOfMemoryError:
            if self._head.group is not None:
                raise
            limited.warning("the device has no memory left to guess tokens; nothing is guessed for a step")
            return None
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()

        def see() -> list[list[int]]:
            if event is not None:
                event.synchronize()
            columns = drawn.tolist()
            return [[columns[place][index] for place in range(row.num_guesses)] for index, row in enumerate(rows)]

        return see

    def _announce(self, verb: HeadVerb, rows: Sequence[HeadRow] = (), appends: Sequence[BlockAppend] = ()) -> None:
        if self._followers is not None:
            self._followers.announce_head(verb, rows, appends)

    def _launch(self, rows: Sequence[HeadRow], appends: Sequence[BlockAppend], in_place: bool) -> torch.Tensor:
        """The tokens of each step, on their way to the host: int64 [steps, R]. Those that no row wants may be any."""
        self._state.apply((), appends)
        size = self._size_for(len(rows))
        given = torch.empty((4, size), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        words = given.numpy()
        words[:2], words[2:] = -1, 0
        words[0, : len(rows)] = [row.slot for row in rows]
        if in_place:
            words[1] = words[0]
        words[2, : len(rows)] = [row.position for row in rows]
        words[3, : len(rows)] = [row.token for row in rows]
        self._words[:, :size].copy_(given, non_blocking=True)
        draws = not self._state.all_plain([row.slot for row in rows if row.slot >= 0])
        before = len(rows)
        for place in range(rows[0].num_guesses):
            num_rows = sum(row.num_guesses > place for row in rows)
            if num_rows < before:
                self._words[:2, num_rows:before] = -1
                self._words[2, num_rows:before] = 0  # every step counts on, which may go past the tables' end
            before = num_rows
            self._step(num_rows, "later" if place else "first")
            if draws:
                self._draw(rows[:num_rows], place)
                self._keep(num_rows)
        return to_host(self._guessed[: rows[0].num_guesses, : len(rows)])

    def _size_for(self, num_rows: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def _step(self, num_rows: int, kind: StepKind) -> None:
        size = self._size_for(num_rows)
        if (size, kind) in self._graphs:
            self._graphs[size, kind].replay()
        else:
            self._compute(size, kind)

    def _compute(self, size: int, kind: StepKind) -> None:
        """Leaves the likeliest token where the next step looks for its own."""
        slot_G, _, position_G, token_G = self._words[:, :size]
        if kind == "later":
            position_G += 1
            self._place += 1
        else:
            self._place.zero_()
        state, inputs = self._state, self._inputs.first(size)
        gather_decode_inputs(slot_G, position_G, state.token_ids_SC, state.block_table_SB, state.block_size, inputs)
        feature_GE = self._hidden_RE[:size] if kind == "later" else self._features.of(slot_G, position_G - 1)
        layers = {self._head.layer_name: self._head.attention}
        metadata = metadata_of_rows(layers, inputs, self._starts, self._max_model_len, self._lengths(position_G))
        with set_forward_context(ForwardContext(metadata, layers)):
            hidden_GE = self._head(token_G, feature_GE, position_G)
        self._hidden_RE[:size].copy_(hidden_GE)
        logits_GW = self._head.project(hidden_GE)
        token_G.copy_(self._head.token_W[argmax_tokens(logits_GW)])
        self._logits_RV[:size].index_copy_(1, self._head.token_W, logits_GW)
        self._keep(size)

    def _keep(self, num_rows: int) -> None:
        """Keeps the newest guesses for the host, and puts them where the step that checks them looks for its input."""
        _, taking_G, position_G, token_G = self._words[:, :num_rows]
        self._guessed[:, :num_rows].index_copy_(0, self._place, token_G[None])
        store_tokens(taking_G, position_G, token_G, self._state.token_ids_SC)

    def _lengths(self, position_G: torch.Tensor) -> tuple[int, ...]:
        """Lengths on the host, for backends that loop there: those of CPUs. Captured steps read them on the device."""
        if self.device.type == "cpu":
            return tuple(self._inputs.seq_lens_R[: len(position_G)].tolist())
        return (self._max_model_len,) * len(position_G)

    def _draw(self, rows: Sequence[HeadRow], place: int) -> None:
        """Has tokens drawn by the numbers of their places, as the model will; without what depends on the output."""
        samples = [
            SampleRow(index, row.slot, row.position + 1 + place, row.sample_index, row.output_index + place)
            for index, row in enumerate(rows)
        ]
        whole, _, _ = self._state.sampling_batch(samples)
        drawn_R, _ = sample(self._logits_RV[: len(rows)], SamplingBatch(edits=whole.edits, random=whole.random))
        self._words[3, : len(rows)].copy_(drawn_R)

    @torch.inference_mode()
    def run_dummy(self, num_rows: int) -> None:
        """A later step of nobody's rows, which stores nothing."""
        self._words[:2], self._words[2], self._place[:] = -1, 0, 0
        self._step(num_rows, "later")

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compiles kernels, by steps of every size."""
        self._announce("warm_up")
        self._words[:2] = -1
        for size in self.sizes:
            self._compute(size, "first")
            self.run_dummy(size)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every step, the largest first. CUDA only, once, after `warm_up`."""
        self._announce("capture")
        stream = torch.cuda.Stream(self.device)
        pool: Any = None
        kinds: tuple[StepKind, StepKind] = ("first", "later")
        with without_garbage():
            for size in reversed(self.sizes):
                for kind in kinds:
                    torch.cuda.synchronize(self.device)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                        self._compute(size, kind)
                    self._graphs[size, kind], pool = graph, graph.pool()
