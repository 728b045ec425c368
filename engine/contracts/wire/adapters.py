"""What routers and nodes tell each other of adapters: read this one; these are the ones that there are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.engine.contracts.wire.parts import Message

Stamp = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Router -> node: read the adapter in the folder `path` and check it. Answered by AdapterLoaded, which echoes
    `stamp`."""

    path: str
    stamp: Stamp


class AdapterLoaded(Message, frozen=True, kw_only=True):
    """The node holds the adapter in host memory. `digest` says what it is; b"": it can't be served, see `problem`."""

    path: str
    stamp: Stamp
    digest: bytes = b""
    problem: str = ""


MOST_TOLD = 128  # a guess: a kilobyte of each heartbeat


class HeldAdapters(msgspec.Struct, frozen=True, array_like=True):
    """The adapters that a node has in memory: `marks` (AdapterRef.mark) one after another, those used last first, at
    most MOST_TOLD. `read_s`: what reading one from disk took lately; 0.0: none was read."""

    marks: bytes = b""
    read_s: float = 0.0


NONE_HELD = HeldAdapters()


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """What a name stands for since `stamp` (nanoseconds of the wall clock of whoever said so). `path` "": nothing."""

    name: str
    stamp: Stamp
    path: str = ""
    digest: bytes = b""


class Adapters(Message, frozen=True, kw_only=True):
    """All that the sender knows of names, either way. Who knows more answers with all of its own, who learns something
    tells it to the others that it is connected with: so every router knows what any of them was told. With an `ask`
    the receiver says AdaptersKnown: a router when it knows them, a node when all routers that it has do."""

    entries: tuple[AdapterEntry, ...] = ()
    ask: Stamp = 0


class AdaptersKnown(Message, frozen=True, kw_only=True):
    """The answer to Adapters with an `ask`, either way."""

    ask: Stamp
