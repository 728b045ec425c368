"""`tandem kernels` on the CPU: what it says, and that a wrong or failing kernel does not pass."""

from __future__ import annotations

import re

import pytest
import torch

from tandem.deploy.cli import main
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.check.kernel_cases import Shape
from tandem.kernels.check.self_test import describe_decode
from tandem.kernels.products import fused_ops

SMALL = ["kernels", "--heads", "4", "--kv-heads", "2", "--head-size", "16", "--block-size", "16", "--device", "cpu"]


# README says: "tests each against float64"
def test_every_kernel_is_right_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    text = capsys.readouterr().out
    assert re.search(r"native +chosen +first that fits", text)
    assert re.search(r"triton +no +Triton kernels need a CUDA device|the triton package is not installed", text)
    table = text[text.index("Self-test") :]
    for kernel in ("prefill", "prefix", "decode", "rope", "norm", "silu", "product", "sampling", "digest", "copy"):
        assert re.search(rf"{kernel}.* \d\.\de[-+]\d\d +\d\.\de[-+]\d\d .*/s +\d+%", table), kernel
    assert "all right" in table


@pytest.mark.parametrize("options", [["--sliding-window", "20", "--alibi"], ["--kv-cache-dtype", "fp8"]])
def test_options_of_a_layer(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *options]) == 0
    text = capsys.readouterr().out
    assert ("window 20, ALiBi" in text) == ("--alibi" in options)
    assert "WRONG" not in text


def test_a_wrong_kernel_does_not_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = fused_ops.silu_mul
    monkeypatch.setattr(fused_ops, "silu_mul", lambda x: right(x) * 1.001)
    monkeypatch.setattr(fused_ops, "argmax_tokens", lambda x: torch.zeros(0)[1])
    assert main(SMALL) == 1
    text = capsys.readouterr().out
    assert re.search(r"silu \* up .*WRONG", text)
    assert re.search(r"greedy sampling +FAILED: IndexError", text)
    assert "2 of the kernels" in text
    assert re.search(r"digest of blocks .*%$", text, re.MULTILINE), "the others are still tested"


@pytest.mark.parametrize(
    ("dtype", "heads", "length", "version"),
    [(torch.bfloat16, 32, 1024, "V2"), (torch.float32, 32, 1024, "V1"), (torch.float32, 32, 2048, "V2")],
)
def test_it_names_the_version_that_would_serve(dtype: torch.dtype, heads: int, length: int, version: str) -> None:
    """Layers of 16 bits with few query heads a KV head are served by V2, however short their rows are."""
    shape = Shape(AttentionSpec(heads, 128, 128**-0.5, 8), 64, dtype, torch.device("cpu"))
    assert describe_decode(shape, 64, length).startswith(version)


def test_it_only_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-test"]) == 0
    text = capsys.readouterr().out
    assert "chosen" in text
    assert "Self-test" not in text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--heads", "5"], "5 heads can't share 2"),
        (["--head-size", "0"], "must be"),
        (["--device", "tpu"], "--device tpu"),
        (["--soft-cap", "-1"], "must be"),
        (["--attention-backend", "triton"], "triton"),
        (["--attention-backend", "fastest"], "fastest"),
    ],
)
def test_what_cannot_be(options: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([*SMALL, *options])
    except SystemExit as ended:  # argparse
        code = int(ended.code or 0)
    assert code == 2
    assert problem in capsys.readouterr().err
