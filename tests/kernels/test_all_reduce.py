"""Exchanges between ranks: exact under Triton's interpreter, in real processes that map each other's memory; and the
kernels compile for sm_90 without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mail_ranks
import pytest
import torch

from tandem.kernels.all_reduce import mail_bytes

pytest.importorskip("triton", reason="triton is not installed: no kernel to interpret")


def test_every_rank_gets_the_sum_and_the_token_of_all(tmp_path: Path) -> None:
    """Different numbers of rows in turn: lanes count for themselves, and both halves are used again."""
    num_ranks = 3
    sizes = [mail_bytes(mail_ranks.MAX_ROWS, mail_ranks.HIDDEN, dtype, num_ranks) for dtype in mail_ranks.ROUNDS]
    memory = tmp_path / "mail"
    memory.write_bytes(bytes(num_ranks * sum(sizes)))
    command = [sys.executable, mail_ranks.__file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(memory)], stderr=subprocess.PIPE, env=environment)
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=110)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()


def test_rows_of_half_words_have_no_mail() -> None:
    with pytest.raises(ValueError, match="32-bit words"):
        mail_bytes(4, 33, torch.float16, 2)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kernel", ["sum", "argmax"])
def test_kernels_compile_for_hopper(kernel: str, num_ranks: int) -> None:
    import triton
    import triton.language as tl
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tandem.kernels.triton_kernels import all_reduce

    if "nvidia" not in backends:
        pytest.skip("this triton build has no NVIDIA backend")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted in this process, not compiled")
    shared = {"LANES": 512, "RANK": 1, "RANKS": num_ranks, "PDL": True}
    if kernel == "sum":
        function = all_reduce.sum_add_rms_norm_kernel
        constants = {"DTYPE": tl.bfloat16, "IS_WIDE": False, "SIZE": 4096, "WORDS": 2048, "PADDED": 2048, **shared}
        types = dict.fromkeys(("x", "residual", "weight", "out", "counters"), "*i32") | {"eps": "fp32"}
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
    assert "st.relaxed.sys.global.b64" in compiled.asm["ptx"]
    assert "ld.volatile" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]
