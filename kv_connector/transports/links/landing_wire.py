"""The frames on a link whose bytes travel beside it (NIXL, UCX). Preface and framing are those of tcp_wire.py.

    sink → source   an offer (what the source needs to reach this node's memory) or Refusal
    source → sink   WakeFrame | OpenFrame | LandFrame | LandingFlushFrame, any number
    sink → source   Answer, one for each frame but WakeFrame, in their order

`sequence` counts a link's frames that are answered, from 1.
"""

from __future__ import annotations

import msgspec

from tandem.engine.contracts.wire.decoder import WireDecoder


class Refusal(msgspec.Struct, frozen=True, tag="refused"):
    """The sink's answer in place of an offer: it can't use the library, whatever its export says."""

    error: str


class WakeFrame(msgspec.Struct, frozen=True, tag="w"):
    """Announces bytes: the sink's thread drives the library until the next LandingFlushFrame."""


class OpenFrame(msgspec.Struct, frozen=True, tag="o"):
    """Asks to write into these blocks of the pool directly; the answer comes before the first byte."""

    sequence: int
    grant_id: int
    block_ids: tuple[int, ...]


class LandFrame(msgspec.Struct, frozen=True, tag="l"):
    """Asks the sink to store the blocks with which a slot of its landing buffer is (NIXL) or will be (UCX) filled."""

    sequence: int
    grant_id: int
    block_ids: tuple[int, ...]
    first_layer: int
    num_layers: int
    num_valid: tuple[int, ...]
    slot: int
    nbytes: int


class LandingFlushFrame(msgspec.Struct, frozen=True, tag="f"):
    """Says that every write so far, under any grant, is complete on the source's side."""

    sequence: int
    grant_id: int


class Answer(msgspec.Struct, frozen=True):
    """The sink's answer to one frame: what it asked for is done, or why not."""

    sequence: int
    error: str  # "": done


Frame = WakeFrame | OpenFrame | LandFrame | LandingFlushFrame
decode_frame: WireDecoder[Frame] = WireDecoder(Frame)
decode_answer: WireDecoder[Answer] = WireDecoder(Answer)
