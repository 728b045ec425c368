"""The yardstick's workloads and what physics allows for them: bytes over bandwidth, FLOPs over the rate of products."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.check.measure import median_event_seconds
from tandem.node.setup import LoadedModel


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, how many at a time."""

    name: str
    num_requests: int
    concurrency: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0  # of the prompt, shared by all requests of a group
    num_groups: int = 1


WORKLOADS = (
    Workload("single_stream", 3, 1, 512, 256),
    Workload("decode_b64", 128, 64, 128, 256),
    Workload("decode_b256", 512, 256, 128, 256),
    Workload("chat_1k_256_c128", 384, 128, 1024, 256),
    Workload("prefill_8k", 32, 8, 8192, 1),
    Workload("ttft_8k_c1", 8, 1, 8192, 8),
    Workload("ttft_2k_c1", 12, 1, 2048, 8),
    Workload("ttft_1k_c1", 12, 1, 1024, 8),
    Workload("ttft_600_c1", 12, 1, 600, 8),
    Workload("prefix_shared", 192, 64, 4352, 64, 4096, 8),
)


@dataclass(frozen=True)
class Limits:
    """What the device does at best, measured in this process."""

    bytes_per_s: float  # the larger of reading alone, and of reading and writing in a copy
    flops: float  # of a large matrix product

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Limits:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        target, numbers = torch.empty_like(source), source.view(torch.int64)
        copy = median_event_seconds(lambda: target.copy_(source), 10)
        read = median_event_seconds(lambda: numbers.amax(), 10)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        product = median_event_seconds(lambda: a @ b, 10)
        return cls(source.numel() / min(copy / 2, read), 2 * 8192**3 / product)


@dataclass(frozen=True)
class Floors:
    """Seconds that no engine can go below."""

    step: float  # a decode step of the whole batch, at half its output: weights and KV are read once
    prompt: float  # one prompt alone
    total: float  # the workload

    @classmethod
    def of(cls, loaded: LoadedModel, workload: Workload, limits: Limits) -> Floors:
        """What one rank of the model's group has to do. The last layer is computed for wanted tokens alone but for its
        keys and values; a shared prefix is computed, and in a decode step read, once for its group."""
        sizes = ModelSizes.of(loaded)
        own, shared = workload.num_prompt_tokens - workload.num_shared_tokens, workload.num_shared_tokens
        rows = min(workload.concurrency, workload.num_requests)
        half = own + workload.num_output_tokens // 2
        kept = rows * half + workload.num_groups * shared
        step_bytes = sizes.weight_bytes + kept * sizes.kv_bytes
        step = step_bytes / limits.bytes_per_s
        prompt = sizes.prompt_flops(0, workload.num_prompt_tokens) / limits.flops
        alone = (sizes.weight_bytes + (half + shared) * sizes.kv_bytes) / limits.bytes_per_s
        waves, num_steps = -(-workload.num_requests // rows), workload.num_output_tokens - 1
        flops = workload.num_groups * sizes.prompt_flops(0, shared)
        flops += workload.num_requests * (sizes.prompt_flops(shared, own) + num_steps * 2 * sizes.num_weights)
        later = sizes.prompt_flops(shared, own) / limits.flops
        total = max(flops / limits.flops, waves * num_steps * step, waves * (later + num_steps * alone))
        return cls(step, prompt, total)


@dataclass(frozen=True)
class ModelSizes:
    """What a model multiplies and reads, on one rank."""

    num_weights: int  # that a decode step multiplies with
    num_last_weights: int  # of these, what a prompt's tokens that nobody asks for do without
    weight_bytes: int
    kv_bytes: int  # of a token
    attention_flops: int  # of a pair of tokens, all layers

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelSizes:
        model, layout = loaded.model, loaded.layout
        config = model.config if model.group is None else model.group.shard.config(model.config)
        layers = sum(weight.numel() for weight in model.layers.parameters())
        head = model.lm_head.weight.numel()
        last = sum(weight.numel() for weight in model.layers[-1].parameters())
        last -= 2 * config.num_kv_heads * config.head_dim * config.hidden_size
        return cls(
            layers + head,
            last + head,
            (layers + head) * loaded.dtype.itemsize,
            layout.payload_bytes // layout.block_size,
            4 * config.num_heads * config.head_dim * config.num_layers,
        )

    def prompt_flops(self, num_before: int, num_new: int) -> float:
        """The operations of `num_new` tokens after `num_before` whose KV is there."""
        pairs = num_new * num_before + num_new * num_new / 2
        return 2 * (self.num_weights - self.num_last_weights) * num_new + self.attention_flops * pairs
