"""The identity that two nodes must share before KV moves between them.

Weights: safetensors headers (names, shapes, dtypes, offsets) plus a digest of each shard. Digests are cached beside
the folder, or in the user's cache where it can't be written, keyed by size, mtime and inode, so a start doesn't hash
16 GB again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.model_folder import tokenizer_digest
from tandem.engine.models.weights import DUMMY_DIGEST, stored_tensors, weight_files
from tandem.engine.pooling.config import PoolingConfig

if TYPE_CHECKING:
    from tandem.engine.models.hf.config import HFConfig

CACHE_NAME = ".tandem-digests.json"
CACHE_FROM_BYTES = 64 << 20  # smaller files are hashed sooner than a cache file is worth; a guess


def model_identity(
    folder: Path, config: ModelConfig | HFConfig, hash_block_size: int, dtype: str, load_format: str = "auto"
) -> ModelIdentity:
    """The identity of a model that generates. `dtype` is the one computed in, since KV of another one differs. Raises
    CheckpointError when weights are missing."""
    weights = DUMMY_DIGEST if load_format == "dummy" else _weights_digest(folder)
    return ModelIdentity(
        config=_short(msgspec.json.encode(msgspec.structs.replace(config, dtype=dtype))),
        weights=weights,
        tokenizer=tokenizer_digest(folder),
        rope=_short(msgspec.json.encode(config.rope)),
        hash_block_size=hash_block_size,
    )


def identity_with_head(
    identity: ModelIdentity, folder: Path, config: msgspec.Struct, load_format: str
) -> ModelIdentity:
    """The identity of a model with a head whose keys lie beside its own, in `folder`: KV of others has no such keys."""
    weights = DUMMY_DIGEST if load_format == "dummy" else _weights_digest(folder)
    own = _short(msgspec.json.encode(config))
    return msgspec.structs.replace(identity, weights=_short(f"{identity.weights} {weights} {own}".encode()))


def pooling_identity(folder: Path, config: PoolingConfig, hash_block_size: int, dtype: str) -> ModelIdentity:
    """The identity of a model that pools: it must be equal on two nodes before one router gives requests to both."""
    return ModelIdentity(
        config=_short(msgspec.json.encode((config, dtype))),
        weights=_weights_digest(folder),
        tokenizer=tokenizer_digest(folder),
        rope="",
        hash_block_size=hash_block_size,
    )


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _weights_digest(folder: Path) -> str:
    stored_tensors(folder)  # a torn shard is named at once, not after gigabytes were hashed
    caches = (folder / CACHE_NAME, _user_cache(folder))
    known = _read_cache(caches)
    keys = {_key(path): path for path in weight_files(folder)}
    unknown = [key for key in keys if key not in known]
    with ThreadPoolExecutor(max_workers=4) as pool:
        known.update(zip(unknown, pool.map(_digest, (keys[key] for key in unknown)), strict=True))
    digests = {key: known[key] for key in keys}
    if any(keys[key].stat().st_size >= CACHE_FROM_BYTES for key in unknown):
        _write_cache(caches, digests)
    return _short("\n".join(digests.values()).encode())


def _key(path: Path) -> str:
    stat = path.stat()
    return f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"


def _digest(path: Path) -> str:
    """SHA-256 of the whole file, header included. Releases the GIL."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 22))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _user_cache(folder: Path) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "tandem" / "digests" / f"{_short(str(folder.resolve()).encode())}.json"


def _read_cache(caches: tuple[Path, Path]) -> dict[str, str]:
    known: dict[str, str] = {}
    for path in caches:
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_text())
            if isinstance(value, dict):
                known.update({key: digest for key, digest in value.items() if isinstance(digest, str)})
    return known


def _write_cache(caches: tuple[Path, Path], digests: dict[str, str]) -> None:
    """Writes to the first place that can be written; a start without a cache is only slower."""
    for path in caches:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(digests, file)
            try:
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise
            return
