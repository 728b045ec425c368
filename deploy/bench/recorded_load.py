"""A load that was measured, for the simulator: a trace, or the request log that a router wrote as JSON. Pure but for
reading."""

from __future__ import annotations

from datetime import datetime
from itertools import count
from pathlib import Path

import msgspec

from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest, read_trace
from tandem.engine.contracts.errors import ConfigError

_FIRST_OWN_BLOCK = 1 << 32  # above any block that requests share


class _Logged(msgspec.Struct):
    """What is needed of a line of the request log (docs/http.md, "Around it")."""

    time: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    prompts: int = 1
    duration_s: float = 0.0


def read_load(path: str) -> list[TraceRequest]:
    """The requests of a file, by arrival. Raises ConfigError that names the file and line.

    A request log doesn't say what prompts have in common, only how much of each was cached: that much is taken for the
    beginning of one prompt that all share, and the rest for its own.
    """
    try:
        with Path(path).open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    return read_trace(path) if b'"hash_ids"' in first else _read_log(path)


def _read_log(path: str) -> list[TraceRequest]:
    """The requests of a log. Arrivals are in seconds after the first one: a simulation begins at 0, and heartbeats
    since 1970 would be many."""
    decode, own = msgspec.json.Decoder(_Logged).decode, count(_FIRST_OWN_BLOCK)
    found: list[tuple[float, _Logged]] = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if b'"prompt_tokens"' not in line:
            continue  # of another logger, or of a request that failed before it had a prompt
        try:
            said = decode(line)
            arrival_s = datetime.fromisoformat(said.time.replace("Z", "+00:00")).timestamp() - said.duration_s
        except (msgspec.DecodeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        found += [(arrival_s, said)] * max(1, said.prompts)
    if not found:
        raise ConfigError(f"{path} holds neither a trace nor a request log: write one by --enable-log-requests and "
                          "--log-format json")  # fmt: skip
    found.sort(key=lambda arrived: arrived[0])
    return [_request(arrival_s - found[0][0], said, own) for arrival_s, said in found]


def _request(arrival_s: float, said: _Logged, own: count[int]) -> TraceRequest:
    prompts = max(1, said.prompts)
    num_tokens = max(1, said.prompt_tokens // prompts)
    num_blocks, num_shared = -(-num_tokens // TRACE_BLOCK), said.cached_tokens // prompts // TRACE_BLOCK
    blocks = [index if index < num_shared else next(own) for index in range(num_blocks)]
    return TraceRequest(arrival_s, num_tokens, max(1, said.output_tokens // prompts), tuple(blocks))
