"""Tokens sent to their experts' ranks and back: exact under Triton's interpreter, in real processes that map each
other's memory; and the kernels compile for sm_90 without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import exchange_ranks
import pytest
import torch
from interpreted_ranks import run_interpreted

from tandem.kernels.experts.exchange import ExchangeLayout, ExpertMail, combine_twin
from tandem.kernels.experts.plans import experts_of_rank

pytest.importorskip("triton", reason="triton is not installed: no kernel to interpret")


def test_tokens_go_to_their_experts_and_come_back(tmp_path: Path) -> None:
    """Unlike numbers of tokens, capacities that change, ranks without tokens, padding; before that each rank alone."""
    num_ranks = 3
    num_bytes = num_ranks * (exchange_ranks.layout_of(num_ranks).num_bytes + 1)
    run_interpreted(exchange_ranks.__file__, num_ranks, tmp_path / "mail", num_bytes)


@pytest.mark.parametrize("layout", [exchange_ranks.layout_of(3), ExchangeLayout(8, 8192, 7168, 8, 256, torch.bfloat16)])
def test_parts_of_the_memory_do_not_overlap(layout: ExchangeLayout) -> None:
    rows = layout.places * layout.hidden_size * layout.dtype.itemsize
    sizes = (rows, layout.places * layout.top_k * 4, layout.places * layout.top_k * 4, layout.places * 4, rows)
    starts = (0, layout.ids_at, layout.weights_at, layout.flags_at, layout.results_at, layout.result_flags_at)
    assert all(start + size <= following for start, size, following in zip(starts, sizes, starts[1:], strict=False))
    assert layout.num_bytes >= layout.result_flags_at + layout.places * 4


def test_ranks_have_each_expert_once() -> None:
    runs = [experts_of_rank(rank, 3, 7) for rank in range(3)]
    assert runs == [(0, 2), (2, 4), (4, 7)]


def test_parts_are_added_in_the_order_of_ranks() -> None:
    parts = torch.tensor([[[1e8]], [[1.0]], [[-1e8]]])
    assert combine_twin(parts).item() == 0.0


def test_what_a_pass_has_opened_may_be_joined_outside_of_one() -> None:
    """Models of transformers open the exchange in their trial."""
    layout = exchange_ranks.layout_of(1)
    with torch.inference_mode():
        memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        mail = ExpertMail(0, memory, [memory.data_ptr()], layout)
    mail.join()
    assert int(mail._is_alone) == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kernel", ["dispatch", "combine"])
def test_kernels_compile_for_hopper(kernel: str, num_ranks: int) -> None:
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.kernels.triton_kernels.experts import exchange

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process, not compiled")
    function = exchange.dispatch_kernel if kernel == "dispatch" else exchange.combine_kernel
    constants = {"SIZE": 2048, "PADDED": 2048, "TOP_K": 8, "PADDED_K": 8, "LANES": 8192, "RANK": 1, "RANKS": num_ranks}
    constants |= {"HAS_SLOTS": True, "PDL": True}
    types = dict.fromkeys(("x", "parts", "out"), "*bf16") | dict.fromkeys(("slots", "addresses"), "*i64")
    types |= dict.fromkeys(("ids", "counters", "is_alone"), "*i32") | {"weights": "*fp32"}
    types |= {name: "i64" for name in function.arg_names if name.endswith("_at")}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in function.arg_names}
    source = ASTSource(function, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.acquire.sys.global.b32" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
