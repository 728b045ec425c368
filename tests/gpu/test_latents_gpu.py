"""Decode over latents and whole latent attention on a GPU against float64, in graphs over lengths that change."""

from __future__ import annotations

import pytest
import torch
from latent_cases import Case, expected_rows, made_case

from tandem.kernels.api.attention import Attention
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonBackend, TritonOps
from tandem.kernels.triton_kernels.decode import latent_decode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [3, 16, 40, 128])
@pytest.mark.parametrize("block", [16, 64])
def test_decode(heads: int, block: int, dtype: torch.dtype) -> None:
    case = made_case((1,) * 9, (1, 700, 64, 65, 2000, 31, 512, 1, 4001), heads, 512, 64, block, dtype, "cuda")
    query, kv, rows, spec = case.decode()
    output = TritonOps.decode(query, kv, rows, spec)
    wanted = NativeOps.decode(query.double(), kv.__class__(kv.key_cache.double(), kv.value_cache.double()), rows, spec)
    torch.testing.assert_close(
        output.double(), wanted[..., :512], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )  # fmt: skip


def test_a_graph_follows_lengths() -> None:
    case = made_case((1,) * 4, (300, 20, 1000, 64), 16, 512, 64, 64, torch.bfloat16, "cuda")
    query, kv, rows, spec = case.decode()
    constants = latent_decode.latent_constants(query.dtype, 16, 512, 64, 64)

    def run() -> torch.Tensor:
        plan = latent_decode.plan_latents(rows.seq_lens, constants)
        return latent_decode.latent_decode(
            query, kv.key_cache, rows.block_tables, rows.seq_lens, spec.scale, constants, plan
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    for lengths in ((300, 20, 1000, 64), (1, 1, 1, 1), (290, 0, 999, 3)):
        rows.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        wanted = run()
        torch.testing.assert_close(output, wanted, rtol=0, atol=0)
        for row, length in enumerate(lengths):
            if length:
                cut = case.row_of(row, length).double()
                scores = (query[row].double() @ cut.T * spec.scale).softmax(-1)
                torch.testing.assert_close(output[row].double(), scores @ cut[:, :512], rtol=2e-2, atol=2e-2)
            else:
                assert not output[row].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "lengths", [((1, 1, 200, 33), (900, 1, 200, 733)), ((64, 500), (64, 1500)), ((1, 1), (130, 7))]
)
def test_a_step(lengths: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype) -> None:
    """Decode rows beside prompts, of which some have earlier tokens: as every head for itself has it."""
    case: Case = made_case(*lengths, 16, 512, 64, 64, dtype, "cuda", key_width=128, value_width=128)
    layer = Attention(16, 576, case.scale, 1, latent_size=512, layer_name="l")
    output = case.run(layer)
    assert layer.first_backend() is TritonBackend
    torch.testing.assert_close(output.double(), expected_rows(case), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
