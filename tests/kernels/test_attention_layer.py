"""Attention, unified_attention and the forward context: hooks, tracing, accepted forms, scales, errors by name."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.errors import BackendUnavailableError, UnsupportedOptionError
from tandem.kernels.api.forward_context import ForwardContext, get_forward_context, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadataBuilder
from tandem.kernels.api.spec import AttentionSpec, AttentionType
from tandem.kernels.api.unified_attention import unified_attention
from tandem.kernels.backends.native import NativeBackend
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.sample_batches import PagedBatch, random_batch

SPEC = AttentionSpec(4, 16, 0.3, 2)


class RecordingHooks:
    """Notes each call and whether the layer's new KV was in the cache by then."""

    def __init__(self, batch: PagedBatch) -> None:
        self.batch = batch
        self.calls: list[tuple[str, str, bool]] = []

    def wait_for_kv_layer(self, layer_name: str) -> None:
        self.calls.append(("wait", layer_name, self._stored()))

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        assert kv_layer.data_ptr() == self.batch.kv_layer.data_ptr()
        assert attn_metadata is self.batch.metadata
        self.calls.append(("save", layer_name, self._stored()))

    def _stored(self) -> bool:
        slot = int(self.batch.metadata.slot_mapping[0])
        return bool(self.batch.kv_layer[slot // 16, :, :, slot % 16].isfinite().all())


def layer(**more: Any) -> Attention:
    return Attention(4, 16, 0.3, 2, layer_name="layers.0", attn_backend="native", **more)


def bound(batch: PagedBatch, **more: Any) -> Attention:
    attention = layer(**more)
    attention.kv_cache = [batch.kv_layer]
    return attention


def test_unified_attention_waits_attends_saves() -> None:
    batch = random_batch((1, 6), (20, 22))
    hooks = RecordingHooks(batch)
    context = ForwardContext(batch.metadata, {"layers.0": bound(batch)}, hooks=hooks)
    with set_forward_context(context):
        output = unified_attention(batch.query, batch.key, batch.value, "layers.0")
    assert hooks.calls == [("wait", "layers.0", False), ("save", "layers.0", True)]
    torch.testing.assert_close(output.double(), batch.expected(SPEC), rtol=2e-6, atol=2e-6)


def test_metadata_and_cache_are_picked_by_layer_name_and_virtual_engine() -> None:
    batch, other = random_batch((1, 6), (20, 22)), random_batch((3,), (3,))
    attention = layer(num_virtual_engines=2)
    attention.kv_cache[1] = batch.kv_layer
    metadata = {"layers.0": batch.metadata, "layers.1": other.metadata}
    with set_forward_context(ForwardContext(metadata, {"layers.0": attention}, virtual_engine=1)):
        output = unified_attention(batch.query, batch.key, batch.value, "layers.0")
        with pytest.raises(KeyError, match=r"layers\.9"):
            unified_attention(batch.query, batch.key, batch.value, "layers.9")
    torch.testing.assert_close(output.double(), batch.expected(SPEC), rtol=2e-6, atol=2e-6)


def test_it_traces_under_torch_compile_as_one_op() -> None:
    batch = random_batch((1, 6), (20, 22))
    graphs = []

    def keep_graph(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def model(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return unified_attention(query * 1.0, key, value, "layers.0") + 1.0

    compiled = torch.compile(model, backend=keep_graph, fullgraph=True)
    with set_forward_context(ForwardContext(batch.metadata, {"layers.0": bound(batch)})):
        output = compiled(batch.query, batch.key, batch.value)
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("tandem.unified_attention" in target for target in targets) == 1
    torch.testing.assert_close(output.double(), batch.expected(SPEC) + 1, rtol=2e-6, atol=2e-6)
    torch._dynamo.reset()


def test_the_fake_implementation_gives_the_shape_without_a_context() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        output = unified_attention(torch.empty(5, 4, 16), torch.empty(5, 2, 16), torch.empty(5, 2, 16), "any")
    assert output.shape == (5, 4, 16)


@pytest.mark.parametrize("flat", [False, True])
def test_output_is_shaped_like_the_query(flat: bool) -> None:
    batch = random_batch((1, 6), (20, 22))
    tensors = [x.flatten(1) if flat else x for x in (batch.query, batch.key, batch.value)]
    output = layer()(*tensors, batch.kv_layer, batch.metadata)
    assert output.shape == tensors[0].shape
    torch.testing.assert_close(output.view(7, 4, 16).double(), batch.expected(SPEC), rtol=2e-6, atol=2e-6)


def test_batch_form_with_padding() -> None:
    """[batch, seq, hidden]: the real tokens of each row come first, padding gives zeros and is not stored."""
    batch = random_batch((2, 6, 4), (2, 6, 4))

    def padded(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(1).split([2, 6, 4])
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=float("nan"))

    output = layer()(padded(batch.query), padded(batch.key), padded(batch.value), batch.kv_layer, batch.metadata)
    assert output.shape == (3, 6, 64)
    assert torch.equal(output[0, 2:], torch.zeros(4, 64))
    real = torch.cat([output[0, :2], output[1], output[2, :4]]).view(12, 4, 16)
    torch.testing.assert_close(real.double(), batch.expected(SPEC), rtol=2e-6, atol=2e-6)


def test_scales_are_computed_once_from_the_first_kv() -> None:
    batch = random_batch((6,), (6,), cache_dtype=FP8_DTYPE)
    attention = bound(batch, kv_cache_dtype="fp8", calculate_kv_scales=True)
    with set_forward_context(ForwardContext(batch.metadata, {"layers.0": attention})):
        unified_attention(batch.query, batch.key, batch.value, "layers.0")
        first = float(attention.k_scale), float(attention.v_scale)
        unified_attention(batch.query, batch.key * 9, batch.value, "layers.0")
    # Twice what the first values need: later ones may be larger.
    assert first == pytest.approx((float(batch.key.abs().max()) / 224, float(batch.value.abs().max()) / 224))
    assert (float(attention.k_scale), float(attention.v_scale)) == first


def test_contexts_nest_and_belong_to_their_thread() -> None:
    outer, inner = ForwardContext({}, {}), ForwardContext({}, {})
    seen: list[str] = []

    def other_thread() -> None:
        try:
            get_forward_context()
        except RuntimeError as error:
            seen.append(str(error))

    with set_forward_context(outer):
        with pytest.raises(ZeroDivisionError), set_forward_context(inner):  # noqa: PT012
            assert get_forward_context() is inner
            raise ZeroDivisionError
        assert get_forward_context() is outer
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
        ({"alibi_slopes": [0.5]}, "alibi_slopes"),
        ({"blocksparse_params": {"local_blocks": 1, "vert_stride": 0}}, "blocksparse_params"),
        ({"blocksparse_params": {"local_blocks": 1, "vert_stride": 2, "size": 4}}, "blocksparse_params"),
        ({"attn_type": "sideways"}, "attn_type"),
    ],
)
def test_impossible_options_are_refused_by_name(arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(UnsupportedOptionError) as refusal:
        Attention(**{"num_heads": 4, "head_size": 16, "scale": 0.3, **arguments})
    assert refusal.value.option == option


def test_unknown_backends_are_refused_at_construction() -> None:
    with pytest.raises(BackendUnavailableError, match="auto or one of"):
        Attention(4, 16, 0.3, attn_backend="fastest")


def test_a_backend_class_or_its_name_picks_the_implementation() -> None:
    for backend in (NativeBackend, NativeBackend(), "native", "NATIVE", None):
        attention = Attention(4, 16, 0.3, 2, attn_backend=backend)
        assert isinstance(attention.impl, NativeBackend.get_impl_cls())


def test_wrong_shapes_and_lengths_are_refused() -> None:
    batch = random_batch((2,), (2,))
    with pytest.raises(ValueError, match="4 heads of 16"):
        layer()(torch.zeros(2, 60), batch.key, batch.value, batch.kv_layer, batch.metadata)
    prefixed = random_batch((2,), (9,))
    with pytest.raises(ValueError, match="no kv_cache"):
        layer()(prefixed.query, prefixed.key, prefixed.value, torch.empty(0), prefixed.metadata)
    build = AttentionMetadataBuilder().build
    with pytest.raises(ValueError, match="slot_mapping"):
        build([2], [4], [[0]], [0, 1, 2])
    with pytest.raises(ValueError, match="don't fit"):
        build([3], [2], [[0]], [0, 1, 2])
    with pytest.raises(ValueError, match="seq_lens"):
        build([1, 1], [2], [[0]], [0, 1])


def test_cross_attention_without_encoder_lengths_names_the_option() -> None:
    batch = random_batch((2,), (2,))
    with pytest.raises(UnsupportedOptionError, match="encoder_seq_lens"):
        layer()(
            batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata, attn_type=AttentionType.ENCODER_DECODER
        )


def test_metadata_splits_rows() -> None:
    metadata = AttentionMetadataBuilder().build([1, 1, 3, 1], [5, 9, 3, 1], [[1], [2, 3], [4], [5]], list(range(6)))
    assert (metadata.num_decode_rows, metadata.is_prompt, metadata.num_tokens) == (2, True, 6)
    assert metadata.block_tables.tolist() == [[1, 0], [2, 3], [4, 0], [5, 0]]
    decode, prefill = metadata.decode_rows(), metadata.prefill_rows()
    assert (decode.seq_lens.tolist(), decode.max_seq_len, decode.max_query_len) == ([5, 9], 9, 1)
    assert (prefill.query_start_loc.tolist(), prefill.max_query_len) == ([0, 3, 4], 3)
    assert metadata.prefill_rows() is prefill
    assert not AttentionMetadataBuilder().build([1], [5], [[1]], [0]).is_prompt
