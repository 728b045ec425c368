"""Which part of a model a rank of a tensor-parallel node holds. No torch.

Query heads, MLP columns (of every expert, too) and vocabulary rows of the output matrix are shared out in equal runs;
instead of experts' columns whole experts, where that is asked for, in runs that may differ by one (but columns of those
that every token takes, since a rank that had them would be waited for). KV heads too; when there are fewer than ranks,
neighbouring ranks hold copies of the same head. Each layer's output and down projections
are cut along their inputs, so their products are parts of a sum over ranks (Megatron-LM, arXiv 1909.08053), as are
those of some experts. Embedding, norms and routers are whole everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tandem.engine.contracts.config_json.mixture_config import MixtureConfig
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import kv_heads_of
from tandem.engine.contracts.model_config import ModelConfig
from tandem.kernels.experts.plans import experts_of_rank

if TYPE_CHECKING:
    import torch

MIXTRALS = ("w1", "w2", "w3")  # its experts' gate, down and up


@dataclass(frozen=True)
class Cut:
    """Elements `start` to `stop` along dimension `dim` of a stored tensor."""

    dim: int
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements, a view."""
        return tensor.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Shard:
    """The share of rank `rank`, counted from 0, out of `size` ranks. Of a node that shares nothing but experts, which
    `group_size` nodes have in runs, it is the `group_rank`-th."""

    rank: int = 0
    size: int = 1
    expert_parallel: bool = False  # experts are shared out whole, but those that all tokens take
    group_rank: int = 0
    group_size: int = 1

    @property
    def is_whole(self) -> bool:
        return self.size == self.group_size == 1

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model that this rank computes: its heads and MLP columns. Raises ConfigError when shares are unequal."""
        self._check(config)
        sparse, mixture = config.blocksparse, config.mixture
        return msgspec.structs.replace(
            config,
            blocksparse=None if sparse is None else msgspec.structs.replace(sparse, tp_rank=self.rank),
            num_heads=config.num_heads // self.size,
            num_kv_heads=len(self.kv_heads(config.num_kv_heads)),
            intermediate_size=config.intermediate_size // self.size,
            mixture=mixture and self._own_experts(mixture),
        )

    def _own_experts(self, mixture: MixtureConfig) -> MixtureConfig:
        own = msgspec.structs.replace(mixture, shared_width=mixture.shared_width // self.size)
        if self.group_size > 1:
            held = experts_of_rank(self.group_rank, self.group_size, mixture.num_experts)
            return msgspec.structs.replace(own, held=held, exchanged=True)
        if self.expert_parallel:
            return msgspec.structs.replace(own, held=experts_of_rank(self.rank, self.size, mixture.num_experts))
        return msgspec.structs.replace(own, width=mixture.width // self.size)

    def kv_heads(self, num_all: int) -> range:
        """Which of a model's KV heads this rank holds."""
        return kv_heads_of(self.rank, self.size, num_all)

    def vocab(self, config: ModelConfig) -> tuple[int, int]:
        """First token id whose logit this rank computes, and the one after its last."""
        return self._run(config.vocab_size)

    def cut(self, name: str, config: ModelConfig) -> Cut | None:
        """What this rank takes of the stored tensor `name`, a name of the checkpoint. None: all of it."""
        part = name.rpartition(".")[0].rpartition(".")[2]
        if name.endswith(".sinks"):
            return Cut(0, *self._run(config.num_heads))
        if part == "o_proj":
            start, stop = self._run(config.attended_size)
        elif config.latents is not None and part in ("q_proj", "q_b_proj", "kv_b_proj"):
            latents = config.latents
            width = latents.key_width + latents.value_width if part == "kv_b_proj" else latents.query_width
            start, stop = self._run(config.num_heads * width)
        elif part == "q_proj":
            start, stop = self._run(config.num_heads * config.head_dim)
        elif part in ("k_proj", "v_proj"):
            heads = self.kv_heads(config.num_kv_heads)
            start, stop = heads.start * config.head_dim, heads.stop * config.head_dim
        elif part in ("gate_proj", "up_proj", "down_proj", *MIXTRALS):
            is_expert = config.mixture is not None and ".experts." in name
            if is_expert and self.expert_parallel:
                return None
            start, stop = self._run(_mlp_width(name, config))
        elif part == "lm_head":
            start, stop = self.vocab(config)
        else:
            return None
        if part in ("o_proj", "down_proj", "w2"):
            return None if name.endswith("bias") else Cut(1, start, stop)
        return Cut(0, start, stop)

    def fill(self, name: str, target: torch.Tensor, own: torch.Tensor) -> None:
        """Makes `target`, of the tensor `name`, what this rank computes with: its own part, or zeros."""
        if self.holds(name):
            target.copy_(own)
        else:
            target.zero_()

    def holds(self, name: str) -> bool:
        """Whether this rank uses the tensor at all: what is added to a sum over ranks is added once, by rank 0."""
        return self.rank == 0 or not name.endswith(("o_proj.bias", "down_proj.bias"))

    def _run(self, length: int) -> tuple[int, int]:
        return self.rank * length // self.size, (self.rank + 1) * length // self.size

    def _check(self, config: ModelConfig) -> None:
        mixture = config.mixture
        shared_out = {"query heads": config.num_heads, "vocabulary entries": config.vocab_size}
        if mixture is None or mixture.dense_layers:
            shared_out["MLP columns"] = config.intermediate_size
        if mixture is not None and not self.expert_parallel:
            shared_out["columns of an expert (--enable-expert-parallel shares out whole experts)"] = mixture.width
        elif mixture is not None:
            shared_out["columns of experts that all tokens share"] = mixture.shared_width
        num_sharing = self.group_size if self.group_size > 1 else self.size
        if self.expert_parallel and (mixture is None or mixture.num_experts < num_sharing):
            what = "no" if mixture is None else f"only {mixture.num_experts}"
            raise ConfigError(
                f"--enable-expert-parallel over {num_sharing} GPUs: the model has {what} experts; leave it out"
            )
        for what, count in shared_out.items():
            if count % self.size:
                raise ConfigError(
                    f"--tensor-parallel-size {self.size} does not divide the model's {count} {what}; take one that does"
                )
        kv_heads = config.num_kv_heads
        if kv_heads % self.size and self.size % kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size {self.size} neither divides the model's {kv_heads} KV heads nor is a multiple "
                "of them"
            )


def _mlp_width(name: str, config: ModelConfig) -> int:
    """Columns of the MLP that the stored tensor `name` belongs to."""
    if config.mixture is not None and ".shared_experts." in name:
        return config.mixture.shared_width
    return config.mixture.width if config.mixture is not None and ".experts." in name else config.intermediate_size
