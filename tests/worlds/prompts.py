"""Prompts that a prefill node "p" hands to a decode node "d". Nobody but the two helps: the router cancels only by a
fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import PeerRef, PrefixHint
from tandem.engine.contracts.wire.requests import Cancel, Submit
from tests.worlds.setting import Setting, hashes_of
from tests.worlds.world import ROUTER, Event, Universe, World

ONE_MORE = SamplingParams(max_tokens=2)  # behind the first token
ALONE = SamplingParams(max_tokens=1)


class PromptUniverse(Universe):
    setting: Setting

    def start(self) -> tuple:
        """The frozen state in which everything begins."""
        setting = self.setting
        world = self.world(self.first((None,) * setting.num_requests, frozenset()))
        world.meet(("p", "d"))
        for r, num_hits in enumerate(setting.hits):
            if num_hits:
                world.at("d", "cache", tuple(hashes_of(f"r{r}", num_hits)))
        for r in range(setting.num_requests if setting.submitted else 0):
            world.place(r)
            for side in "pd":
                world.submit(side, r)
        return world.freeze()

    def world(self, state: tuple) -> PromptWorld:
        return PromptWorld(self, state)


class PromptWorld(World):
    def thaw(self, placed: tuple, pending: frozenset) -> None:
        """Epochs of the two by request; submits and cancels under way."""
        self.placed, self.pending = list(placed), set(pending)

    def own(self) -> tuple:
        return tuple(self.placed), frozenset(self.pending)

    # --- router ---------------------------------------------------------------------------------------------

    def place(self, r: int) -> None:
        self.placed[r] = tuple(self.epochs.values())
        sides = "d" if r in self.setting.pulls else "pd"
        self.pending |= {("submit", side, r) for side in sides}

    def cancel(self, r: int) -> None:
        sides = "d" if r in self.setting.pulls else "pd"
        self.pending |= {("cancel", side, r) for side in sides}

    def submit(self, side: str, r: int) -> None:
        self.pending.discard(("submit", side, r))
        source_epoch, sink_epoch = self.placed[r]
        mode: Any = "full" if r in self.setting.pulls else "prefill" if side == "p" else "decode"
        source, sink = PeerRef("p", source_epoch, ""), PeerRef("d", sink_epoch, "")
        num_tokens = self.setting.num_prompt_tokens(r)
        submit = Submit(
            request_id=f"r{r}", attempt=1, mode=mode, prompt_token_ids=np.zeros(num_tokens, "<i4").tobytes(),
            sampling=ALONE if mode == "full" else ONE_MORE, peer={"prefill": sink, "decode": source}.get(mode),
            prefix=PrefixHint(source, num_tokens) if mode == "full" else None, priority=self.setting.priorities[r],
        )  # fmt: skip
        self.at(side, "hear", ROUTER, submit)

    def arrive_cancel(self, side: str, r: int) -> None:
        self.pending.discard(("cancel", side, r))
        self.at(side, "hear", ROUTER, Cancel(request_id=f"r{r}", attempt=1))

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        for r, placed in enumerate(self.placed):
            if placed and placed["pd".index(name)] == self.epochs[name]:
                self.ends.setdefault((name, AttemptKey(f"r{r}", 1)), "died")
        self.pending = {each for each in self.pending if each[1] != name}
        super().crash(name)

    def reconnect(self) -> None:
        self.at("d", "greet", self.life("p"))

    # --- for who explores -----------------------------------------------------------------------------------

    def asked(self) -> Iterator[Event]:
        for r, placed in enumerate(self.placed):
            if placed is None:
                yield "place", r
        for kind, side, r in self.pending:
            if kind == "submit":
                yield "submit", side, r
            elif ("submit", side, r) not in self.pending:  # a cancel travels behind its submit
                yield "arrive_cancel", side, r

    def wrong(self) -> Iterator[Event]:
        faults = self.setting.faults
        if "crash_source" in faults and not self.past_lives("p"):
            yield "crash", "p"
        if "crash_sink" in faults and not self.past_lives("d"):
            yield "crash", "d"
        if "cancel" in faults:
            yield from (("cancel", r) for r, placed in enumerate(self.placed) if placed)
        is_lost = ("d", self.life("p")) in self.transport.lost
        if "suspect_source" in faults and not is_lost:
            yield "at", "d", "suspect_source", self.life("p")
        if "reconnect" in faults and is_lost:
            yield ("reconnect",)
        if "suspect_sink" in faults and self.look("p").sinks:
            yield "at", "p", "suspect_sink", self.life("d")

    def is_over_elsewhere(self, name: str, key: AttemptKey) -> bool:
        other = "d" if name == "p" else "p"
        is_due = any(kind == "submit" and side == other and f"r{r}" == key.request_id for kind, side, r in self.pending)
        return not is_due and (key in self.look(other).ended or (other, key) in self.ends)
