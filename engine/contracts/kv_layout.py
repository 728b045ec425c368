"""What a node's KV pool looks like in memory, exchanged in the handshake."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def kv_heads_of(rank: int, size: int, num_all: int) -> range:
    """Which of a model's KV heads rank `rank` of `size` holds; where there are fewer than ranks, neighbours hold the
    same."""
    first = rank * num_all // size
    return range(first, first + max(1, num_all // size))


# Layers whose KV is pushed together: a quarter of the calls, runs of bytes four times as long;
# docs/measurements.md#pushes-out-of-a-gpu.
LAYERS_TOGETHER = 4


def push_groups(num_layers: int) -> list[range]:
    """The groups in which layers are pushed while a prompt is computed. The last layer goes alone: nothing is computed
    behind it, and the end of the hand-off waits for it. Prompts' graphs end where these do."""
    last = num_layers - 1
    groups = [range(first, min(first + LAYERS_TOGETHER, last)) for first in range(0, last, LAYERS_TOGETHER)]
    return [*groups, range(last, num_layers)]


class LayerPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer's KV is: in a sequence's blocks (table 0) or in those of its lists of window blocks, and there in
    this layer of the pool."""

    table: int
    layer: int


def places_of_layers(windows: Sequence[int | None], num_heads: int = 0) -> tuple[LayerPlace, ...]:
    """The places of layers that see so many tokens (None: all), where some of each kind are better kept apart: as many
    layers to a block as see everything. (): all are kept together. The last `num_heads` are of heads, which see
    everything: they have places like others, but whether to keep layers apart is for the model's own to say."""
    num_full = sum(window is None for window in windows)
    if not 0 < num_full - num_heads <= len(windows) - num_full:
        return ()
    places, seen = [], [0, num_full]  # of those that see everything, of those that slide
    for window in windows:
        kind = int(window is not None)
        places.append(LayerPlace(*divmod(seen[kind], num_full)))
        seen[kind] += 1
    return tuple(places)


class KVGroup(msgspec.Struct, frozen=True):
    """The layers of a pool. `places` has one for each of the model's layers, its head's last, where layers that slide
    have window blocks of their own (docs/layouts.md); (): layer l of the model is layer l of the pool."""

    num_layers: int  # of the pool
    num_kv_heads: int  # heads held by this rank
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    kind: str = "full"  # or "latent": rows of which all heads' keys and values are made
    num_planes: int = 2  # K and V; of latents 1
    window: int | None = None
    num_all_kv_heads: int = 0  # of the model; 0: num_kv_heads * tp_size. If it is less, ranks hold copies of heads
    k_scales: tuple[float, ...] = ()  # scales of fp8, one a layer: value = stored * scale. (): 1.0 for all
    v_scales: tuple[float, ...] = ()
    places: tuple[LayerPlace, ...] = ()

    def places_of(self, layers: Sequence[str]) -> dict[str, LayerPlace]:
        """Where these layers, all of the model's in their order, have their KV."""
        every = self.places or tuple(LayerPlace(0, index) for index in range(len(layers)))
        return dict(zip(layers, every, strict=True))

    @property
    def num_windows(self) -> int:
        """How many window blocks a block has beside it."""
        return max((place.table for place in self.places), default=0)

    @property
    def blocks_each(self) -> int:
        """How many blocks `block_size` tokens take with window blocks."""
        return 1 + self.num_windows

    def payload_bytes(self, block_size: int) -> int:
        return (
            self.num_kv_heads * self.num_layers * self.num_planes * block_size * self.head_dim * DTYPE_BYTES[self.dtype]
        )


class KVLayout(msgspec.Struct, frozen=True):
    """Pool layout: `[num_blocks, num_kv_heads, num_layers, planes, block_size, head_dim]`, C order, a block contiguous.

    `block_stride_bytes` may exceed the payload (room for fp8 scales). 0 means: exactly the payload.
    """

    groups: tuple[KVGroup, ...]
    block_size: int
    block_stride_bytes: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    @property
    def group(self) -> KVGroup:
        assert len(self.groups) == 1, "version one has exactly one KV group"
        return self.groups[0]

    @property
    def payload_bytes(self) -> int:
        return self.group.payload_bytes(self.block_size)

    @property
    def own_heads(self) -> range:
        """Which of the model's KV heads this rank holds."""
        num_all = self.group.num_all_kv_heads or self.group.num_kv_heads * self.tp_size
        return kv_heads_of(self.tp_rank, self.tp_size, num_all)

    @property
    def stride_bytes(self) -> int:
        return self.block_stride_bytes or self.payload_bytes


class ModelIdentity(msgspec.Struct, frozen=True):
    """What must be equal on two nodes before KV may move between them. Each field is a hex digest or a short name."""

    config: str
    weights: str
    tokenizer: str
    rope: str
    adapter: str = ""
    hash_scheme: str = "sha256-16/v2"
    hash_block_size: int = 64

    def key(self) -> bytes:
        """Bytes that seed the block hashes."""
        return msgspec.msgpack.encode(self)
