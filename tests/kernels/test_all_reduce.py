"""Exchanges between ranks: exact under Triton's interpreter, in real processes that map each other's memory; and the
kernels compile for sm_90 without a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import mail_ranks
import pytest
import torch
from interpreted_ranks import run_interpreted

from tandem.kernels.products.all_reduce import MOST_ROW_BYTES, Mail, MailLayout, way_to_sum

pytest.importorskip("triton", reason="triton is not installed: no kernel to interpret")


def test_every_rank_gets_the_sum_and_the_token_of_all(tmp_path: Path) -> None:
    """Different numbers of rows in turn: lanes count for themselves, and both halves are used again."""
    num_ranks = 3
    sizes = [mail_ranks.layout_of(num_ranks, dtype).num_bytes for dtype in mail_ranks.ROUNDS]
    run_interpreted(mail_ranks.__file__, num_ranks, tmp_path / "mail", num_ranks * sum(sizes))


def test_few_bytes_go_as_words_and_many_ranks_share_rows() -> None:
    assert [way_to_sum(2, rows * 8192) for rows in (1, 32, 33, 8192)] == ["words", "words", "rows", "rows"]
    assert [way_to_sum(4, rows * 8192) for rows in (1, 32, 33, 4096, 4097)] == [
        "words",
        "words",
        "shares",
        "shares",
        None,
    ]


def test_the_mail_holds_the_rows_that_are_not_left_to_nccl() -> None:
    """The parts of the mail don't overlap."""
    two, long, eight = (
        MailLayout(2, 8192, 4096, torch.bfloat16),
        MailLayout(2, 32768, 8192, torch.bfloat16),
        MailLayout(8, 8192, 8192, torch.bfloat16),
    )
    assert (two.row_lanes, long.row_lanes, eight.row_lanes) == (8192, MOST_ROW_BYTES // (2 * 2 * 8192 * 2), 2048)
    assert (two.ways, eight.ways) == (["rows", "words"], ["shares", "words"])
    mail = Mail.make(0, [0] * 8, eight, torch.device("cpu"))
    assert mail.way(torch.zeros(2048, 8192, dtype=torch.bfloat16)) == "shares"
    assert mail.way(torch.zeros(2049, 8192, dtype=torch.bfloat16)) is None
    assert mail.way(torch.zeros(1, 8192)) is None
    for layout in (two, long, eight):
        assert layout.rows_at >= layout.argmax_at + 2 * layout.argmax_lanes * layout.num_ranks * 2 * 64 * 8
        assert layout.flags_at >= layout.rows_at + 2 * layout.row_lanes * layout.num_ranks * layout.row_bytes


def test_rows_of_half_words_have_no_mail() -> None:
    with pytest.raises(ValueError, match="32-bit words"):
        MailLayout(2, 4, 33, torch.float16)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kernel", ["words", "rows", "shares", "argmax"])
def test_kernels_compile_for_hopper(kernel: str, num_ranks: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.kernels.triton_kernels.products import all_reduce

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process, not compiled")
    shared = {"LANES": 512, "RANK": 1, "RANKS": num_ranks, "PDL": True}
    if kernel == "words":
        function = all_reduce.sum_add_rms_norm_words_kernel
        constants = {"DTYPE": tl.bfloat16, "IS_WIDE": False, "SIZE": 4096, "WORDS": 2048, "PADDED": 2048, **shared}
        types = dict.fromkeys(("x", "residual", "weight", "out", "counters"), "*i32") | {"eps": "fp32"}
    elif kernel in ("rows", "shares"):
        function = all_reduce.sum_add_rms_norm_rows_kernel
        constants = {"SIZE": 4096, "PADDED": 4096, "SCATTERS": kernel == "shares", **shared}
        types = dict.fromkeys(("x", "residual", "weight", "out"), "*bf16")
        types |= {"counters": "*i32", "eps": "fp32", "rows_at": "i64", "flags_at": "i64"}
    else:
        function = all_reduce.argmax_of_shards_kernel
        constants = {"SHARD": 64128, "ROWS": 64, **shared}
        types = {"logits": "*bf16", "best": "*i64", "tokens": "*i64", "counters": "*i32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*i64" if name == "addresses" else "i32")
        for name in function.arg_names
    }
    source = ASTSource(function, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    ptx = compiled.asm["ptx"]
    if kernel in ("words", "argmax"):
        assert re.search(r"st\.global\.wt(\.v2)?\.b64", ptx), "a word and its number leave apart"
    else:
        assert re.search(r"atom\.global\.(sys\.release|release\.sys)", ptx)
        assert "ld.acquire.sys.global.b32" in ptx
    assert "ld.volatile" in ptx
    assert compiled.asm["cubin"]
