"""Objects that decide without I/O, explored cheaply. What they are made of stays; what changes in it is kept as bytes
for each state, and a state is known by its content. What an event makes of a state is computed once, however many
states of the world it occurs in."""

from __future__ import annotations

import copyreg
import enum
import io
import itertools
import pickle
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Protocol

import msgspec
import numpy as np

from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.scheduling.request import Prompt
from tandem.kv_connector.protocol.outcomes import RECOMPUTING

NOW = 1000.0  # of everything that happens: clocks run out when the explorer says so
# What decides nothing: counts, and moments of which only the log tells. Steps complete at once, so their numbers, too.
IGNORED = frozenset(
    {"arrival", "closed_at", "entered_at", "error", "expected_at", "last_step", "num_accepted", "num_dropped",
     "num_dropped_deltas", "num_drops_counted", "num_ended", "num_served_blocks", "num_under_way",
     "quarantined_at", "resend_every_s", "retire_asked_at", "slot", "waits_since", "was_warned", "_arrivals",
     "_block_of", "_blocks", "_cooling", "_deadlines", "_generations", "_hash_of", "_last_write_step", "_needed_by",
     "_newest_completed", "_newest_launched", "_of", "_owner_of", "_ref_counts", "_step_id"}
)  # fmt: skip
COUNTS = frozenset({"counters", "rates"})  # not even kept
# Blocks are alike: how many somebody has tells all, and `Life.blocks` the rest.
BLOCK_IDS = frozenset({"block_ids", "granted", "hits", "held"})
UNORDERED = frozenset(
    {"_answered", "_attempts", "_departures", "_tombstones", "_used", "entries", "live", "records", "running",
     "waiting"}
)  # fmt: skip
ARMED = frozenset({"resend_at"})  # of a clock it matters whether it runs, not until when
_CONSTANT_MODULES = ("tandem.engine.contracts.config", "tandem.engine.contracts.security", "tests.worlds.setting")
_CONSTANT_KINDS = (
    msgspec.Struct,
    BlockWindow,
    Prompt,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    type,
)
_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
_SEQUENCES = frozenset({list, deque})
_SETS = frozenset({set, frozenset})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_TUPLES = frozenset({tuple, AttemptKey, NodeKey})
_EMPTIABLE = _SEQUENCES | _SETS | _MAPPINGS | _TUPLES
_CONTAINERS = _EMPTIABLE | {np.ndarray, itertools.count}
copyreg.pickle(itertools.count, lambda count: (itertools.count, (int(repr(count)[6:-1]),)))


class Life(Protocol):
    """What is explored. Its parts refer to each other for good; `constants` are shared by all its states besides."""

    constants: list[Any]

    def do(self, event: tuple) -> list[Any]:
        """Effects, in order; AssertionError when a promise is broken."""

    def look(self) -> Any:
        """What the world has to know of this state."""

    def blocks(self) -> Hashable:
        """Its blocks, whatever their numbers."""

    def settled(self, part: Any) -> frozenset[str]:
        """Attributes of `part` that decide nothing any more."""


class Lives:
    """States by number. `translate` makes of a life and its effect what the world takes; None: nothing."""

    def __init__(self, translate: Callable[[Any, Any], Any]) -> None:
        self._translate = translate
        self._numbers: dict[Hashable, int] = {}
        self._states: list[tuple[_Mould, bytes]] = []
        self._after: dict[tuple[int, tuple], tuple[int, tuple]] = {}
        self.looks: list[Any] = []

    def born(self, life: Life) -> int:
        """The state of one that nothing has happened to."""
        return self._add(_Mould(life, len(self._states)))

    def after(self, number: int, event: tuple) -> tuple[int, tuple]:
        """The state after `event`, and its effects."""
        known = self._after.get((number, event))
        if known is None:
            mould, data = self._states[number]
            mould.put(data)
            made = [self._translate(mould.life, effect) for effect in mould.life.do(event)]
            known = self._after[number, event] = (self._add(mould), tuple([each for each in made if each is not None]))
        return known

    def _add(self, mould: _Mould) -> int:
        key = mould.content()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._states)
            self._states.append((mould, mould.take()))
            self.looks.append(mould.life.look())
        return number

    def __len__(self) -> int:
        return len(self._states)


class _Mould:
    """One life's parts, and what of them changes."""

    def __init__(self, life: Life, name: int) -> None:
        self.life, self._name = life, name
        self._constants: dict[int, int] = {}
        self._kept: list[Any] = []  # constants and parts by number
        self._numbers: dict[Any, int] = {}  # of equal ones
        for constant in life.constants:
            self._number(constant, None)
        self._fields: list[tuple[Any, str]] = []
        self._find_parts(life)
        self._decides = [name not in IGNORED for _, name in self._fields]
        # Own classes, since Python 3.13 lets nobody set these on an instance.
        writer = {"persistent_id": staticmethod(self._persistent)}
        reader = {"persistent_load": staticmethod(self._kept.__getitem__)}
        self._pickler: type[pickle.Pickler] = type("_Pickler", (pickle.Pickler,), writer)
        self._unpickler: type[pickle.Unpickler] = type("_Unpickler", (pickle.Unpickler,), reader)

    def _find_parts(self, part: Any) -> None:
        self._number(part, None)
        for name in _names_of(part):
            value = getattr(part, name)
            if id(value) in self._constants or _is_constant(value) or name in COUNTS:
                continue
            if type(value) in _PLAIN or type(value) in _CONTAINERS or isinstance(value, enum.Enum):
                self._fields.append((part, name))
            else:
                self._find_parts(value)

    def _number(self, value: Any, key: Any) -> int:
        """Of something that does not change; equal ones, if they can be compared (`key`), have one."""
        number = self._constants.get(id(value))
        if number is None:
            number = len(self._kept) if key is None else self._numbers.setdefault(key, len(self._kept))
            self._kept.append(value)
            self._constants[id(value)] = number
        return number

    def take(self) -> bytes:
        buffer = io.BytesIO()
        self._pickler(buffer, protocol=5).dump([getattr(part, name) for part, name in self._fields])
        return buffer.getvalue()

    def put(self, data: bytes) -> None:
        values = self._unpickler(io.BytesIO(data)).load()
        for (part, name), value in zip(self._fields, values, strict=True):
            setattr(part, name, value)

    def _persistent(self, value: Any) -> int | None:
        if type(value) in _PLAIN:
            return None  # most of all values
        number = self._constants.get(id(value))
        if number is None and _is_constant(value):
            return self._number(value, _key_of(value))
        return number

    def content(self) -> Hashable:
        """Equal for states that can't be told apart. An object met again is known by its key, or when it was met."""
        met: dict[int, Hashable] = {}
        fields = zip(self._fields, self._decides, strict=True)
        return (
            self._name,
            self.life.blocks(),
            *[self._of_field(part, name, met) for (part, name), yes in fields if yes],
        )

    def _of_field(self, part: Any, name: str, met: dict[int, Hashable]) -> Hashable:
        value = getattr(part, name)
        if name in BLOCK_IDS:
            return len(value)
        if name in ARMED:
            return "off" if not value else "due" if value <= NOW else "armed"
        if name == "reason":
            return plain_reason(value)
        if name in UNORDERED:
            value = tuple(sorted(value.items() if isinstance(value, dict) else value, key=_name_of))  # in no order
        return self._content_of(value, met)

    def _content_of(self, value: Any, met: dict[int, Hashable]) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind in _EMPTIABLE and not value:
            return ()
        of = self._content_of
        if kind in _TUPLES:
            return tuple([of(each, met) for each in value])
        if id(value) in met:
            return ("again", met[id(value)])
        if kind is KVGrant:
            return ("grant", value.grant_id, value.first_block)
        number = self._persistent(value)
        if number is not None:
            return ("kept", number)
        sample = getattr(value, "sample_indices", ())
        met[id(value)] = (kind.__name__, value.key, sample) if hasattr(value, "key") else len(met)
        if kind in _SEQUENCES:
            return tuple([of(each, met) for each in value])
        if kind in _MAPPINGS:
            return tuple([(of(key, met), of(each, met)) for key, each in value.items()])
        if kind in _SETS:
            return frozenset([of(each, met) for each in value])
        return self._content_of_object(kind, value, met)

    def _content_of_object(self, kind: type, value: Any, met: dict[int, Hashable]) -> Hashable:
        if isinstance(value, enum.Enum):
            return value._name_
        if kind is np.ndarray:
            return value.tobytes()
        if kind is itertools.count:
            return repr(value)
        names = _deciding.get(kind)
        if names is None:
            names = _deciding[kind] = tuple(name for name in _names_of(value) if name not in IGNORED)
        settled = self.life.settled(value)
        if settled:
            names = tuple(name for name in names if name not in settled)
        return tuple([self._of_field(value, name, met) for name in names]) or kind.__name__


def _name_of(value: Any) -> str:
    return repr(value[0] if type(value) is tuple else getattr(value, "key", value))


def plain_reason(reason: str) -> str:
    """Texts are for people, but for this one."""
    return reason if reason == RECOMPUTING else "some" if reason else ""


def _is_constant(value: Any) -> bool:
    kind = type(value)
    known = _constant.get(kind)
    if known is None:
        known = _constant[kind] = issubclass(kind, _CONSTANT_KINDS) or kind.__module__ in _CONSTANT_MODULES
    return known


def _key_of(value: Any) -> Any:
    if isinstance(value, Prompt):
        value = replace(value, arrival=0)  # is a count of its node
    return (type(value), repr(value)) if isinstance(value, msgspec.Struct | Prompt) else None


_constant: dict[type, bool] = {}
_names: dict[type, tuple[str, ...]] = {}
_deciding: dict[type, tuple[str, ...]] = {}


def _names_of(value: Any) -> tuple[str, ...]:
    kind = type(value)
    names = _names.get(kind)
    if names is None:
        slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
        names = _names[kind] = tuple(sorted({*slots, *getattr(value, "__dict__", ())}))
    return names
