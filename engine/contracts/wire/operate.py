"""What routers ask of nodes: to take nothing new, to be for some work first, to tell what they did."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.engine.contracts.wire.parts import Count, Message, Seconds
from tandem.engine.contracts.wire.work import Leaning

MAX_ASKED, MAX_TOLD = 64, 4096  # sub-requests of one question, moments of one answer; guesses


class Drain(Message, frozen=True, kw_only=True):
    """Router -> node: take nothing new (`on`), or take requests again. Answered by the node's Status, and sent again
    until that says so. A node that has been told to end goes on ending."""

    on: bool


class Lean(Message, frozen=True, kw_only=True):
    """Router -> node that does all work: be for this work first. Answered by the node's Status. What demand asks for is
    left undone on a node that is pinned, or has leaned a moment ago."""

    leaning: Leaning


class TellStory(Message, frozen=True, kw_only=True):
    """Router -> node: what was done for these sub-requests? Answered by Story. Sent once."""

    ask: str  # comes back with the answer
    request_ids: Annotated[tuple[str, ...], Meta(max_length=MAX_ASKED)]


class NodeMoment(msgspec.Struct, frozen=True, array_like=True):
    """Something that a node did: it ended `ago_s` before the answer was sent and took `lasts_s`. `stage` is "received
    Submit", "sent KVClaim" … for messages, "chunk" for a part of a prompt (`num_tokens`), "pushed" for KV (`num_bytes`
    of the layers `first_layer` … `last_layer`; -1: all)."""

    request_id: str
    attempt: Count
    stage: str
    ago_s: Seconds
    lasts_s: Seconds = 0.0
    num_tokens: Count = 0
    num_bytes: Annotated[int, Meta(ge=0)] = 0
    first_layer: Annotated[int, Meta(ge=-1)] = -1
    last_layer: Annotated[int, Meta(ge=-1)] = -1


class Story(Message, frozen=True, kw_only=True):
    """Answer to TellStory: what the node remembers, in order of time."""

    ask: str
    moments: Annotated[tuple[NodeMoment, ...], Meta(max_length=MAX_TOLD)] = ()
