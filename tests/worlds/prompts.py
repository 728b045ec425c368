"""Prompts that a prefill node "p" hands to a decode node "d", or that two nodes which do all work hand to each other.
Nobody but the two helps: the router cancels only by a fault."""

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
        world.meet(setting.names)
        for r, num_hits in enumerate(setting.hits):
            if num_hits:
                world.at(setting.way(r)[1], "cache", tuple(hashes_of(f"r{r}", num_hits)))
        for r in range(setting.num_requests if setting.submitted else 0):
            world.place(r)
            for name in world.told(r):
                world.submit(name, r)
        return world.freeze()

    def world(self, state: tuple) -> PromptWorld:
        return PromptWorld(self, state)


class PromptWorld(World):
    def thaw(self, placed: tuple, pending: frozenset) -> None:
        """Epochs of source and sink by request; submits and cancels under way."""
        self.placed, self.pending = list(placed), set(pending)

    def own(self) -> tuple:
        return tuple(self.placed), frozenset(self.pending)

    # --- router ---------------------------------------------------------------------------------------------

    def place(self, r: int) -> None:
        self.placed[r] = tuple(self.epochs[name] for name in self.setting.way(r))
        self.pending |= {("submit", name, r) for name in self.told(r)}

    def cancel(self, r: int) -> None:
        self.pending |= {("cancel", name, r) for name in self.told(r)}

    def told(self, r: int) -> str:
        """The nodes that hear of it from the router."""
        way = self.setting.way(r)
        return way[1] if r in self.setting.pulls else way

    def submit(self, name: str, r: int) -> None:
        self.pending.discard(("submit", name, r))
        source, sink = (PeerRef(*each, "") for each in zip(self.setting.way(r), self.placed[r], strict=True))
        mode: Any = "full" if r in self.setting.pulls else "prefill" if name == source.node_id else "decode"
        num_tokens = self.setting.num_prompt_tokens(r)
        submit = Submit(
            request_id=f"r{r}", attempt=1, mode=mode, prompt_token_ids=np.zeros(num_tokens, "<i4").tobytes(),
            sampling=ALONE if mode == "full" else ONE_MORE, peer={"prefill": sink, "decode": source}.get(mode),
            prefix=PrefixHint(source, num_tokens) if mode == "full" else None, priority=self.setting.priorities[r],
        )  # fmt: skip
        self.at(name, "hear", ROUTER, submit)

    def arrive_cancel(self, name: str, r: int) -> None:
        self.pending.discard(("cancel", name, r))
        self.at(name, "hear", ROUTER, Cancel(request_id=f"r{r}", attempt=1))

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        for r, placed in enumerate(self.placed):
            way = self.setting.way(r)
            if placed and name in way and placed[way.index(name)] == self.epochs[name]:
                self.ends.setdefault(("pd"[way.index(name)], AttemptKey(f"r{r}", 1)), "died")
        self.pending = {each for each in self.pending if each[1] != name}
        super().crash(name)

    def reconnect(self, sink: str, source: str) -> None:
        self.at(sink, "greet", self.life(source))

    # --- for who explores -----------------------------------------------------------------------------------

    def asked(self) -> Iterator[Event]:
        for r, placed in enumerate(self.placed):
            if placed is None:
                yield "place", r
        for kind, name, r in self.pending:
            if kind == "submit":
                yield "submit", name, r
            elif ("submit", name, r) not in self.pending:  # a cancel travels behind its submit
                yield "arrive_cancel", name, r

    def wrong(self) -> Iterator[Event]:
        faults = self.setting.faults
        if "cancel" in faults:
            yield from (("cancel", r) for r, placed in enumerate(self.placed) if placed)
        for source, sink in sorted({self.setting.way(r) for r in range(self.setting.num_requests)}):
            if "crash_source" in faults and not self.past_lives(source):
                yield "crash", source
            if "crash_sink" in faults and not self.past_lives(sink):
                yield "crash", sink
            is_lost = (sink, self.life(source)) in self.transport.lost
            if "suspect_source" in faults and not is_lost:
                yield "at", sink, "suspect_source", self.life(source)
            if "reconnect" in faults and is_lost:
                yield "reconnect", sink, source
            if "suspect_sink" in faults and self.look(source).sinks:
                yield "at", source, "suspect_sink", self.life(sink)

    def allows(self, event: Event) -> bool:
        """Of requests that can't be told apart the first is begun first (tickets with hits can: the newest gives way),
        and so is one of the first node's where nodes can't be told apart either."""
        if event[0] != "start" or not self.setting.is_calm:
            return True
        r, setting = _request_of(event[1]), self.setting
        twins = [each for each in range(r) if setting.kind(each) == setting.kind(r) and not setting.hits[r]]
        if any(AttemptKey(f"r{each}", 1) in self.look(setting.way(r)[0]).untouched for each in twins):
            return False
        is_first = sum(len(self.look(name).untouched) for name in self.nodes) == setting.num_requests
        return not (is_first and setting.is_mirrored and setting.way(r)[0] != self.setting.names[0])

    def is_over_elsewhere(self, name: str, key: AttemptKey) -> bool:
        (other,) = {*self.nodes} - {name}
        is_due = any(kind == "submit" and at == other and f"r{r}" == key.request_id for kind, at, r in self.pending)
        return not is_due and (key in self.look(other).ended or (self._side(other, key), key) in self.ends)

    def _side(self, name: str, key: AttemptKey) -> str:
        """Of a hand-off; that of a pull is named after its request."""
        return "pd"[self.setting.way(_request_of(key)).index(name)]


def _request_of(key: AttemptKey) -> int:
    return int(key.request_id.split("/")[0][1:])
