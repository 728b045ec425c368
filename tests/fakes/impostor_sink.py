"""Poses as a decode node towards a real prefill node, over the real control socket."""

from __future__ import annotations

import random
import time

import numpy as np
import zmq
from split_pair import GREEDY, Pair
from waiting import PATIENCE_S

from in_process_cluster import BLOCK, Result
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import Hello, Welcome
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVDrainedAck, KVGrant
from tandem.engine.contracts.wire.parts import Message, PeerRef
from tandem.engine.contracts.wire.requests import Submit


class ImpostorSink:
    """Poses as the decode node of `pair` towards its prefill node, and answers claims as a test likes."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("tcp://127.0.0.1:*")
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._peer = b""

    def submit(self, name: str, prompt: list[int]) -> Result:
        """To the prefill node, which will claim from this impostor."""
        info, client = self.pair.decode.info, self.pair.client
        client.results[name, 0] = Result()
        message = Submit(
            request_id=name,
            attempt=0,
            mode="prefill",
            prompt_token_ids=np.asarray(prompt, "<i4").tobytes(),
            sampling=GREEDY,
            peer=PeerRef(info.node_id, info.epoch, self._address),
        )
        client.send(self.pair.prefill.info, message)
        return client.results[name, 0]

    def expect(self, kind: type, name: str):  # type: ignore[no-untyped-def]
        """The next message of `kind` about `name`; greets, answers KVDrained, drops all else."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.pair.client.poll(0.0)
            if not self._socket.poll(5):
                continue
            self._peer, payload = self._socket.recv_multipart()
            message = codec.decode_to_node(payload)
            if isinstance(message, Hello):
                self.send(Welcome(info=self.pair.decode.info))
            elif isinstance(message, KVDrained):
                self.send(KVDrainedAck(request_id=message.request_id, attempt=0, grant_id=message.grant_id))
            if isinstance(message, kind) and message.request_id == name:
                return message
        raise AssertionError(f"no {kind.__name__} about {name}")

    def send(self, message: Message) -> None:
        self._socket.send_multipart([self._peer, codec.encode(message)])

    def grant(self, claim: KVClaim, **changes: object) -> KVGrant:
        return sign_grant_for(self.pair, claim, **changes)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def sign_grant_for(pair: Pair, claim: KVClaim, **changes: object) -> KVGrant:
    """Signed with the cluster's key, for the first blocks of the decode node's pool."""
    num_blocks = -(-claim.num_prompt_tokens // BLOCK)
    fields = {
        "request_id": claim.request_id,
        "attempt": claim.attempt,
        "grant_id": random.getrandbits(63) + 1,
        "source_id": claim.source_id,
        "source_epoch": claim.source_epoch,
        "sink_id": pair.decode.info.node_id,
        "sink_epoch": claim.sink_epoch,
        "first_block": 0,
        "block_ids": tuple(range(num_blocks)),
        "num_prompt_tokens": claim.num_prompt_tokens,
        "lease_s": 60.0,
    }
    return pair.decode.process.keys.sign_grant(KVGrant(**{**fields, **changes}))  # type: ignore[arg-type]
