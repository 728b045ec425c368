"""What a model's layers ask of attention, found before its weights are read.

The model is built on the meta device, where tensors have shapes and no content, and run once. A model whose layers
don't all come to us for attention keeps state of its own, and would be silently wrong: it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandem.engine.models.hf.adapters import adapt
from tandem.engine.models.hf.attention import NAME, AttentionCall, layer_name, recorded
from tandem.engine.models.hf.towers import TOWERS, text_attention
from tandem.kernels.api.attention import Attention, AttentionType


class LayerNeeds(NamedTuple):
    """One layer's attention. `head_dim` is what the pool keeps: the wider of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    chunk: int | None
    has_sinks: bool
    alibi_slopes: tuple[float, ...] | None = None


class ModelNeeds(NamedTuple):
    """What a whole model asks of the pool and of the sampler."""

    layers: tuple[LayerNeeds, ...]
    hidden_size: int
    vocab_size: int  # width of the logits
    cross_layers: tuple[LayerNeeds, ...] = ()  # of a decoder with an encoder: its attention to that one's output


def look_at(config: PreTrainedConfig) -> ModelNeeds:
    """What the model of this configuration needs. Raises ValueError that says why it can't run over our attention."""
    model = build_empty(config)
    calls, logits = run_empty(model)
    own = [call for call in calls if not call.is_cross]
    layers = _needs(own, config.get_text_config())
    cross = _cross_needs([call for call in calls if call.is_cross], own) if config.is_encoder_decoder else ()
    embedding: Any = decoder_of(model)[1].get_input_embeddings()
    return ModelNeeds(layers, embedding.embedding_dim, logits.shape[-1], cross)


def build_empty(config: PreTrainedConfig) -> PreTrainedModel:
    """The model on the meta device, adapted. Raises ValueError that says why it can't run over our attention."""
    if type(config) not in class_of(config)._model_mapping:
        raise ValueError("transformers has no class of it that generates text")
    try:
        with torch.device("meta"):
            # bf16: torch's grouped products of experts, without values, know no other.
            attention = text_attention(config, NAME)
            model = class_of(config).from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    except (ValueError, KeyError, ImportError) as error:
        raise ValueError(f"transformers can't run it with an attention of ours: {error}") from error
    adapted = adapt(model)
    # Models with an encoder call for attention, but don't say that they do.
    if not (decoder_of(model)[1]._supports_attention_backend or adapted or config.is_encoder_decoder):
        raise ValueError(f"{type(model).__name__} of transformers has attention of its own that can't be replaced")
    return model


def class_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes the model: with its towers if they are known, with its encoder if it has
    one."""
    if config.is_encoder_decoder:
        takes_text = type(config) in AutoModelForSeq2SeqLM._model_mapping
        return AutoModelForSeq2SeqLM if takes_text else AutoModelForSpeechSeq2Seq
    return AutoModelForMultimodalLM if config.model_type in TOWERS else AutoModelForCausalLM


def decoder_of(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """(name within `model`, module) of the part that turns tokens into hidden states: all but the head."""
    decoder = model.get_decoder()
    if decoder is model:
        decoder = model.model  # Llama4ForCausalLM names itself
    name = next(name for name, module in model.named_modules() if module is decoder)
    return name, decoder


def make_layers(needs: tuple[LayerNeeds, ...], backend: str, sinks: dict[int, torch.Tensor]) -> dict[str, Attention]:
    """Layer name -> attention, in the order of layers. `sinks`: layer -> its learnt sinks [H], where it has them."""
    layers = {}
    for index, layer in enumerate(needs):
        layers[layer_name(index)] = Attention(
            layer.num_heads,
            layer.head_dim,
            layer.scale,
            layer.num_kv_heads,
            layer.alibi_slopes,
            sliding_window=layer.window,
            logits_soft_cap=layer.soft_cap,
            attn_backend=None if backend == "auto" else backend,
            layer_name=layer_name(index),
            attention_chunk=layer.chunk,
            sinks=sinks[index] if layer.has_sinks else None,
        )
    return layers


def run_empty(model: PreTrainedModel) -> tuple[list[AttentionCall], torch.Tensor]:
    """What each layer of a model on the meta device asks of attention, in order, and the logits of two tokens."""
    try:
        with torch.device("meta"), torch.inference_mode(), recorded() as calls:
            tokens = torch.zeros((1, 2), dtype=torch.int64)
            if model.config.is_encoder_decoder:  # three positions of the encoder tell cross attention apart
                states = torch.zeros((1, 3, model.config.hidden_size), dtype=torch.bfloat16)
                output = model(decoder_input_ids=tokens, encoder_outputs=(states,), use_cache=False)
            else:
                output = model(tokens, position_ids=torch.arange(2)[None], use_cache=False)
    except (RuntimeError, NotImplementedError, TypeError, IndexError, KeyError, AttributeError) as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"a pass without values fails, so it looks at them on the way: {said}") from error
    return calls, output.logits


def _needs(calls: list[AttentionCall], config: PreTrainedConfig) -> tuple[LayerNeeds, ...]:
    """The needs of each layer. Raises ValueError unless each came once, in order, with heads that one pool can hold."""
    num_layers = _num_layers(config)
    if [call.layer for call in calls] != list(range(num_layers)):
        came = len({call.layer for call in calls})
        raise ValueError(
            f"{came} of its {num_layers} layers are attention over earlier tokens, the others what we lack"
        )
    if not all(call.is_causal for call in calls):
        raise ValueError("a layer's attention is not causal")
    shapes = {(call.num_heads, call.num_kv_heads, max(call.key_width, call.value_width)) for call in calls}
    if len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(f"its layers keep KV of unlike shapes: {sorted(shapes)}")
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    return tuple(
        LayerNeeds(
            call.num_heads,
            call.num_kv_heads,
            max(call.key_width, call.value_width),
            call.scale,
            call.window,
            call.soft_cap or None,
            config.attention_chunk_size if kind == "chunked_attention" else None,
            call.has_sinks,
            call.alibi_slopes,
        )
        for call, kind in zip(calls, kinds, strict=True)
    )


def _cross_needs(calls: list[AttentionCall], own: list[AttentionCall]) -> tuple[LayerNeeds, ...]:
    """What each layer asks of attention to the encoder's output. Raises ValueError unless each of the layers asks once,
    for heads that lie where its own do."""
    if [call.layer for call in calls] != [call.layer for call in own]:
        raise ValueError("not each of its layers attends to the encoder's output")
    needs = []
    for call, beside in zip(calls, own, strict=True):
        if (call.num_kv_heads, call.key_width, call.value_width) != (
            beside.num_kv_heads,
            beside.key_width,
            beside.value_width,
        ):
            raise ValueError("its attention to the encoder's output keeps KV of another shape than to its own tokens")
        width = max(call.key_width, call.value_width)
        needs.append(LayerNeeds(call.num_heads, call.num_kv_heads, width, call.scale, None, call.soft_cap, None, False))
    return tuple(needs)


def _num_layers(config: Any) -> int:
    """Layers of the decoder; where there is an encoder, num_hidden_layers may be the layers of that."""
    for name in ("decoder_layers", "num_decoder_layers") if config.is_encoder_decoder else ():
        number = getattr(config, name, None)
        if number is not None:
            return int(number)
    return int(config.num_hidden_layers)


def make_cross_layers(needs: tuple[LayerNeeds, ...], backend: str) -> dict[str, Attention]:
    """Layer name -> its attention to the encoder's output, in the order of layers. Backends that can't serve it don't
    count."""
    return {
        layer_name(index): Attention(
            layer.num_heads,
            layer.head_dim,
            layer.scale,
            layer.num_kv_heads,
            logits_soft_cap=layer.soft_cap,
            attn_backend=backend if backend in ("triton", "native") else None,
            layer_name=layer_name(index),
            attn_type=AttentionType.ENCODER_DECODER,
        )
        for index, layer in enumerate(needs)
    }


def sinks_of(model: nn.Module, needs: tuple[LayerNeeds, ...]) -> dict[int, torch.Tensor]:
    """layer -> its learnt sinks [H], of layers that have them."""
    modules: Iterable[Any] = model.modules()
    found = {
        int(module.layer_idx): module.sinks.detach()
        for module in modules
        if hasattr(module, "sinks") and hasattr(module, "layer_idx")
    }
    missing = [index for index, layer in enumerate(needs) if layer.has_sinks and index not in found]
    assert not missing, f"layers {missing} have sinks that aren't called so"
    return found
