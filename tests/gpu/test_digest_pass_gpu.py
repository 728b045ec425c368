"""Sums through kept buffers on a GPU: several passes at once, of whole and partly filled blocks, against the CPU's."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.kernels.blocks.digest import multilinear_sums
from tandem.kernels.blocks.digest_pass import SumPasses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SHAPES = {
    "bf16": (torch.bfloat16, (12, 8, 4, 2, 64, 128)),
    "fp8": (torch.float8_e4m3fn, (12, 2, 3, 2, 16, 80)),
    "odd": (torch.bfloat16, (12, 1, 3, 2, 7, 5)),  # of slots that are no whole words
}


@pytest.mark.parametrize("name", SHAPES)
def test_passes_under_way_together_are_those_of_their_blocks(name) -> None:
    dtype, shape = SHAPES[name]
    pool, rng = torch.randn(shape).to(dtype), random.Random(7)
    passes = SumPasses(pool.cuda())
    passes.warm_up()
    for turn in range(3):
        begun, expected = [], []
        for key in range(6):
            blocks = rng.sample(range(12), rng.randint(1, 12))
            num_valid = [rng.choice((shape[-2], 1, 3, shape[-2] - 1)) for _ in blocks]
            with torch.cuda.stream(torch.cuda.Stream()):
                begun.append(passes.begin(blocks, key + 100 * turn, num_valid))
            expected.append(multilinear_sums(pool, blocks, key + 100 * turn, num_valid).tolist())
        begun[3].abandon()
        made = [each.sums().tolist() for index, each in enumerate(begun) if index != 3]
        assert made == expected[:3] + expected[4:]


def test_a_pass_sums_what_its_stream_has_computed() -> None:
    pool = torch.zeros(4, 8, 4, 2, 64, 128, dtype=torch.bfloat16, device="cuda")
    passes, stream = SumPasses(pool), torch.cuda.Stream()
    passes.warm_up()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        pool.fill_(3.0)
        begun = passes.begin([2, 0], 5, [64, 9])
    assert begun.sums().tolist() == multilinear_sums(pool.cpu(), [2, 0], 5, [64, 9]).tolist()
