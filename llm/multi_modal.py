"""Images and sounds as programs have them, as the URLs that the server takes."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

_WANTED = {
    "image": "a PIL image, uint8 [height, width, 3], the bytes of an image file, or a URL",
    "audio": "(samples, rate), the bytes of a sound file, or a URL",
}


def as_urls(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """What `multi_modal_data` holds, {"image": one or a list, "audio": one or a list}, as data: URLs; URLs stay as they
    are. Raises ValueError for what is neither."""
    if not isinstance(data, Mapping) or data.keys() - _WANTED.keys():
        raise ValueError(f'multi_modal_data is {{"image": …}} or {{"audio": …}}, not {str(data)[:80]}')
    return {
        kind: [_url(kind, each) for each in (given if isinstance(given, list) else [given])]
        for kind, given in data.items()
    }


def _url(kind: str, given: Any) -> str:
    if isinstance(given, str) and given.partition(":")[0] in ("data", "http", "https"):
        return given
    if isinstance(given, bytes):
        found = given
    elif kind == "image" and (hasattr(given, "save") or _is_picture(given)):
        found = _png(given)
    elif kind == "audio" and isinstance(given, tuple) and len(given) == 2 and np.ndim(given[0]) in (1, 2):
        found = _wave(np.asarray(given[0], "<f4"), int(given[1]))
    else:
        raise ValueError(f"multi_modal_data: {kind} is {_WANTED[kind]}, not {type(given).__name__}")
    return f"data:{kind}/*;base64,{base64.b64encode(found).decode()}"


def _is_picture(given: Any) -> bool:
    return isinstance(given, np.ndarray) and given.dtype == np.uint8 and given.ndim == 3


def _png(given: Any) -> bytes:
    if isinstance(given, np.ndarray):
        from PIL import Image  # needed only by programs that have such objects

        given = Image.fromarray(given)
    out = io.BytesIO()
    given.save(out, "PNG")
    return out.getvalue()


def _wave(samples: np.ndarray, rate: int) -> bytes:
    """A WAV file of samples in [-1, 1], [num_samples] or [num_samples, channels], as 32-bit whole numbers: every server
    reads those."""
    channels = 1 if samples.ndim == 1 else samples.shape[1]
    whole = (samples.astype(np.float64).clip(-1, 1) * 0x7FFFFFFF).astype("<i4").tobytes()
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, rate * channels * 4, channels * 4, 32)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + len(whole), b"WAVE")
        + form
        + struct.pack("<4sI", b"data", len(whole))
        + whole
    )
