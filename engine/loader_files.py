"""Which files hold a folder's weights. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.engine.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The safetensors files of a folder. Raises CheckpointError naming what is missing."""
    index = folder / INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"can't read {index}: {error!r}; fetch the file again") from error
        for name in names:
            if not (folder / name).exists():
                raise CheckpointError(f"{folder / name} is missing ({INDEX} names it); fetch the model again")
        return [folder / name for name in names]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}: only safetensors weights are supported")
