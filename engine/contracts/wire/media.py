"""Pictures, sounds and other inputs that aren't text: what a model's processor made of each, and where in the prompt it
stands.

A span of the prompt stands for an item. The token ids of the span are negative and say what the item holds, so that
whatever follows from a prompt's ids (block hashes, placement, caches) tells prompts with different items apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.wire.parts import Count

MediaKind = Literal["image", "audio", "encoder"]
MIN_SPAN = 4  # tokens of a span: 124 bits of its digest; a guess
DIGEST_BYTES = hashlib.sha256().digest_size
MAX_DIMENSIONS = 8  # of a tensor; a guess
DTYPES = ("float32", "float16", "int64", "int32", "uint8", "bool")


class MediaTensor(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that a processor made: little-endian, in C order."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    data: bytes

    @classmethod
    def of(cls, name: str, array: npt.NDArray) -> MediaTensor:
        assert array.dtype.name in DTYPES, f"{name} is {array.dtype.name}"
        return cls(name, array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())

    def array(self) -> npt.NDArray:
        """The values, read only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in tokens `start` to `end` of a prompt. `tensors` are the arguments that the model's own class takes
    for this item alone. `input_ids`, int64 [1, length], are the span's tokens as the model knows them."""

    start: Count
    length: Count
    kind: MediaKind
    digest: bytes  # SHA-256, of kind and tensors
    tensors: tuple[MediaTensor, ...]

    @classmethod
    def of(cls, start: int, length: int, kind: MediaKind, arrays: dict[str, npt.NDArray]) -> MediaItem:
        tensors = tuple(MediaTensor.of(name, array) for name, array in sorted(arrays.items()))
        return cls(start=start, length=length, kind=kind, digest=digest_of(kind, tensors), tensors=tensors)

    @property
    def end(self) -> int:
        return self.start + self.length

    def arrays(self) -> dict[str, npt.NDArray]:
        return {tensor.name: tensor.array() for tensor in self.tensors}


def digest_of(kind: MediaKind, tensors: Iterable[MediaTensor]) -> bytes:
    """SHA-256 of what an item holds. Whatever a processor's options change, changes the tensors."""
    state = hashlib.sha256(msgspec.msgpack.encode(kind))
    for tensor in tensors:
        state.update(msgspec.msgpack.encode((tensor.name, tensor.dtype, tensor.shape)))
        state.update(tensor.data)
    return state.digest()


def digest_ids(digest: bytes, length: int) -> npt.NDArray[np.int32]:
    """The ids of a span of `length` tokens, all below 0: 31 bits of the digest each, from its first word on and around
    again."""
    words = np.frombuffer(digest, "<u4") & 0x7FFFFFFF
    return (-np.resize(words, length).astype(np.int64) - 1).astype(np.int32)


def problem_of_media(media: Sequence[MediaItem], token_ids: npt.NDArray[np.int32]) -> str:
    """The reason why these can't be the items of a prompt with these ids, int32 [num_tokens]; "" when they can."""
    end = num_negative = 0
    for index, item in enumerate(media):
        if item.start < end or item.length < MIN_SPAN or item.end > len(token_ids):
            return f"media[{index}] must be {MIN_SPAN} tokens or more of the prompt, after the item before it"
        end, num_negative = item.end, num_negative + item.length
        problem = next(filter(None, map(_problem_of_tensor, item.tensors)), "")
        if problem:
            return f"media[{index}].{problem}"
        if len({tensor.name for tensor in item.tensors}) < len(item.tensors):
            return f"media[{index}] has two tensors of one name"
        if len(item.digest) != DIGEST_BYTES:
            return f"media[{index}].digest must have {DIGEST_BYTES} bytes"
        if not np.array_equal(token_ids[item.start : end], digest_ids(item.digest, item.length)):
            return f"the prompt's ids from {item.start} to {end} are not those of media[{index}]"
    if num_negative != int(np.count_nonzero(token_ids < 0)):
        return "a prompt token id is below 0 and in no span of media"
    return ""


def _problem_of_tensor(tensor: MediaTensor) -> str:
    if tensor.dtype not in DTYPES or len(tensor.shape) > MAX_DIMENSIONS:
        return f"{tensor.name[:64]} must be of one of {', '.join(DTYPES)}, with at most {MAX_DIMENSIONS} dimensions"
    num_bytes = np.dtype(tensor.dtype).itemsize
    for size in tensor.shape:
        num_bytes *= size
    return "" if num_bytes == len(tensor.data) else f"{tensor.name[:64]} has another size than its shape"
