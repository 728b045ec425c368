"""What a checkpoint's safetensors files hold and whether it is what a model needs, from headers alone. No torch.

A safetensors file is: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), data.
Everything that can be wrong with a folder of weights is found here in milliseconds, before a device is touched.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tandem.engine.contracts.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = "pytorch_model*.bin"
# Loads numbers alone, and copies tensors that share memory, which safetensors doesn't store.
_CONVERT = (
    'python -c "import sys, pathlib, torch; from safetensors.torch import save_file; '
    "folder = pathlib.Path(sys.argv[1]); "
    f"save_file({{name: each.clone() for file in folder.glob('{PICKLED}') for name, each in torch.load(file, "
    f"map_location='cpu', weights_only=True).items()}}, folder / '{SINGLE_FILE}')\""
)
MAX_HEADER_BYTES = 100 << 20  # about the safetensors library's own limit
DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I32": 4, "I64": 8}
TORCH_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
PLAIN_DTYPES = tuple(TORCH_NAMES)
# Of quantised layers: activations have scales of their own, if any (docs/quantised_weights.md).
PASSED_OVER = ("input_scale", "activation_scale", "output_scale", "weight_shape", "input_zero_point")
DUMMY_DIGEST = "dummy/1"  # identity of the weights of `--load-format dummy`; to be changed with their formula


class Needed(NamedTuple):
    """A tensor that a quantised layer is stored as: its shapes, any of which may be there, and its dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored: its file, its dtype as safetensors spells it, and its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in order: model.safetensors, else the shards that the index names.

    Raises CheckpointError that names the missing file.
    """
    single = folder / SINGLE_FILE
    if single.exists():
        return [single]
    index = folder / INDEX_FILE
    if not index.exists():
        raise CheckpointError(_what_is_missing(folder))
    shards = sorted(set(_weight_map(index).values()))
    for shard in shards:
        if not (folder / shard).exists():
            raise CheckpointError(f"{folder / shard} is missing ({INDEX_FILE} names it): fetch the model again")
    return [folder / shard for shard in shards]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name. Raises CheckpointError on truncated or contradicting files."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        for name, (dtype, shape) in read_header(path).items():
            if name in found:
                raise CheckpointError(f"tensor {name!r} is both in {found[name].path} and in {path}; fetch it again")
            found[name] = StoredTensor(path, dtype, shape)
    if not (folder / SINGLE_FILE).exists():
        for name, shard in _weight_map(folder / INDEX_FILE).items():
            if name not in found or found[name].path.name != shard:
                raise CheckpointError(
                    f"{folder / INDEX_FILE} says that {shard} holds tensor {name!r}, but it does not; fetch both again"
                )
    return found


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """name -> (dtype as safetensors spells it, shape). Raises CheckpointError unless the file is whole."""
    header, size = _raw_header(path)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    end_of_data = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
            first, last = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: the header entry of {name!r} is broken; fetch it again") from None
        if last - first != math.prod(shape) * DTYPE_BYTES.get(dtype, 0) and dtype in DTYPE_BYTES:
            raise CheckpointError(f"{path}: {name!r} has {last - first} bytes, not what {dtype} {shape} takes")
        end_of_data = max(end_of_data, last)
        tensors[name] = (dtype, shape)
    if end_of_data != size:
        word = "truncated" if end_of_data > size else "longer than its header says"
        raise CheckpointError(f"{path} is {word}: {size} bytes of tensor data, expected {end_of_data}; fetch it again")
    return tensors


def check_weights(
    folder: Path,
    needed: Mapping[str, tuple[int, ...]],
    tied: bool,
    quantised: Mapping[str, Needed] | None = None,
    reads: Callable[[str], bool] = lambda name: True,
) -> dict[str, StoredTensor]:
    """The folder's tensors, once they are exactly those of `needed` (name -> shape) and `quantised`.

    Left out: rotary frequency buffers of old checkpoints, of quantised layers what isn't read, and whatever `reads`
    denies by its name.
    Kept although not needed: a `tied` model's lm_head.weight, which the loader compares with the embedding.
    Raises CheckpointError that names the first wrong tensor.
    """
    quantised = quantised or {}
    layers = {name.rpartition(".")[0] for name in quantised}
    stored = {
        name: one for name, one in stored_tensors(folder).items() if reads(name) and not _is_passed_over(name, layers)
    }
    plain = {**needed, "lm_head.weight": needed["model.embed_tokens.weight"]} if tied else dict(needed)
    wanted = {name: Needed((shape,), PLAIN_DTYPES) for name, shape in plain.items()} | dict(quantised)
    for name, tensor in stored.items():
        if name not in wanted:
            raise CheckpointError(f"{tensor.path} holds {name}, which a model of this config.json does not have")
        if tensor.shape not in wanted[name].shapes:
            asked = " or ".join(str(list(shape)) for shape in wanted[name].shapes)
            raise CheckpointError(
                f"{tensor.path}: {name} has shape {list(tensor.shape)}, config.json asks for {asked}; "
                "config and weights don't belong together"
            )
        if tensor.dtype not in wanted[name].dtypes:
            raise CheckpointError(
                f"{tensor.path}: {name} is {tensor.dtype}; only {', '.join(wanted[name].dtypes)} are supported"
            )
    required = [*needed, *(name for name, one in quantised.items() if not one.is_optional)]
    missing = [name for name in required if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        hint = "set tie_word_embeddings in config.json if it is tied, or " if missing == ["lm_head.weight"] else ""
        raise CheckpointError(f"{folder}: no shard holds {missing[0]}{more}; {hint}fetch the model again")
    return stored


def _is_passed_over(name: str, quantised_layers: set[str]) -> bool:
    """Whether a tensor isn't read: frequencies, scales of activations."""
    layer, _, own = name.rpartition(".")
    return name.endswith("rotary_emb.inv_freq") or (layer in quantised_layers and own in PASSED_OVER)


def _raw_header(path: Path) -> tuple[Mapping[str, Any], int]:
    """(header, bytes of tensor data in the file)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{path} is truncated or no safetensors file; fetch it again")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON; fetch it again") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no object; fetch it again")
    return header, size - 8 - length


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name in the same folder."""
    try:
        names = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"can't read {index}: {error!r}; fetch the file again") from error
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise CheckpointError(f"{index}: weight_map must name files of its own folder; fetch the file again")
    return names


def how_to_convert(folder: Path) -> str:
    """What a person does about a folder whose weights are pickled. The command runs no code that the files bring."""
    return f"convert them, with the memory that they take, by\n{_CONVERT} {shlex.quote(str(folder))}"


def _what_is_missing(folder: Path) -> str:
    dummy = "or serve it with --load-format dummy"
    if any(folder.glob("*.safetensors")):
        return f"{folder / INDEX_FILE} does not exist, but the folder holds shards: fetch the index, {dummy}"
    if any(folder.glob(PICKLED)):
        return f"{folder} has its weights in pickle format, which is never read: {how_to_convert(folder)}"
    if any(folder.glob("*.pth")):
        return f"{folder} has its weights in Meta's format alone: fetch those for transformers, {dummy}"
    return f"{folder / SINGLE_FILE} does not exist, nor does {INDEX_FILE}: fetch the weights, {dummy}"
