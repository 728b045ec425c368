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
from pathlib import Path

import msgspec

from tandem.engine.kv_layout import ModelIdentity
from tandem.engine.loader_files import shard_paths
from tandem.engine.model_config import ModelConfig

CACHE_NAME = ".tandem-digests.json"


def model_identity(
    folder: Path, config: ModelConfig, hash_block_size: int, dtype: str, load_format: str = "auto"
) -> ModelIdentity:
    """Raises CheckpointError when weights are missing. `dtype` is the one computed in: KV of another differs."""
    tokenizer = folder / "tokenizer.json"
    weights = "dummy" if load_format == "dummy" else _weights_digest(folder)
    return ModelIdentity(
        config=_short(msgspec.json.encode(msgspec.structs.replace(config, dtype=dtype))),
        weights=weights,
        tokenizer=_short(tokenizer.read_bytes()) if tokenizer.exists() else "",
        rope=_short(msgspec.json.encode(config.rope)),
        hash_block_size=hash_block_size,
    )


def _short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _weights_digest(folder: Path) -> str:
    paths = shard_paths(folder)
    caches = (folder / CACHE_NAME, _user_cache(folder))
    known = _read_cache(caches)
    digests, fresh = {}, False
    for path in paths:
        stat = path.stat()
        key = f"{path.name}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        if key not in known:
            known[key] = _digest(path)
            fresh = True
        digests[key] = known[key]
    if fresh:
        _write_cache(caches, digests)
    return _short("\n".join(digests.values()).encode())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()


def _user_cache(folder: Path) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "tandem" / "digests" / f"{_short(str(folder.resolve()).encode())}.json"


def _read_cache(caches: tuple[Path, Path]) -> dict[str, str]:
    known: dict[str, str] = {}
    for path in caches:
        with contextlib.suppress(OSError, ValueError):
            value = json.loads(path.read_text())
            known.update({k: v for k, v in value.items() if isinstance(v, str)})
    return known


def _write_cache(caches: tuple[Path, Path], digests: dict[str, str]) -> None:
    """To the first place that can be written; a start without a cache is only slower."""
    for path in caches:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(digests, file)
            os.replace(file.name, path)
            return
