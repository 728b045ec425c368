"""Messages that a hand-off must not hear: of other nodes, with another's grant, or late; and those heard twice."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVCommitted, KVReady, KVRefused, KVResend, KVWait
from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol.jobs import digest_key
from tandem.kv_connector.protocol.sink_table import SinkState
from tandem.kv_connector.protocol.source_table import SourceState
from tests.fakes.handoff_duo import SOURCE, Duo, ready_of
from tests.fakes.handoff_effects import take_messages

KEY = AttemptKey("r", 0)


def computed() -> Duo:
    """The transfer thread is about to flush and to say KVReady."""
    duo = Duo()
    duo.submit("r")
    duo.schedule()
    duo.schedule()
    duo.compute()
    return duo


@pytest.mark.parametrize("kind", [KVCommitted, KVRefused, KVResend, KVWait])
def test_a_source_hears_nobody_but_its_sink(kind: type[Message]) -> None:
    duo = computed()
    duo.lost = {KVReady}
    duo.transfer()
    manager = duo.source.manager
    machine = manager.ledger.records[KEY].machine
    assert machine.state is SourceState.READY
    fields = {"grant_id": machine.grant_id, "reason": "", "indices": (0,), "round": 1}
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    message = kind(request_id="r", attempt=0, **known)
    for stranger in (NodeKey("x", 2), NodeKey("d", 3)):  # another node, another life of the same one
        before = manager.counters.messages_dropped
        manager.on_message(stranger, message, duo.now)
        assert machine.state is SourceState.READY
        assert manager.counters.messages_dropped == before + 1
        assert {to for to, _ in take_messages(manager)} <= {stranger}
    duo.lost = set()
    duo.turn()
    assert duo.committed == {"r"}
    duo.turn()
    duo.check_whole()


def test_a_ready_that_names_another_grant_is_not_heard() -> None:
    duo = computed()
    manager = duo.sink.manager
    ready = ready_of(next(job for job in reversed(duo.source.jobs)))
    manager.on_message(SOURCE, msgspec.structs.replace(ready, grant_signature=b"another's grant.."), duo.now)
    assert manager.ledger.records[KEY].machine.state is SinkState.GRANTED
    assert manager.counters.foreign_messages == 1
    duo.turn()
    assert duo.committed == {"r"}


def test_what_was_committed_is_said_again_to_a_source_that_missed_it() -> None:
    duo = computed()
    duo.lost = {KVCommitted}
    duo.transfer()
    duo.verify()
    assert duo.committed == {"r"}
    for _ in range(3):
        duo.tick(1.0)
    assert duo.source.manager.ledger.records[KEY].machine.state is SourceState.READY, "it says KVReady again and again"
    duo.lost = set()
    for _ in range(3):
        duo.turn(3.0)
    assert duo.ends["source", "r"] == duo.ends["sink", "r"] == 1
    assert duo.source.manager.counters.handoffs_completed == 1
    duo.check_whole()


def test_digests_of_one_grant_are_no_others() -> None:
    """Not of an earlier attempt's, nor of a request whose name runs into the number behind it."""
    whose = [("r", 0, 1), ("r", 1, 1), ("r", 0, 2), ("s", 0, 1), ("r\0", 0, 1), ("", 0, 1), ("r", 1, 0)]
    assert len({digest_key(AttemptKey(*each[:2]), each[2]) for each in whose}) == len(whose)
    assert all(0 <= digest_key(AttemptKey(*each[:2]), each[2]) < 1 << 64 for each in whose)
