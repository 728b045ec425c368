"""Every message on the control sockets: frozen msgspec Structs, msgpack, one tagged union a direction.

Rules that hold for all of them:
- Times are durations in seconds, never points in time. Epochs are random u64, new with each process.
- `(request_id, attempt)` names one try of one request; a message of an old attempt or epoch is dropped and counted.
- Every verb is idempotent and resent until answered or its deadline. Token ids and hashes travel as raw bytes.
- A connection starts with Hello, answered by Welcome or Refused; nothing else is accepted before.
"""

from __future__ import annotations

import msgspec

from tandem.engine.contracts.wire.adapters import AdapterLoaded, Adapters, AdaptersKnown, LoadAdapter
from tandem.engine.contracts.wire.connection import Hello, Ping, Refused, Status, Welcome
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.handoff import (
    KVClaim,
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVLayers,
    KVPull,
    KVReady,
    KVRefused,
    KVRelease,
    KVResend,
    KVWait,
)
from tandem.engine.contracts.wire.operate import Drain, Lean, Story, TellStory
from tandem.engine.contracts.wire.parts import (
    Message,
)
from tandem.engine.contracts.wire.profile import Profiled, StartProfile, StopProfile
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    FlushBlocks,
    Migrate,
    Migrated,
    Pooled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    Tokens,
)

# Two nodes share one connection, whoever made it, and each may be source and sink: hand-offs go either way on it.
OfSource = KVClaim | KVLayers | KVReady | KVRelease | KVDrained

OfSink = KVPull | KVWait | KVGrant | KVCommitted | KVResend | KVRefused | KVDrainedAck

HandoffMessage = OfSource | OfSink

ToNode = (
    Hello
    | Ping
    | Submit
    | Cancel
    | Migrate
    | FlushBlocks
    | LoadAdapter
    | Adapters
    | AdaptersKnown
    | StartProfile
    | StopProfile
    | Drain
    | Lean
    | TellStory
    | OfSource
    | OfSink
)

FromNode = (
    Welcome
    | Refused
    | Status
    | Accepted
    | Tokens
    | PromptLogprobs
    | Pooled
    | RequestFailed
    | Cancelled
    | Migrated
    | Profiled
    | Story
    | AdapterLoaded
    | Adapters
    | AdaptersKnown
    | OfSource
    | OfSink
)

encode = msgspec.msgpack.Encoder().encode

# They raise DecodeError for whatever is no message, text that is not UTF-8 included.
decode_to_node: WireDecoder[Message] = WireDecoder(ToNode)

decode_from_node: WireDecoder[Message] = WireDecoder(FromNode)
