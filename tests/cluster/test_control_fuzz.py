"""A live prefill and decode node that get messages which nobody should send, from a router and from a node that hold
the key: both serve on, right, and hold nothing when their senders are gone."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from split_pair import GREEDY, Alone, Pair, make_pair
from waiting import wait_until
from wire_fuzz import WireFuzz

from in_process_cluster import BLOCK, FAST, Node, Result
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Ping
from tandem.engine.contracts.wire.handoff import (
    KVClaim,
    KVCommitted,
    KVDrained,
    KVDrainedAck,
    KVGrant,
    KVPull,
    KVReady,
    KVRefused,
    KVRelease,
    KVResend,
    KVWait,
)
from tandem.engine.contracts.wire.parts import Continuation, FirstToken, Message, NodeInfo, PeerRef, PrefixHint
from tandem.engine.contracts.wire.requests import Cancel, FlushBlocks, Migrate, Submit
from tiny_models import random_prompt

PROMPT = random_prompt(40, seed=3)
BATCH, TALK = 250, 25
SHORT = SamplingParams(
    max_tokens=3, temperature=0.7, top_k=5, seed=1, logit_bias=((5, 1.0),), stop_token_ids=(6,), num_logprobs=1
)


class Impostor:
    """Speaks to both nodes as one process of `role`, over a connection that it makes to each. It lives again, under
    another epoch, by `reborn`: what nodes have for the life before ends."""

    def __init__(self, pair: Pair, role: str, fuzz: WireFuzz) -> None:
        self.pair, self.fuzz, self.role = pair, fuzz, role
        self._context = zmq.Context()
        self._sockets: list[tuple[Node, zmq.Socket]] = []
        self.grants: list[KVGrant] = []
        self.num_grants = self._life = 0
        self.reborn()

    def reborn(self) -> None:
        self._close_sockets()
        self.grants.clear()
        self._life += 1  # requests have names of their own in each
        epoch = secrets.randbits(63)
        self.info = NodeInfo(node_id=f"fuzz-{self.role}", epoch=epoch, role=self.role)  # type: ignore[arg-type]
        if self.role != "router":
            self.info = msgspec.structs.replace(
                self.pair.prefill.info, node_id=self.info.node_id, epoch=epoch, pid=0, control_address="garbage"
            )
        for node in (self.pair.decode, self.pair.prefill):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(node.info.control_address)
            self._sockets.append((node, socket))
            self._greet(socket)
            for number in range(3):  # of these hand-offs grants come, or claims: what follows is about something
                submit, claim = self._opening(node, f"{self.role}{self._life}.{number}")
                socket.send(codec.encode(submit))
                socket.send(codec.encode(claim))
        self.listen()

    def _opening(self, node: Node, name: str) -> tuple[Message, Message]:
        me, to = PeerRef(self.info.node_id, self.info.epoch, ""), node.info
        submit = Submit(
            request_id=name, attempt=0, mode="decode" if node is self.pair.decode else "prefill",
            prompt_token_ids=np.asarray(PROMPT, "<i4").tobytes(), sampling=SHORT, peer=me, deadline_s=20.0,
        )  # fmt: skip
        claim = KVClaim(
            request_id=name, attempt=0, source_id=me.node_id, source_epoch=me.epoch, sink_epoch=to.epoch,
            num_prompt_tokens=len(PROMPT),
        )  # fmt: skip
        return submit, claim

    def _granted(self, claim: KVClaim) -> KVGrant:
        """As a sink would: genuine, for blocks that nobody has."""
        num_blocks = -(-claim.num_prompt_tokens // BLOCK)
        grant = KVGrant(
            request_id=claim.request_id, attempt=claim.attempt, grant_id=secrets.randbits(63) + 1,
            source_id=claim.source_id, source_epoch=claim.source_epoch, sink_id=self.info.node_id,
            sink_epoch=self.info.epoch, first_block=0, block_ids=tuple(range(num_blocks)),
            num_prompt_tokens=claim.num_prompt_tokens, lease_s=5.0,
        )  # fmt: skip
        return self.pair.decode.process.keys.sign_grant(grant)

    def _greet(self, socket: zmq.Socket) -> None:
        socket.send(codec.encode(Hello(wire_version=WIRE_VERSION, info=self.info)))

    def say(self, number: int) -> None:
        """So many messages to either node."""
        for _ in range(number // TALK):
            for node, socket in self._sockets * TALK:
                socket.send(self.fuzz.any_of(self._messages(node)))
            for _, socket in self._sockets:
                self._greet(socket)  # a mutated Hello may have put another in its place
            self.listen()

    def listen(self) -> None:
        """Keeps the newest grants: what comes next may be about them."""
        for _, socket in self._sockets:
            while socket.poll(20):
                message = codec.decode_from_node(socket.recv())
                if isinstance(message, KVClaim):
                    granted = self._granted(message)
                    socket.send(codec.encode(granted))
                    self.grants.append(granted)
                elif isinstance(message, KVGrant):
                    self.grants = [*self.grants[-7:], message]
                    self.num_grants += 1

    def close(self) -> None:
        self._close_sockets()
        self._context.term()

    def _close_sockets(self) -> None:
        for _, socket in self._sockets:
            socket.close()
        self._sockets.clear()

    def _messages(self, node: Node) -> list[Message]:
        """All kinds, about few requests, so that they meet."""
        rng, to = self.fuzz.rng, node.info
        me = PeerRef(self.info.node_id, self.info.epoch, self.info.control_address)
        other = self.pair.prefill.info if node is self.pair.decode else self.pair.decode.info
        there = PeerRef(other.node_id, other.epoch, other.control_address)
        peer, name, attempt = (
            rng.choice((me, me, there)),
            f"{self.role}{self._life}.{rng.randrange(5)}",
            rng.randrange(2),
        )
        about = {"request_id": name, "attempt": attempt}
        grant = rng.choice(self.grants) if self.grants and rng.random() < 0.8 else _grant(about, me, to)
        submit = Submit(
            **about,
            mode=rng.choice(("full", "decode" if node is self.pair.decode else "prefill")),  # type: ignore[arg-type]
            prompt_token_ids=np.asarray(PROMPT, "<i4").tobytes(),
            sampling=SHORT,
            peer=peer,
            is_running=rng.random() < 0.1,
            deadline_s=8.0,
            prefix=PrefixHint(peer, 32) if rng.random() < 0.3 else None,
            sample_indices=rng.choice(((0,), (0, 1))),
        )
        ready = KVReady(
            request_id=grant.request_id, attempt=grant.attempt, grant_id=grant.grant_id,
            grant_signature=grant.signature, source_id=me.node_id, source_epoch=me.epoch, sink_epoch=to.epoch,
            first_tokens=(FirstToken(0, 7, False),), digests=bytes(8 * len(grant.block_ids)),
            continuation=Continuation(len(PROMPT), (5,)) if rng.random() < 0.3 else None,
        )  # fmt: skip
        told = {"request_id": grant.request_id, "attempt": grant.attempt, "grant_id": grant.grant_id}
        hashes = b"".join(bytes([number]) * 16 for number in range(3))
        return [
            Hello(wire_version=WIRE_VERSION, info=self.info), Ping(sequence=1), FlushBlocks(),
            submit, submit, submit, submit,
            Cancel(**about, sample_indices=rng.choice(((), (1,)))),
            Migrate(
                **about, sample_index=0, peer=peer, successor=AttemptKey(name, attempt + 1), num_tokens=len(PROMPT),
                deadline_s=1.0,
            ),
            KVClaim(
                **about, source_id=me.node_id, source_epoch=me.epoch, sink_epoch=to.epoch, num_prompt_tokens=len(PROMPT)
            ),
            KVPull(
                **about, source_epoch=to.epoch, sink_epoch=me.epoch, first_block=0, block_hashes=hashes, deadline_s=1.0
            ),
            ready, ready, grant,
            KVRelease(**about, source_epoch=me.epoch, reason="x"),
            KVDrained(**about, source_epoch=me.epoch, grant_id=grant.grant_id),
            KVWait(**about), KVCommitted(**told), KVDrainedAck(**told),
            KVResend(**told, indices=(0,)), KVRefused(**about, reason="x"),
        ]  # fmt: skip


def _grant(about: dict, sink: PeerRef, to: NodeInfo) -> KVGrant:
    return KVGrant(
        **about, grant_id=secrets.randbits(63), source_id=to.node_id, source_epoch=to.epoch, sink_id=sink.node_id,
        sink_epoch=sink.epoch, first_block=0, block_ids=(0, 1, 2), num_prompt_tokens=len(PROMPT), lease_s=5.0,
    )  # fmt: skip


def is_alive(node: Node) -> bool:
    process = node.process
    threads = (node._thread, process.control._thread, process.transfer._thread)
    return all(thread.is_alive() for thread in threads)


@pytest.fixture
def live() -> Iterator[Pair]:
    options = {"timeouts": replace(FAST, peer_lost_s=8.0)}
    with make_pair("tcp", decode=dict(options), prefill=dict(options)) as pair:
        yield pair


def served(pair: Pair) -> Result:
    """As a router asks: again when a node says that it may go better. A Submit that names a living node under another
    epoch makes its peer connect to it once more, which costs the hand-offs between the two."""
    for _ in range(3):
        result = pair.run(PROMPT, GREEDY)
        if result.failed is None or not result.failed.retryable:
            break
    return result


def campaign(pair: Pair, alone: Alone, seed: int, num_messages: int) -> None:
    fuzz = WireFuzz(seed)
    expected = alone.run(PROMPT, GREEDY)[0]
    senders = [Impostor(pair, "router", fuzz), Impostor(pair, "prefill", fuzz)]
    try:
        for batch in range(-(-num_messages // BATCH)):
            for sender in senders:
                sender.say(BATCH)
            for node in (pair.decode, pair.prefill):
                assert is_alive(node), f"a thread of the {node.info.role} node ended in batch {batch}"
            for sender in senders:
                sender.reborn()
            pair.renew_client()
            result = served(pair)
            assert result.failed is None, (batch, result.failed)
            assert result.output() == expected, batch
        wait_until(lambda: (senders[1].listen(), senders[1].num_grants)[1], "a message that gets as far as a hand-off")
    finally:
        for sender in senders:
            sender.reborn()  # the life before, and what nodes hold for it, is over
            sender.listen()
            sender.close()
    for node in (pair.decode, pair.prefill):  # who was greeted under a mutated name is lost when it was silent for long
        pool, logic = node.process.pool, node.process.logic
        pair.until(lambda pool=pool, logic=logic: pool.num_free == pool.num_blocks and logic.is_empty)
    for node in (pair.decode, pair.prefill):
        node.process.logic.check_integrity()
        assert node.process.control.counters.failures == 0, "something of ours failed with a message"


def test_nodes_outlive_messages_that_nobody_should_send(live: Pair, alone: Alone) -> None:
    campaign(live, alone, seed=1, num_messages=500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 5))
def test_nodes_outlive_very_many_such_messages(live: Pair, alone: Alone, seed: int) -> None:
    campaign(live, alone, seed, num_messages=15_000)
