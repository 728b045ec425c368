"""A prefill node "p", a decode node "d", and between them a network and a transport that do their worst.

The nodes are real (`node.py`). Deliberately harsher than reality: the network is a set without order, and a new life of
a node still hears what was sent to the old one; deadlines, leases, cancels and wrong suspicions may come at any moment
(each costs one fault of the budget); nobody but the two nodes helps: the router cancels only by a fault.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVCommitted, KVGrant, KVRefused, KVRelease, KVWait
from tandem.engine.contracts.wire.parts import PeerRef, PrefixHint
from tandem.engine.contracts.wire.requests import Cancel, Submit
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import CloseGrant, LayerPush, OpenGrant, TransferJob, WholePush
from tandem.kv_connector.protocol.outcomes import Commit, HandoffCompleted, HandoffFailed
from tandem.kv_connector.protocol.peer_effects import AdmitSource, CloseChannel, Fenced, FenceSource
from tests.worlds.lives import Lives, plain_reason
from tests.worlds.node import Look, Node
from tests.worlds.setting import Setting, ViolationError, hashes_of
from tests.worlds.transport import Push, Transport

Event = tuple
SAMPLING = SamplingParams()
ROUTER = NodeKey("router", 1)


class Universe:
    """What all states of one exploration have in common: the nodes' states, and letters and grants by number."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.lives = Lives(self._translate)
        self.letters: list[tuple[NodeKey, NodeKey, Any]] = []  # (from, to, message)
        self.grants: dict[int, KVGrant] = {}
        self._letter_numbers: dict[tuple, int] = {}
        self._grant_numbers: dict[int, int] = {}
        self._checked: set[int] = set()
        self._born: dict[NodeKey, int] = {}

    def start(self) -> tuple:
        """The frozen state in which everything begins."""
        setting, none = self.setting, frozenset()  # type: ignore[var-annotated]
        born, placed = (self.born(NodeKey("p", 1)), self.born(NodeKey("d", 11))), (None,) * self.setting.num_requests
        transport = Transport(self.grants).freeze()
        world = World(self, (born, (1, 11), placed, none, none, none, none, setting.max_faults, *transport))
        world.meet()
        for r, num_hits in enumerate(setting.hits):
            if num_hits:
                world.at("d", "cache", tuple(hashes_of(f"r{r}", num_hits)))
        for r in range(setting.num_requests if setting.submitted else 0):
            world.place(r)
            for side in "pd":
                world.submit(side, r)
        return world.freeze()

    def world(self, state: tuple) -> World:
        return World(self, state)

    def readable(self, event: tuple) -> str:
        kind, *rest = event
        if kind in ("deliver", "lose", "hear_pull"):
            sender, _, message = self.letters[rest[0]]
            rest = [type(message).__name__, message.request_id, "from", sender.node_id, *rest[1:]]
        return " ".join(map(str, rest if kind == "at" else (kind, *rest)))

    def born(self, key: NodeKey) -> int:
        if key not in self._born:
            self._born[key] = self.lives.born(Node(self.setting, key))
        return self._born[key]

    def letter(self, sender: NodeKey, to: NodeKey, message: Any) -> int:
        is_grant = isinstance(message, KVGrant)
        letter = (sender, to, msgspec.structs.replace(message, block_ids=()) if is_grant else message)
        number = self._letter_numbers.setdefault(letter, len(self.letters))
        if number == len(self.letters):
            self.letters.append((sender, to, message))
        return number

    def check_deadlines(self, number: int) -> None:
        """Were every message from this state of a node on lost, its deadline would end each request there."""
        if number in self._checked:
            return
        self._checked.add(number)
        look = self.lives.looks[number]
        for each in look.possible:
            if each.event[0].endswith("deadline") and each.waits_for in look.open:
                after = self.lives.looks[self.lives.after(number, each.event)[0]]
                if each.waits_for in after.open:
                    raise ViolationError(f"{each.waits_for} does not end by its deadline: {look.text}")

    def key_of(self, letter: int) -> AttemptKey:
        return self.letters[letter][2].key  # type: ignore[no-any-return]

    def _grant_number(self, grant: KVGrant) -> int:
        number = self._grant_numbers.setdefault(grant.grant_id, len(self._grant_numbers))
        self.grants[number] = grant
        return number

    def _translate(self, node: Node, effect: Any) -> tuple | None:
        """KVWait is no news to a source (a test of the table says so)."""
        if isinstance(effect, Send):
            effect = (effect.to, effect.message)
        if isinstance(effect, tuple):
            to, message = effect
            if to == ROUTER or isinstance(message, KVWait):
                return None
            if isinstance(message, KVRefused | KVRelease):
                message = msgspec.structs.replace(message, reason=plain_reason(message.reason))
            return "sent", self.letter(node.info.key, to, message), type(message), message.key
        if isinstance(effect, LayerPush | WholePush):
            at = {block_id: index for index, block_id in enumerate(effect.grant.block_ids)}
            indices = tuple(at[block_id] for block_id in effect.destination_block_ids)
            return "job", effect.key, Push(self._grant_number(effect.grant), effect.grant_id, indices)
        if isinstance(effect, TransferJob):
            return "job", effect.key, effect
        if isinstance(effect, OpenGrant):
            self._grant_number(effect.grant)
            return "opened", effect.grant.grant_id
        if isinstance(effect, CloseGrant):
            return "closed", effect.grant_id
        if isinstance(effect, FenceSource):
            return "fence", effect.node
        if isinstance(effect, AdmitSource):
            return "admitted", effect.peer.key
        if isinstance(effect, CloseChannel):
            return "channel_closed", effect.node
        return _outcome(effect)


def _outcome(effect: Any) -> tuple | None:
    if isinstance(effect, HandoffCompleted | HandoffFailed):
        end = "failed" if isinstance(effect, HandoffFailed) else {"": "committed"}.get(effect.reason, "released")
        return "ended", "p", effect.key, end
    if hasattr(effect, "request"):
        return "ended", "d", effect.request.key, "committed" if isinstance(effect, Commit) else "over"
    return None


def _ids(granted: dict[AttemptKey, tuple[int, int]]) -> set[int]:
    return {grant_id for grant_id, _ in granted.values()}


class World:
    """One state, opened."""

    def __init__(self, universe: Universe, state: tuple) -> None:
        self.universe, self.setting = universe, universe.setting
        (nodes, epochs, placed, pending, network, ends, refused, self.faults_left, *transport) = state
        self.nodes, self.epochs = dict(zip("pd", nodes, strict=True)), dict(zip("pd", epochs, strict=True))
        self.placed, self.pending = list(placed), set(pending)  # epochs of the two; submits and cancels under way
        self.network = set(network)
        self.ends, self.refused = dict(ends), set(refused)  # (side, hand-off) -> how; what a sink has refused
        self.transport = Transport.thaw(universe.grants, *transport)

    def freeze(self) -> tuple:
        return (
            tuple(self.nodes.values()), tuple(self.epochs.values()), tuple(self.placed), frozenset(self.pending),
            frozenset(self.network), frozenset(self.ends.items()), frozenset(self.refused), self.faults_left,
            *self.transport.freeze(),
        )  # fmt: skip

    def life(self, name: str) -> NodeKey:
        """The life that it lives now."""
        return NodeKey(name, self.epochs[name])

    def look(self, name: str) -> Look:
        return self.universe.lives.looks[self.nodes[name]]

    # --- nodes ----------------------------------------------------------------------------------------------

    def at(self, name: str, *event: Any) -> None:
        """Something happens to a node."""
        before = self.look(name).granted
        self.nodes[name], effects = self.universe.lives.after(self.nodes[name], event)
        for effect in effects:
            getattr(self, "_" + effect[0])(name, before, *effect[1:])
        after = self.look(name)
        if before != after.granted:
            self.transport.forget_contents(_ids(before) - _ids(after.granted))
        self.refused &= self.look("d").open
        if name == "p":
            self._check_reads(after)
            self.transport.forget_failures(name, after.sinks)

    def _check_reads(self, look: Look) -> None:
        for (name, key), jobs in self.transport.jobs.items():
            if name == "p" and key not in look.read and any(hasattr(job, "indices") for job in jobs):
                raise ViolationError(f"source blocks of {key} are freed while a transfer job reads them")
        for grant, _, key in self.transport.writes if self.setting.one_sided else ():
            is_mine = self.universe.grants[grant].source == self.life("p")
            if is_mine and key not in look.read:
                raise ViolationError(f"source blocks of {key} are freed while a transfer job reads them")

    def _sent(self, name: str, granted: dict, letter: int, kind: type, key: AttemptKey) -> None:
        self.network.add(letter)
        if kind is KVRefused:
            self.refused.add(key)
        if kind is KVCommitted and key in granted:
            if key in self.refused:
                raise ViolationError(f"{key} is committed after it was refused")
            self._check_commit(key, *granted[key])
            if "/" in key.request_id:  # what a pull brings is its puller's
                self._ended(name, granted, "d", key, "committed")

    def _check_commit(self, key: AttemptKey, grant_id: int, num_blocks: int) -> None:
        contents = [self.transport.contents.get((grant_id, index), "unwritten") for index in range(num_blocks)]
        if set(contents) != {"good"}:
            raise ViolationError(f"{key} is committed with blocks {contents}")

    def _job(self, name: str, _: dict, key: AttemptKey, job: Any) -> None:
        self.transport.add((name, key), job)

    def _opened(self, name: str, _: dict, grant_id: int) -> None:
        self.transport.gates |= {grant_id}

    def _closed(self, name: str, _: dict, grant_id: int) -> None:
        self.transport.gates -= {grant_id}

    def _fence(self, name: str, _: dict, source: NodeKey) -> None:
        self.transport.fence(name, source, has_grants=name == "d")

    def _admitted(self, name: str, _: dict, source: NodeKey) -> None:
        self.transport.lost -= {(name, source)}

    def _channel_closed(self, name: str, _: dict, sink: NodeKey) -> None:
        if not self.setting.one_sided:
            keys = [key for key, where in self.look(name).sinks.items() if where == sink]
            self.transport.failed |= {(name, key) for key in keys}

    def _ended(self, name: str, _: dict, side: str, key: AttemptKey, how: str) -> None:
        if (side, key) in self.ends:
            raise ViolationError(f"{key} ends twice on {side}: {self.ends[side, key]}, then {how}")
        self.ends[side, key] = how

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
            sampling=SAMPLING, peer={"prefill": sink, "decode": source}.get(mode),
            prefix=PrefixHint(source, num_tokens) if mode == "full" else None,
        )  # fmt: skip
        self.at(side, "hear", ROUTER, submit)

    def arrive_cancel(self, side: str, r: int) -> None:
        self.pending.discard(("cancel", side, r))
        self.at(side, "hear", ROUTER, Cancel(request_id=f"r{r}", attempt=1))

    # --- network and transport ------------------------------------------------------------------------------

    def deliver(self, letter: int, keep: bool = False) -> None:
        if not keep:
            self.network.discard(letter)
        sender, to, message = self.universe.letters[letter]
        self.at(to.node_id, "hear", sender, message)

    def hear_pull(self, letter: int, is_cached: bool, keep: bool = False) -> None:
        if not keep:
            self.network.discard(letter)
        sender, to, message = self.universe.letters[letter]
        self.at(to.node_id, "hear_pull", sender, message, is_cached)

    def lose(self, letter: int) -> None:
        self.network.discard(letter)

    def run_job(self, name: str, key: AttemptKey) -> None:
        event, ready = self.transport.run((name, key), self._can_write(name, key))
        if ready is not None:
            self.network.add(self.universe.letter(self.life(name), NodeKey("d", ready.sink_epoch), ready))
        if event is not None:
            self.at(name, "transfer", event)

    def fail_push(self, name: str, key: AttemptKey) -> None:
        self.at(name, "transfer", self.transport.fail((name, key), self.transport.jobs[name, key][0].grant_id))

    def _can_write(self, name: str, key: AttemptKey) -> bool:
        job = self.transport.jobs[name, key][0]
        grant = getattr(job, "grant", None)
        if grant is None:
            return True
        grant = self.universe.grants[grant] if isinstance(grant, int) else grant
        barred = self.setting.fences_living and self.transport.is_barred(grant.sink_id, self.life(name))
        return grant.sink == self.life(grant.sink_id) and not barred and key not in self.transport.refused

    def land(self, write: tuple, content: str) -> None:
        grant = self.universe.grants[write[0]]
        lives = grant.sink == self.life(grant.sink_id)
        self.transport.land(write, content, self.setting, self.look(grant.sink_id) if lives else None)

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        life, grants, transport = self.life(name), self.universe.grants, self.transport
        ends_with = {n for n, g in grants.items() if g.sink == life}
        if self.setting.one_sided:
            ends_with |= {n for n, g in grants.items() if g.source == life}
        transport.drop_writes(ends_with)
        transport.jobs = {owner: jobs for owner, jobs in transport.jobs.items() if owner[0] != name}
        transport.failed = frozenset(owner for owner in transport.failed if owner[0] != name)
        transport.refused = frozenset() if name == "p" else transport.refused
        transport.lost = frozenset(each for each in transport.lost if each[0] != name)
        transport.fences = tuple(each for each in transport.fences if each[0] != name)
        for r, placed in enumerate(self.placed):
            if placed and placed["pd".index(name)] == life.epoch:
                self.ends.setdefault((name, AttemptKey(f"r{r}", 1)), "died")
        self.pending = {each for each in self.pending if each[1] != name}
        self.epochs[name] += 1
        self.nodes[name] = self.universe.born(self.life(name))
        if name == "d":
            transport.gates, self.refused = frozenset(), set()
            transport.contents = {}
        self.meet()

    def meet(self) -> None:
        self.at("p", "greet", self.life("d"))
        self.at("d", "greet", self.life("p"))

    def reconnect(self) -> None:
        self.at("d", "greet", self.life("p"))

    def end_fence(self, fence: tuple) -> None:
        self.transport.end_fence(fence, self.setting)
        self.at(fence[0], "transfer", Fenced(fence[1]))

    # --- for who explores -----------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        getattr(self, event[0])(*event[1:])

    def check_quiet(self) -> None:
        """Nothing more will happen: everything has ended and every pool is whole."""
        for name in self.nodes:
            if not self.look(name).is_whole:
                raise ViolationError(f"something waits for ever, or leaks: {self.look(name).text}")

    def outcome(self) -> frozenset[tuple[str, str]]:
        return frozenset((side, how) for (side, _), how in self.ends.items())

    def text(self) -> str:
        letters = [type(self.universe.letters[each][2]).__name__ for each in self.network]
        return f"  there: {self.look('p').text}; {self.look('d').text}; {sorted(letters)} {self.ends}"

    def check(self) -> None:
        """What the two sides tell the router must fit together, and deadlines alone must end what is open."""
        for name in self.nodes:
            self.universe.check_deadlines(self.nodes[name])
        for (side, key), how in self.ends.items():
            sink = self.ends.get(("d", key), "")
            if side == "p" and how == "committed" and sink != "committed":
                raise ViolationError(f"{key}: the source was told of a commit, the sink says {sink or 'nothing'}")
            if side == "p" and how == "released" and sink == "committed":
                raise ViolationError(f"{key} is committed on its sink and released on its source")
