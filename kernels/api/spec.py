"""What one attention layer asks of a backend: sizes, scale and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tandem.kernels.api.errors import UnsupportedOptionError


class AttentionType:
    """Which tokens attend to which. Plain strings, so that they pass through configs and custom ops."""

    DECODER = "decoder"  # causal, over the paged cache
    ENCODER = "encoder"  # both ways, encoder half of an encoder-decoder model, no cache
    ENCODER_ONLY = "encoder_only"  # both ways, no cache
    ENCODER_DECODER = "encoder_decoder"  # decoder queries over an encoder's cache that is written once
    ALL = (DECODER, ENCODER, ENCODER_ONLY, ENCODER_DECODER)


FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "float8_e4m3fn")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64", *FP8_CACHE_DTYPES)


@dataclass(frozen=True)
class BlockSparse:
    """Block-sparse attention in units of `block_size` positions (which need not be the cache's block size).

    A query in sparse block b sees sparse block k of the past when it is local (k > b - local_blocks) or vertical:
    (k + offset) % vert_stride == 0, where offset = head * head_sliding_step + 1 counts query heads over all ranks; a
    negative step slides over KV heads instead.
    """

    local_blocks: int
    vert_stride: int
    block_size: int = 64
    head_sliding_step: int = 0
    tp_rank: int = 0

    def __post_init__(self) -> None:
        if self.vert_stride < 1 or self.block_size < 1 or self.local_blocks < 1:
            raise UnsupportedOptionError(
                "blocksparse_params", f"local_blocks, vert_stride and block_size must be at least 1, got {self}"
            )

    @classmethod
    def from_params(cls, params: Mapping[str, Any], tp_rank: int = 0) -> BlockSparse:
        known = {"local_blocks", "vert_stride", "block_size", "head_sliding_step", "tp_rank"}
        unknown = sorted(set(params) - known)
        if unknown:
            raise UnsupportedOptionError("blocksparse_params", f"unknown keys {unknown}; known are {sorted(known)}")
        return cls(**{"tp_rank": tp_rank, **params})


class Reach(NamedTuple):
    """How far back a query sees, as kernels take it. `kind` 0: to the first token; 1: `size` tokens, its own counted;
    2: to the first of its chunk of `size` positions; 3: to position `size`, which hides what comes before from all."""

    kind: int = 0
    size: int = 0


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """One layer's attention. `alibi_slopes` is float32 [num_heads]; `sliding_window` counts the query's own token.

    `attention_chunk`: a query sees keys of its own chunk of so many positions alone (Llama 4). `sinks`, [num_heads]: a
    score each head adds to those of its keys, with no value behind it (GPT-OSS). `latent_size`: keys are latents, of
    which the first so many elements are the values, too (kernels/api/latent_attention.py). `hides_first`: nobody sees
    the key at position 0, so that queries there have none (EAGLE heads).
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: torch.Tensor | None = None
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    kv_cache_dtype: str = "auto"
    blocksparse: BlockSparse | None = None
    attn_type: str = AttentionType.DECODER
    attention_chunk: int | None = None
    sinks: torch.Tensor | None = None
    latent_size: int | None = None
    hides_first: bool = False
    _copies: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise UnsupportedOptionError("num_kv_heads", f"{self.num_heads} heads can't share {self.num_kv_heads}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UnsupportedOptionError("sliding_window", f"must be at least 1 token, got {self.sliding_window}")
        if self.attention_chunk is not None and self.attention_chunk < 1:
            raise UnsupportedOptionError("attention_chunk", f"must be at least 1 token, got {self.attention_chunk}")
        if self.logits_soft_cap is not None and self.logits_soft_cap <= 0:
            raise UnsupportedOptionError("logits_soft_cap", f"must be positive, got {self.logits_soft_cap}")
        if self.kv_cache_dtype not in CACHE_DTYPES:
            raise UnsupportedOptionError("kv_cache_dtype", f"{self.kv_cache_dtype!r} is none of {CACHE_DTYPES}")
        if self.attn_type not in AttentionType.ALL:
            raise UnsupportedOptionError("attn_type", f"{self.attn_type!r} is none of {AttentionType.ALL}")
        if self.alibi_slopes is not None and self.alibi_slopes.numel() != self.num_heads:
            raise UnsupportedOptionError(
                "alibi_slopes", f"{self.alibi_slopes.numel()} slopes for {self.num_heads} heads"
            )
        if self.sinks is not None and self.sinks.numel() != self.num_heads:
            raise UnsupportedOptionError("sinks", f"{self.sinks.numel()} sinks for {self.num_heads} heads")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def sees_every_token(self) -> bool:
        """Whether no option hides an earlier token from a query."""
        options = self.sliding_window, self.blocksparse, self.attention_chunk
        return not self.hides_first and all(option is None for option in options)

    @property
    def reach(self) -> Reach:
        """What a kernel is told of window, chunk or hidden token; of two of them none can be told."""
        assert sum((self.sliding_window is not None, self.attention_chunk is not None, self.hides_first)) < 2
        if self.hides_first:
            return Reach(3, 1)
        if self.attention_chunk is not None:
            return Reach(2, self.attention_chunk)
        return Reach() if self.sliding_window is None else Reach(1, self.sliding_window)

    @property
    def is_fp8(self) -> bool:
        return self.kv_cache_dtype in FP8_CACHE_DTYPES

    def slopes_on(self, device: torch.device) -> torch.Tensor | None:
        """ALiBi slopes as float32 [num_heads] on `device`, copied once: a CUDA graph holds no copy from a host."""
        return self._copy_on("alibi_slopes", self.alibi_slopes, device)

    def sinks_on(self, device: torch.device) -> torch.Tensor | None:
        """Sinks as float32 [num_heads] on `device`, copied once like `slopes_on`'s slopes; None: the layer has none."""
        return self._copy_on("sinks", self.sinks, device)

    def _copy_on(self, name: str, values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
        if values is None:
            return None
        if (name, device) not in self._copies:
            self._copies[name, device] = values.reshape(-1).to(device, torch.float32).contiguous()
        return self._copies[name, device]
