"""An adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors, checked by headers.

Whatever this engine doesn't compute exactly is refused by name. Pickled weights are never opened.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.engine.adapters.layout import AdapterLayout
from tandem.engine.contracts.errors import AdapterError, CheckpointError
from tandem.engine.models.weights import PLAIN_DTYPES, read_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20  # a guess: real ones have some 1,000
_KEY = re.compile(r"base_model\.model\.([\w.]+)\.lora_([AB])\.weight")
_PICKLED = ("adapter_model.bin", "adapter_model.pt", "pytorch_model.bin")
# Beginnings of values of init_lora_weights that change the base model's own weights: only beside those is such an
# adapter right.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


class AdapterFields(msgspec.Struct, kw_only=True):
    """The fields that decide what is computed; all others of PEFT's are about training."""

    peft_type: str
    r: Annotated[int, Meta(ge=1, le=1 << 16)]
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    modules_to_save: list[str] | None = None
    alpha_pattern: dict[str, float] | None = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    init_lora_weights: Any = True


_REMEDY = "merge this adapter into the weights, and serve those"


@dataclass(frozen=True)
class AdapterFiles:
    """What a folder holds. `digest`: SHA-256 over both files. `shapes`: module of the checkpoint -> (shape of A, shape
    of B), A [rank, inputs], B [outputs, rank]."""

    folder: Path
    digest: bytes
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    _fields: AdapterFields

    def scaling(self, rank: int) -> float:
        """What B A is multiplied with, for a module of this rank."""
        return self._fields.lora_alpha / (math.sqrt(rank) if self._fields.use_rslora else rank)

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS_FILE

    def check(self, layout: AdapterLayout) -> None:
        """Raises AdapterError unless every matrix belongs to the base model, whose layout this is."""
        known = {part.module: part for projection in layout.projections for part in projection.site.parts}
        for module, (a_shape, b_shape) in self.shapes.items():
            if module not in known:
                raise AdapterError(
                    f"{self.folder}: the base model has no {module} that takes adapters (experts, embeddings and the "
                    f"head take none), or the adapter is of another one; {_REMEDY}"
                )
            outputs, inputs = known[module].outputs, known[module].inputs
            rank = a_shape[0] if a_shape else 0
            if a_shape != (rank, inputs) or b_shape != (outputs, rank) or not rank:
                raise AdapterError(
                    f"{self.folder}: {module} has A {list(a_shape)} and B {list(b_shape)}, but the base model takes "
                    f"[rank, {inputs}] and [{outputs}, rank]; the adapter is of another model"
                )
            if rank > layout.max_rank:
                raise AdapterError(
                    f"{self.folder}: {module} has rank {rank}; this server takes up to {layout.max_rank} "
                    f"(--max-lora-rank)"
                )


def read_adapter(path: str) -> AdapterFiles:
    """The adapter in the folder `path`, read but for its matrices. Raises AdapterError that names file or field."""
    folder = Path(path)
    config = _read(folder / CONFIG_FILE, folder)
    try:
        fields = msgspec.json.decode(config, type=AdapterFields)
    except msgspec.MsgspecError as error:
        raise AdapterError(f"{folder / CONFIG_FILE} is no adapter's configuration: {error}") from None
    _refuse(folder, fields)
    digest = hashlib.sha256(len(config).to_bytes(8, "little") + config)
    try:
        header = read_header(folder / WEIGHTS_FILE)
        with (folder / WEIGHTS_FILE).open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    except CheckpointError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(f"{folder / WEIGHTS_FILE} can't be read: {error.strerror}") from None
    return AdapterFiles(folder, digest.digest(), _shapes(folder, header), fields)


def _read(file: Path, folder: Path) -> bytes:
    """The bytes of the configuration in `file`. Raises AdapterError where `folder` has no weights in safetensors, or a
    file can't be read."""
    try:
        if not folder.is_dir():
            raise AdapterError(f"{folder} is no folder; give the one with {CONFIG_FILE} and {WEIGHTS_FILE}")
        pickled = next((name for name in _PICKLED if (folder / name).exists()), "")
        if not (folder / WEIGHTS_FILE).exists():
            why = (
                f"{pickled} is in pickle format and is never read: save it as safetensors" if pickled else "is it one?"
            )
            raise AdapterError(f"{folder} has no {WEIGHTS_FILE}; {why}")
        for each in (file, folder / WEIGHTS_FILE):
            if each.exists() and not each.is_file():  # opening a pipe would wait until somebody writes
                raise AdapterError(f"{each} can't be read: it is no regular file")
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise AdapterError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes")
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise AdapterError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}") from None


def _refuse(folder: Path, fields: AdapterFields) -> None:
    wrong = {
        f"peft_type {fields.peft_type!r}": fields.peft_type.upper() != "LORA",
        "use_dora": fields.use_dora,
        f"bias {fields.bias!r}": fields.bias != "none" or fields.lora_bias,
        "modules_to_save": bool(fields.modules_to_save),
        "alpha_pattern": bool(fields.alpha_pattern),
        "layer_replication": bool(fields.layer_replication),
        "target_parameters": bool(fields.target_parameters),
        "trainable_token_indices": bool(fields.trainable_token_indices),
        f"init_lora_weights {fields.init_lora_weights!r}": str(fields.init_lora_weights).startswith(_CHANGES_BASE),
        "a lora_alpha that is no number": not math.isfinite(fields.lora_alpha),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise AdapterError(f"{folder / CONFIG_FILE} has {what}, which isn't supported; {_REMEDY}")


def _shapes(
    folder: Path, header: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in header.items():
        key = _KEY.fullmatch(name)
        if key is None:
            raise AdapterError(
                f"{folder / WEIGHTS_FILE} holds {name}; only lora_A and lora_B of projections are supported; {_REMEDY}"
            )
        if dtype not in PLAIN_DTYPES:
            raise AdapterError(
                f"{folder / WEIGHTS_FILE}: {name} is {dtype}; only {', '.join(PLAIN_DTYPES)} are supported"
            )
        found.setdefault(key[1], {})[key[2]] = shape
    for module, pair in found.items():
        if len(pair) != 2:
            raise AdapterError(f"{folder / WEIGHTS_FILE} has but one of lora_A and lora_B of {module}")
    if not found:
        raise AdapterError(f"{folder / WEIGHTS_FILE} holds no matrices")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}
