"""The products of a model that adapters of low rank are added to, and the modules of the checkpoint that adapters may
name. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.parallel.sharding import Cut, Shard


@dataclass(frozen=True)
class SitePart:
    """A module that adapters may name, of the whole model. `cut`: what of its weight this rank has; None: all."""

    module: str  # as the checkpoint calls it
    outputs: int
    inputs: int
    cut: Cut | None = None

    @property
    def own_outputs(self) -> int:
        return self.outputs if self.cut is None or self.cut.dim else self.cut.stop - self.cut.start

    @property
    def own_inputs(self) -> int:
        return self.cut.stop - self.cut.start if self.cut is not None and self.cut.dim else self.inputs


@dataclass(frozen=True)
class Site:
    """A product that adapters are added to: one module of the model that runs, into which `parts` are merged."""

    name: str
    parts: tuple[SitePart, ...]


def decoder_sites(config: ModelConfig, shard: Shard) -> tuple[Site, ...]:
    """The sites of our own decoder, of which this rank has the share `shard`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    merged: dict[str, tuple[int, dict[str, int]]] = {
        **_attention(config),
        "self_attn.o_proj": (config.attended_size, {"o_proj": hidden}),
        "mlp.gate_up_proj": (hidden, {"gate_proj": inner, "up_proj": inner}),
        "mlp.down_proj": (inner, {"down_proj": hidden}),
    }
    sites = []
    dense = range(config.num_layers) if config.mixture is None else config.mixture.dense_layers
    for layer in range(config.num_layers):
        for name, (inputs, outputs) in merged.items():
            if name.startswith("mlp") and layer not in dense:
                continue  # experts take no adapters
            block = f"model.layers.{layer}.{name.partition('.')[0]}"
            parts = [
                SitePart(f"{block}.{part}", size, inputs, shard.cut(f"{block}.{part}.weight", config))
                for part, size in outputs.items()
            ]
            sites.append(Site(f"layers.{layer}.{name}", tuple(parts)))
    return tuple(sites)


def _attention(config: ModelConfig) -> dict[str, tuple[int, dict[str, int]]]:
    """Products before a layer's attention. What expands latents is none: it multiplies queries."""
    hidden, latents = config.hidden_size, config.latents
    if latents is None:
        queries, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {"self_attn.qkv_proj": (hidden, {"q_proj": queries, "k_proj": kv, "v_proj": kv})}
    queries, row = config.num_heads * latents.query_width, latents.size + latents.rotated
    if latents.query_size is None:
        return {"self_attn.q_kv_a_proj": (hidden, {"q_proj": queries, "kv_a_proj_with_mqa": row})}
    return {
        "self_attn.q_a_kv_a_proj": (hidden, {"q_a_proj": latents.query_size, "kv_a_proj_with_mqa": row}),
        "self_attn.q_b_proj": (latents.query_size, {"q_b_proj": queries}),
    }
