"""Request traces in Mooncake's format, and what one pooled cache would find in them.

One JSON object a line: {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id for each
block of 512 tokens, the last one perhaps partial]}. Equal ids mean equal blocks after equal prefixes.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tandem.engine.contracts.errors import ConfigError

TRACE_BLOCK = 512  # tokens that one hash of a published trace stands for


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `arrival_s` counts from the trace's begin; a block id stands for TRACE_BLOCK tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]

    def block_hashes(self) -> list[bytes]:
        """One 16-byte hash a trace block; equal for equal ids."""
        return [_block_hash(block_id) for block_id in self.block_ids]

    def token_ids(self, vocab_size: int, scale: float = 1.0) -> list[int]:
        """A prompt of random tokens, equal where block ids are equal. `scale` shrinks every block alike."""
        size = max(1, round(TRACE_BLOCK * scale))
        tokens = np.concatenate([_block_tokens(block_id, size, vocab_size) for block_id in self.block_ids])
        return [int(token) for token in tokens[: max(1, round(self.num_prompt_tokens * scale))]]


_hashes: dict[int, bytes] = {}


def _block_hash(block_id: int) -> bytes:
    known = _hashes.get(block_id)
    if known is None:
        known = _hashes[block_id] = hashlib.sha256(block_id.to_bytes(8, "little")).digest()[:16]
    return known


def _block_tokens(block_id: int, size: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(block_id).integers(0, vocab_size, size, dtype=np.int32)


def read_trace(path: str, limit: int = 0) -> list[TraceRequest]:
    """The first `limit` requests (0: all), by arrival. Raises ConfigError that names the file and line."""
    decode = msgspec.json.Decoder(_Line).decode
    requests = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"can't read the trace {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if item.input_length < 1 or len(item.hash_ids) != -(-item.input_length // TRACE_BLOCK):
            raise ConfigError(f"{path}, line {number}: {item.input_length} tokens with {len(item.hash_ids)} blocks")
        request = TraceRequest(
            item.timestamp / 1000, item.input_length, max(1, item.output_length), tuple(item.hash_ids)
        )
        requests.append(request)
    requests.sort(key=lambda request: request.arrival_s)
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests[:limit] if limit else requests


def faster(requests: Iterable[TraceRequest], speed: float) -> list[TraceRequest]:
    """The same requests, `speed` times as close to each other."""
    return [TraceRequest(r.arrival_s / speed, r.num_prompt_tokens, r.num_output_tokens, r.block_ids) for r in requests]


def pooled_hit_rate(requests: Sequence[TraceRequest], num_tokens: int) -> float:
    """The share of prompt tokens found by one LRU cache of `num_tokens` that everybody shares and that costs nothing
    to reach: no placement over caches of that size together can be expected to find more. 0: without a limit."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for request in requests:
        length = next((i for i, b in enumerate(request.block_ids) if b not in cache), len(request.block_ids))
        found += min(length * TRACE_BLOCK, request.num_prompt_tokens - 1)
        total += request.num_prompt_tokens
        for block_id in reversed(request.block_ids):
            cache[block_id] = None
            cache.move_to_end(block_id)
        while num_tokens and len(cache) > num_tokens // TRACE_BLOCK:
            cache.popitem(last=False)
    return found / total
