"""Decode over latents and whole latent attention on a GPU against float64, in graphs over lengths that change; nodes
that serve a model with DeepSeek-V2-Lite's heads."""

from __future__ import annotations

import pytest
import torch
from latent_cases import Case, expected_rows, finished, made_case
from near_ties import check_against_reference
from tiny_hf_models import tiny_hf_model

from in_process_cluster import client_of, cuda_pair
from real_cluster import RealCluster
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.models.decoder import DecoderModel
from tandem.kernels.api.attention import Attention
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.backends.triton import TritonBackend, TritonOps
from tandem.kernels.latents.new_rows import store_and_absorb, store_and_rotate, values_of
from tandem.kernels.reference import latents as twins
from tandem.kernels.triton_kernels.decode import latent_decode
from tiny_models import random_prompt

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 200])
def test_new_rows_and_absorbed_queries(rows: int, heads: int, dtype: torch.dtype) -> None:
    lengths = [1 + 7 * row % 90 for row in range(rows)]
    case = made_case((1,) * rows, lengths, heads, 512, 64, 64, dtype, "cuda", key_width=128, value_width=128)
    key, value = case.weight_OL.view(heads, 256, 512).split(128, dim=1)
    cache, slots = case.cache[:, 0, 0], case.metadata.slot_mapping
    query = store_and_absorb(case.new, key, cache, slots)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(query, twins.absorbed(case.query_THD.float(), key.float()).to(dtype), **near)
    torch.testing.assert_close(cache[slots // 64, slots % 64], case.row_TR, **near)
    out = torch.empty(rows, heads, 128, dtype=dtype, device="cuda")
    summed = query[..., :512] / 8
    values_of(summed, value, out)
    torch.testing.assert_close(out, twins.values(summed.float(), value.float()).to(dtype), **near)


@pytest.mark.parametrize("is_by_pairs", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_new_rows_and_queries_of_prompts(dtype: torch.dtype, is_by_pairs: bool) -> None:
    case = made_case(
        (700, 3), (900, 3), 40, 512, 64, 64, dtype, "cuda", key_width=128, value_width=128, interleaved=is_by_pairs
    )
    expected, (cache, slots) = finished(case.new), (case.cache[:, 0, 0], case.metadata.slot_mapping)
    made = store_and_rotate(case.new, cache, slots)
    torch.testing.assert_close(made, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        cache[slots // 64, slots % 64], expected[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_of_real_heads_against_fp32(dtype: str) -> None:
    """Short prompts and long ones in chunks, split and alone, alone as few rows and several at once, in graphs."""
    folder = tiny_hf_model("deepseek_v2_real_heads")
    nodes = decode, prefill = cuda_pair(folder, dtype, chunk=400)
    assert decode.process.loaded.replays_graphs
    assert isinstance(decode.process.loaded.model, DecoderModel)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        for lengths in ((1,), (17,), (90, 300, 5, 64), (1800,)):
            asked = []
            for length in lengths:
                prompt = random_prompt(length, seed=length)
                split = client.submit(f"s{length}", prompt, sampling, decode=decode.info, prefill=prefill.info)
                asked.append((prompt, split))
                if len(lengths) == 1:
                    client.wait()
                asked.append((prompt, client.submit(f"a{length}", prompt, sampling, decode=decode.info)))
            client.wait()
            for prompt, result in asked:
                assert result.failed is None, result.failed
                check_against_reference(folder, prompt, result.output(), getattr(torch, dtype))


def test_a_server_of_real_heads_survives() -> None:
    """In processes of its own, by HTTP: an illegal access would end the node, and its supervisor start another."""
    folder = tiny_hf_model("deepseek_v2_real_heads")
    with RealCluster(folder, "--dtype", "bfloat16") as cluster:
        node = cluster.pid_of("unified")
        for length in (1, 40, 700, 3000, 3000, 1500):
            prompt = random_prompt(length, seed=length)
            tokens = cluster.tokens(prompt, 16, temperature=0.0, ignore_eos=True)[0]
            assert len(tokens) == 16
            if length < 1000:
                check_against_reference(folder, prompt, tokens, torch.bfloat16)
        assert cluster.pid_of("unified") == node
