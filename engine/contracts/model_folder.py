"""From what the user calls a model, a local folder or a hub name, to a folder on disk. No torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tandem.engine.contracts.errors import CheckpointError

PROBE_TIMEOUT_S = 1.5  # how long a silent hub delays a start; the client itself may add 3 s once; a guess
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TEXT_FILES = ["*.json", "tokenizer*", "*.jinja"]


def resolve_model(model: str, revision: str = "", with_weights: bool = True) -> Path:
    """The folder of `model`: a local folder as it is, else a hub name, downloaded or found in huggingface_hub's cache.

    A router passes `with_weights=False` and gets the configuration and tokenizer files only. Raises CheckpointError
    within seconds when the hub can't be reached and the cache doesn't have it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file: give the folder that holds the model's config.json")
    if not _HUB_NAME.fullmatch(model):
        raise CheckpointError(f"{folder} does not exist: give the folder that holds the model's config.json")
    return _from_hub(model, revision or None, [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES)


def tokenizer_digest(folder: Path) -> str:
    """The digest of a folder's tokenizer.json, by which nodes and routers tell whether theirs is the same; "" without
    one."""
    path = folder / "tokenizer.json"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32] if path.exists() else ""


def given_names(given: str) -> tuple[str, ...]:
    """The names of `--served-name`: one, or several between commas."""
    return tuple(name.strip() for name in given.split(",") if name.strip())


def served_name(model: str, given: str = "") -> str:
    """The name by which the model goes: the first one given, else the last part of the folder's path or of the hub
    name."""
    folder = Path(model).expanduser()
    return (*given_names(given), folder.resolve().name if folder.is_dir() else folder.name)[0]


def _from_hub(name: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        commit = huggingface_hub.HfApi().model_info(name, revision=revision, timeout=PROBE_TIMEOUT_S).sha
        return Path(huggingface_hub.snapshot_download(name, revision=commit, allow_patterns=patterns))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a folder here nor a valid model name: {error}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no details'}"
    try:
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=True)
        )
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"there is no folder {name!r} here, it is not in the local hub cache, and the model hub did not give it "
            f"({reason}); check the name, the network and HF_TOKEN, or download the model and give its folder"
        ) from None
