"""Steps with prompts as CUDA graphs, cut at layers' attention.

All of a layer but attention depends on the number of tokens alone. So a pass is cut at each attention: what lies
between two of them, a segment, is a graph. Where the backend has attention that reads lengths on the device, a segment
has that too, and as many layers as are pushed together: between replays come the connector's hooks alone. A step takes
the segments of the smallest size that holds its tokens; what is left is padding, whose slot is -1. Of the last layer
the graphs have keys and values; the rest, of wanted tokens alone, is launched (docs/steps.md#prompts-as-graphs).

Shape legend: T tokens of a step, G tokens of a graph, E hidden size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from tandem.engine.contracts.kv_layout import push_groups
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.running.graphs.decode_graphs import without_garbage
from tandem.engine.running.step_inputs import ForwardInputs, StepInputs
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import CapturedAttention
from tandem.kernels.api.forward_context import ForwardContext, get_forward_context, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.api.unified_attention import unified_attention
from tandem.kernels.products.rotary_attention import UpToAttention, WantedTokens

ROWS_BESIDE = 64  # decodes beside the largest chunk for which there is room; a guess


class Graph(Protocol):
    """What is used of torch.cuda.CUDAGraph."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@runtime_checkable
class DividedModel(Protocol):
    """A model whose pass can be made in two parts: of all tokens up to its last attention, of some from there on."""

    @property
    def attention_layers(self) -> Mapping[str, Attention]: ...

    @property
    def can_be_divided(self) -> bool:
        """Whether each layer but the last calls `unified_attention` once, in their order, with all tokens."""

    def up_to_last_attention(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> UpToAttention: ...

    def from_last_attention(
        self, last: UpToAttention, positions_T: torch.Tensor, wanted: WantedTokens | None
    ) -> torch.Tensor:
        """Normalised hidden states of the wanted tokens (None: of all). `last.kv` is overwritten."""


class Segment(NamedTuple):
    """A graph, and the layer before whose attention it ends; "": there is none."""

    graph: Graph
    layer: str
    kv_is_stored: bool
    num_exchanges: int  # with the other ranks


def prompt_graph_sizes(max_tokens: int, least: int = 1) -> list[int]:
    """Tokens of the captured steps, at least `least`. Products are computed in tiles of 64 or 128 tokens, so sizes
    between multiples of 64 would save nothing."""
    ladder = [32, *range(64, max_tokens, 64)]
    return [*(size for size in ladder if least <= size < max_tokens), max_tokens]


def captured_attention(
    layers: Mapping[str, Attention], table_of: Mapping[str, int], *limits: int
) -> Sequence[CapturedAttention]:
    """Attention of these layers as part of graphs, by block table; none where a backend has none. `limits` are those
    of AttentionBackend.capture."""
    by_table: dict[int, list[Attention]] = {}
    for name, layer in layers.items():
        by_table.setdefault(table_of.get(name, 0), []).append(layer)
    made = [each[0].first_backend().capture(each, *limits) for _, each in sorted(by_table.items())]
    captured = [each for each in made if each is not None]
    return captured if len(captured) == len(made) else ()


class PromptGraphs:
    """The segments of one model's steps: `capture` must come first, once the KV pool is bound. They read the buffers of
    `inputs`, which builds the steps. All sizes read and write the same tensors around attention, since only one step
    runs at a time."""

    def __init__(
        self,
        model: DividedModel,
        inputs: StepInputs,
        max_tokens: int,
        device: torch.device,
        new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph,
        captured: Sequence[CapturedAttention] = (),
        table_of: Mapping[str, int] | None = None,
        group: TensorParallel | None = None,
    ) -> None:
        """`captured`: attention as part of the graphs, by block table; none: it is launched between them. `table_of`:
        each layer's block table, where there are several. `group`: the ranks that replay the same graphs, whose
        exchanges are of as many rows as a graph has tokens."""
        self._model, self._inputs, self._device, self._new_graph = model, inputs, device, new_graph
        self._captured, self._table_of, self._group = tuple(captured), dict(table_of or {}), group
        self.sizes = prompt_graph_sizes(max_tokens, captured[0].most_rows if captured else 1)
        self._tensors: dict[str, torch.Tensor] = {}  # what attention reads and writes, and what the last segment leaves
        self._segments: dict[int, list[Segment]] = {}
        self._capture: _Capture | None = None
        self._have_run: set[tuple[str, int]] = set()  # sizes, and numbers of wanted tokens
        # Layers but the last, whose attention no graph has, by the first of those that are computed together.
        names = list(model.attention_layers)
        self._layer_of = list({self._table(name): name for name in sorted(names, key=self._table)}.values())
        self._together = {names[group.start]: names[group.start : group.stop] for group in push_groups(len(names))[:-1]}

    def _table(self, layer_name: str) -> int:
        return self._table_of.get(layer_name, 0)

    @property
    def num_layers(self) -> int:
        """Layers of all sizes together, however many are in one graph."""
        return len(self.sizes) * len(self._model.attention_layers)

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all sizes, the largest first, so that smaller ones find their memory in the shared pool."""
        on_cuda = self._device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_cuda else None
        stream = torch.cuda.Stream(self._device) if on_cuda else None
        with without_garbage():
            self.warm_up(self.sizes[-1])  # says which sizes there are
            for size in reversed(self.sizes):
                self.warm_up(size)  # compiles kernels, makes cached constants: not under capture
                if on_cuda:
                    torch.cuda.synchronize(self._device)
                with nullcontext() if stream is None else torch.cuda.stream(stream), self._capturing(pool):
                    self._pass_over(size)
                    assert self._capture is not None
                    self._segments[size] = self._capture.segments

    def warm_up(self, size: int) -> None:
        """Computes, of padding, what is captured of a step of `size` tokens. Where the model's tensors are none for
        captured attention, it is launched from then on."""
        for slot_G in self._inputs.buffers(size)[2]:
            slot_G.fill_(-1)
        try:
            self._pass_over(size)
        except ValueError:
            if not self._captured:
                raise
            self._captured, self.sizes = (), prompt_graph_sizes(self.sizes[-1])
            self._pass_over(size)

    def _pass_over(self, size: int) -> None:
        """What comes before the last attention, of `size` tokens, without any launched attention."""
        input_id_G, position_G, slots = self._inputs.buffers(size)
        by_table = [_without_lengths(slot_G) for slot_G in slots]
        metadata = {name: by_table[self._table(name)] for name in self._model.attention_layers}
        for each in self._captured:
            each.begin()
        with set_forward_context(ForwardContext(metadata, self._model.attention_layers, cuts=self)):
            last = self._model.up_to_last_attention(input_id_G, position_G)
        for name, tensor in last._asdict().items():
            self._keep(name, tensor)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer_name: str, kv_is_stored: bool
    ) -> torch.Tensor:
        """Cuts the pass here (`LayerCuts`)."""
        if self._captured:
            if self._capture is not None and layer_name in self._together:
                self._capture.cut(layer_name, kv_is_stored)
            context = get_forward_context()
            layer, metadata = context.layer(layer_name), context.metadata_of(layer_name)
            captured = self._captured[self._table(layer_name)]
            return captured.attend(layer, query, key, value, metadata, kv_is_stored)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._keep(name, tensor)
        if self._capture is not None:
            self._capture.cut(layer_name, kv_is_stored)
        return self._room("out", query)

    def takes(self, inputs: ForwardInputs, wanted: WantedTokens | None) -> bool:
        """Whether these inputs are those of a step that was captured. Not on several ranks if all tokens are wanted: a
        rank without memory has one number of rows to stand in for, see `EagerSteps`."""
        if self._group is not None and wanted is None:
            return False
        is_plain = inputs.adapters is None and inputs.links_3T is None and len(inputs.positions_T) <= self.sizes[-1]
        return is_plain and (not self._captured or self._captured[0].takes(inputs.metadata))

    def have_run(self, inputs: ForwardInputs, wanted: WantedTokens | None) -> bool:
        """Whether such a step needs no kernel that those before it didn't: what is launched depends on its size and on
        how many tokens are wanted."""
        return self._kinds(inputs, wanted) <= self._have_run

    def _kinds(self, inputs: ForwardInputs, wanted: WantedTokens | None) -> set[tuple[str, int]]:
        num = len(inputs.positions_T)
        return {("size", self.size_of(num)), ("all", num) if wanted is None else ("wanted", len(wanted.index))}

    def size_of(self, num_tokens: int) -> int:
        """Tokens of the graphs that run a step of so many, which must be one that they take."""
        return self.sizes[bisect.bisect_left(self.sizes, num_tokens)]

    def forward(self, inputs: ForwardInputs, wanted: WantedTokens | None, context: ForwardContext) -> torch.Tensor:
        """Normalised hidden states of the wanted tokens (None: of all T). Valid until the next step. What stands behind
        the inputs is of earlier steps: tokens and places that are computed with, and stored nowhere."""
        num, positions_T = len(inputs.positions_T), inputs.positions_T
        size = self.size_of(num)
        self._have_run |= self._kinds(inputs, wanted)
        _, position_G, slots = self._inputs.buffers(size)
        assert positions_T.data_ptr() == position_G.data_ptr(), "inputs of another builder"
        for slot_G in slots:
            slot_G[num:].fill_(-1)
        with set_forward_context(context):
            if not self._captured:
                self._replay_between(self._segments[size], num)
            else:
                for captured, layer in zip(self._captured, self._layer_of, strict=True):
                    captured.fill(context.metadata_of(layer))
                self._replay_all(self._segments[size], context)
            last = UpToAttention(*(self._tensors[name][:num] for name in UpToAttention._fields))
            return self._model.from_last_attention(last, positions_T, wanted)

    def _replay_between(self, segments: Sequence[Segment], num_tokens: int) -> None:
        """Launches attention, of so many tokens, behind each segment but the last."""
        tensors = self._tensors
        for segment in segments:
            self._replay(segment)
            if segment.layer:
                query, key, value = (tensors[name][:num_tokens] for name in ("query", "key", "value"))
                output = unified_attention(query, key, value, segment.layer, segment.kv_is_stored)
                tensors["out"][:num_tokens].copy_(output)

    def _replay_all(self, segments: Sequence[Segment], context: ForwardContext) -> None:
        """Calls the hooks of a segment's layers before it and behind it."""
        hooks, layers = context.hooks, list[str]()
        for segment in segments:
            if hooks is not None:
                for layer in layers:
                    hooks.wait_for_kv_layer(layer)
            self._replay(segment)
            if hooks is not None:
                for layer in layers:
                    hooks.save_kv_layer(layer, context.layer(layer).kv_cache[0], context.metadata_of(layer))
            layers = self._together.get(segment.layer, [])

    def _replay(self, segment: Segment) -> None:
        segment.graph.replay()
        if self._group is not None:
            self._group.replayed(segment.num_exchanges)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copies a tensor [G, ...] to where each pass leaves what it calls so."""
        self._room(name, tensor).copy_(tensor)

    def _room(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Where each pass has what it calls so, [G, ...]."""
        if name not in self._tensors:
            self._tensors[name] = like.new_zeros((self.sizes[-1], *like.shape[1:]))
        return self._tensors[name][: len(like)]

    @contextmanager
    def _capturing(self, pool: Any) -> Iterator[None]:
        self._capture = _Capture(self._new_graph, pool, self._group)
        try:
            yield
            self._capture.end()
        finally:
            self._capture = None


def _without_lengths(slot_G: torch.Tensor) -> AttentionMetadata:
    """What a pass needs of a step's metadata besides attention: where keys and values go."""
    nothing, size = slot_G[:0], len(slot_G)
    return AttentionMetadata(
        query_start_loc=nothing, seq_lens=nothing, block_tables=nothing, slot_mapping=slot_G,
        num_decode_rows=0, max_query_len=size, max_seq_len=size, query_lens_cpu=(size,), seq_lens_cpu=(size,),
    )  # fmt: skip


class _Capture:
    """The segments of one size while they are captured."""

    def __init__(self, new_graph: Callable[[], Graph], pool: Any, group: TensorParallel | None) -> None:
        self._new_graph, self._pool, self._group = new_graph, pool, group
        self.segments: list[Segment] = []
        self._begin()

    def cut(self, layer: str, kv_is_stored: bool) -> None:
        self.end(layer, kv_is_stored)
        self._begin()

    def end(self, layer: str = "", kv_is_stored: bool = False) -> None:
        self._graph.capture_end()
        self.segments.append(Segment(self._graph, layer, kv_is_stored, self._num_exchanges() - self._began_with))

    def _begin(self) -> None:
        self._graph, self._began_with = self._new_graph(), self._num_exchanges()
        # What other threads do (a transfer, another node of this process) must not end the capture.
        self._graph.capture_begin(self._pool, "thread_local")

    def _num_exchanges(self) -> int:
        return 0 if self._group is None else self._group.num_exchanges
