"""The adapters of optional packages call them as their releases want to be called, and mean the same by it."""

from __future__ import annotations

from typing import Any

import attention_packages as packages
import pytest
import torch

from tandem.kernels.api import selection
from tandem.kernels.api.backend import PagedOps, Prefill
from tandem.kernels.api.selection import NAMES, OURS_FIRST, order_for, rank_backends, select_backend
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends import flash_attn, flashinfer, triton, triton_prefill, xformers
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.reference import paged

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 9},
    "soft-cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor(paged.alibi_slopes(4))},
}
PROMPTS = ((20, 33, 2), (20, 33, 2))
PREFIXES = ((3, 20, 17), (40, 20, 18))


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> type[PagedOps]:
    """The adapter's operations, with its package at hand."""
    if name == "xformers":
        for part in ("BlockDiagonalCausalMask", "memory_efficient_attention_forward"):
            monkeypatch.setattr(xformers, part, getattr(packages, part))
        return xformers.XFormersOps
    if name == "flashinfer":
        monkeypatch.setattr(flashinfer, "flashinfer", packages.FlashInfer)
        return flashinfer.FlashInferOps
    monkeypatch.setattr(flash_attn, "version_3", packages.FlashAttention3 if name == "flash_attn 3" else None)
    monkeypatch.setattr(flash_attn, "version_2", packages.FlashAttention2)
    return flash_attn.FlashAttentionOps


def check(ops: type[PagedOps], batch: PagedBatch, spec: AttentionSpec) -> None:
    NativeOps.write(batch.key, batch.value, batch.kv(), batch.metadata.slot_mapping)
    meta, split = batch.metadata, batch.metadata.num_decode_rows
    parts = []
    if split:
        parts.append(ops.decode(batch.query[:split], batch.kv(), meta.decode_rows(), spec))
    if split < meta.num_rows:
        new = (tensor[split:] for tensor in (batch.query, batch.key, batch.value))
        parts.append(ops.prefill(Prefill(*new, batch.kv(), meta.prefill_rows()), spec))
    torch.testing.assert_close(torch.cat(parts).double(), batch.expected(spec), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("flash_attn 2", option) for option in OPTIONS),
        *(("flash_attn 3", option) for option in OPTIONS if option != "alibi"),
        *(("flashinfer", option) for option in OPTIONS if option != "alibi"),
        ("xformers", "plain"),
    ],
)
@pytest.mark.parametrize("rows", [PROMPTS, PREFIXES, ((1, 1, 30, 5), (17, 1, 30, 60))], ids=["new", "prefix", "mixed"])
def test_adapters(
    name: str, options: str, rows: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = install(name, monkeypatch)
    check(ops, random_batch(*rows), AttentionSpec(4, 16, 0.3, 2, **OPTIONS[options]))


def test_a_plan_is_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = install("flashinfer", monkeypatch)
    plans = []
    wrapper = packages.FlashInfer.BatchPrefillWithPagedKVCacheWrapper
    plan = wrapper.plan
    monkeypatch.setattr(wrapper, "plan", lambda self, *a, **k: (plans.append(1), plan(self, *a, **k)))
    batch = random_batch(*PREFIXES)
    for _ in range(3):
        check(ops, batch, AttentionSpec(4, 16, 0.3, 2))
    assert len(plans) == 1
    check(ops, batch, AttentionSpec(4, 16, 0.3, 2, sliding_window=5))
    assert len(plans) == 2


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(triton_prefill, "_capability", lambda device: capability)
    monkeypatch.setattr(flashinfer, "_import_error", None)
    monkeypatch.setattr(flash_attn, "version_2", packages.FlashAttention2)


def why_general_layer(device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
    """As where the Hopper kernel serves all it can."""
    hopper = torch.cuda.get_device_capability(device) == (9, 0) and dtype == torch.bfloat16
    return None if hopper and spec.alibi_slopes is None else "the general kernel"


@pytest.mark.skipif(triton.find_spec("triton") is None, reason="triton is not installed")
def test_who_leads_on_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(triton_prefill, "why_general_layer", why_general_layer)
    device = torch.device("cuda", 0)
    plain, slopes = AttentionSpec(4, 128, 0.1, 2), torch.ones(4)
    assert order_for(device, torch.bfloat16, plain) == OURS_FIRST
    assert select_backend(device, torch.bfloat16, 128, plain)[0].get_name() == "TRITON"
    with_slopes = AttentionSpec(4, 128, 0.1, 2, alibi_slopes=slopes)
    backend, reason = select_backend(device, torch.bfloat16, 128, with_slopes)
    assert backend.get_name() == "FLASH_ATTENTION"
    assert reason == "first in the table"
    pretend_gpu(monkeypatch, (8, 0))
    assert order_for(device, torch.bfloat16, plain) == NAMES
    monkeypatch.setattr(flash_attn, "version_2", None)
    assert select_backend(device, torch.bfloat16, 128, plain)[0].get_name() == "FLASHINFER"
    backend, reason = select_backend(device, torch.float32, 128, plain)
    assert backend.get_name() == "TRITON"
    assert "flashinfer: dtype torch.float32" in reason


def test_block_sizes_that_kernels_cannot_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, (9, 0))
    spec = AttentionSpec(4, 128, 0.1, 2)
    usable, reasons = rank_backends("cuda", torch.bfloat16, 128, spec, 8)
    assert "TRITON" not in [backend.get_name() for backend in usable]
    assert reasons["triton"] in ("block_size 8: needs a multiple of 16", "the triton package is not installed")
    assert selection.load_backend("native") in usable
