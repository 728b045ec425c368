"""What a node's KV pool looks like in memory, exchanged in the handshake."""

from __future__ import annotations

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


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that share one block table. Version one of the engine builds exactly one group."""

    num_layers: int
    num_kv_heads: int  # heads held by this rank
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES
    kind: str = "full"  # or "latent": rows of which all heads' keys and values are made
    num_planes: int = 2  # K and V; of latents 1
    window: int | None = None
    num_all_kv_heads: int = 0  # of the model; 0: num_kv_heads * tp_size. If it is less, ranks hold copies of heads
    k_scales: tuple[float, ...] = ()  # scales of fp8, one a layer: value = stored * scale. (): 1.0 for all
    v_scales: tuple[float, ...] = ()

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
