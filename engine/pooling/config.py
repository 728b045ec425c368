"""What a model that pools is, read off its folder. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.contracts.wire.parts import Task

Pooling = Literal["cls", "mean", "max", "lasttoken"]
# Pooling, whether vectors are normalized to length 1, the longest input in tokens or 0 for the model's own.
_Said = tuple[Pooling, bool, int]

# Encoders that transformers has, and those of them whose positions start after the padding token's id.
ENCODERS = ("bert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta", "camembert")
OFFSET_POSITIONS = ("mpnet", "roberta", "xlm-roberta", "camembert")
# Decoders of transformers that embed: their padding comes last, so causal attention never sees it.
DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")
PARTS = "sentence_transformers.models."


class PoolingConfig(msgspec.Struct, frozen=True):
    """A model that pools. `max_model_len` is the longest input in tokens, its special tokens included. The rest is for
    embeddings only; `embedding_sizes` as in NodeInfo."""

    task: Task
    model_type: str
    vocab_size: int
    max_model_len: int
    pooling: Pooling = "mean"
    normalize: bool = False
    embedding_sizes: tuple[int, ...] = ()


def read_pooling_config(folder: Path) -> PoolingConfig | None:
    """The folder's model, or None when it doesn't pool. CheckpointError: its way of pooling isn't built."""
    raw = read_json_object(folder / "config.json") or {}
    kind, names = raw.get("model_type"), raw.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if kind in DECODERS:
        return _read_decoder(raw, folder, kind, name)
    if kind not in ENCODERS:
        return None
    if name.endswith("ForSequenceClassification"):
        if (labels := _num_labels(raw)) != 1:
            raise CheckpointError(f"{folder}: {name} has {labels} labels; models that score have one")
        return PoolingConfig("score", kind, _count(raw, folder, "vocab_size"), _length(raw, folder))
    if not name.endswith(("Model", "ForMaskedLM")):
        raise CheckpointError(f"{folder}: {name or kind} can be neither asked for embeddings nor for scores")
    return _embedder(raw, folder, kind, ("mean", False, 0))


def _read_decoder(raw: dict[str, Any], folder: Path, kind: str, name: str) -> PoolingConfig | None:
    """A decoder that embeds: it has no head, or files of sentence-transformers lie beside it. None: it generates."""
    if not name.endswith("Model") and not (folder / "modules.json").is_file():
        return None
    if "AutoModel" in (raw.get("auto_map") or ()):
        raise CheckpointError(f"{folder}: the model comes with code of its own, which isn't run; use one without")
    return _embedder(raw, folder, kind, ("lasttoken", True, 0))


def _embedder(raw: dict[str, Any], folder: Path, kind: str, default: _Said) -> PoolingConfig:
    """A model that embeds. `default`: how its vectors are made where no file says it."""
    pooling, normalize, length = _sentence_transformers(folder) or default
    most = min(_length(raw, folder), length or 1 << 31)
    whole, cuts = (
        _count(raw, folder, "dim" if kind == "distilbert" else "hidden_size"),
        raw.get("matryoshka_dimensions"),
    )
    sizes = (whole, *sorted({cut for cut in cuts if isinstance(cut, int)} if isinstance(cuts, list) else ()))
    return PoolingConfig("embed", kind, _count(raw, folder, "vocab_size"), most, pooling, normalize, sizes)


def _num_labels(raw: dict[str, Any]) -> int:
    """The number of labels that transformers would take: two where config.json doesn't say."""
    labels = raw.get("id2label")
    return len(labels) if isinstance(labels, dict) else int(raw.get("num_labels", 2))


def _length(raw: dict[str, Any], folder: Path) -> int:
    most = _count(raw, folder, "max_position_embeddings")
    padding = raw.get("pad_token_id")
    return most - (padding if isinstance(padding, int) else 1) - 1 if raw["model_type"] in OFFSET_POSITIONS else most


def _count(raw: dict[str, Any], folder: Path, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{folder / 'config.json'}: {name} must be a whole number; repair the file")
    return value


def _sentence_transformers(folder: Path) -> _Said | None:
    """What files of the library sentence-transformers say; None: there are none."""
    modules = folder / "modules.json"
    if not modules.is_file():
        return None
    try:
        parts = msgspec.json.decode(modules.read_bytes(), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{modules}: {error}; repair the file") from None
    kinds = [str(part.get("type", "")).removeprefix(PARTS) for part in parts]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(f"{modules}: {', '.join(kinds)} can't be served; Transformer, Pooling, Normalize can")
    file = folder / str(parts[1].get("path", "")) / "config.json"
    said = read_json_object(file) or {}
    limits = read_json_object(folder / str(parts[0].get("path", "")) / "sentence_bert_config.json") or {}
    return _mode(said, file), len(kinds) == 3, int(limits.get("max_seq_length") or 0)


def _mode(said: dict[str, Any], file: Path) -> Pooling:
    names: dict[str, Pooling] = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_lasttoken": "lasttoken",
    }
    asked = [name for name, value in said.items() if name.startswith("pooling_mode_") and value]
    if isinstance(mode := said.get("pooling_mode"), str):  # as newer versions of it write
        asked = [mode]
        names = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "lasttoken"}
    if len(asked) != 1 or asked[0] not in names:
        way, served = " and ".join(asked) or "nothing", ", ".join(get_args(Pooling))
        raise CheckpointError(f"{file}: pooling by {way} can't be served; have it say one of {served}")
    return names[asked[0]]
