"""What a model folder's generation_config.json says: where a text ends, and how to sample when a request doesn't say.
No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import CheckpointError, ConfigError

FILE = "generation_config.json"

T = TypeVar("T")


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of requests that don't set them; None: OpenAI's default holds."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None

    def __str__(self) -> str:
        said = msgspec.to_builtins(self)
        return ", ".join(f"{name} {value}" for name, value in said.items()) or "OpenAI's"


class _Ends(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a text; empty when the folder has no such file or it names none. Raises CheckpointError."""
    path = folder / FILE
    value = _convert(read_json_object(path) or {}, _Ends, path, "repair the file").eos_token_id
    return token_ids(value)


def sampling_defaults(folder: Path, choice: str) -> SamplingDefaults:
    """The defaults that --generation-config names: those of the model's `folder`, none, or those of another folder.

    Raises ConfigError for a folder without the file and for values that no request could ask for.
    """
    if choice == "none":
        return SamplingDefaults()
    path = (folder if choice == "auto" else Path(choice)) / FILE
    raw = read_json_object(path)
    if raw is None and choice != "auto":
        raise ConfigError(f"--generation-config {choice}: there is no {path}; name its folder, or say auto or none")
    return _convert(raw or {}, SamplingDefaults, path, "repair the file, or use --generation-config none")


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def read_json_object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is no such file. Raises CheckpointError when it holds anything but
    one JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"can't read {path}: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch the model again")
    return value


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _convert(raw: dict[str, Any], kind: type[T], path: Path, remedy: str) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{path}: {error}; {remedy}") from None
