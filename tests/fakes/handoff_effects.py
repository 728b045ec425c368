"""What a hand-off manager decided, one kind at a time; the rest stays in its list."""

from __future__ import annotations

from typing import Any

from tandem.engine.contracts.wire.parts import Message
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.manager import SourceManager


def take(manager: SinkManager | SourceManager, kind: Any) -> list[Any]:
    """`kind`: a class or a union of classes."""
    effects: list[Any] = manager.effects
    taken = [effect for effect in effects if isinstance(effect, kind)]
    effects[:] = [effect for effect in effects if not isinstance(effect, kind)]
    return taken


def take_messages(manager: SinkManager | SourceManager) -> list[tuple[str, Message]]:
    """(to, message)"""
    return [(effect.to, effect.message) for effect in take(manager, Send)]
