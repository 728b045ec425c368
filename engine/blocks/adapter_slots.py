"""Which adapter lies in which slot of the device, and which must be brought there. Pure.

A slot that a running sequence uses is never taken; of the others the one unused for longest is.
"""

from __future__ import annotations

from collections import OrderedDict

from tandem.engine.contracts.wire.parts import AdapterRef


class AdapterSlots:
    """Slots are counted from 1; slot 0 stands for the model alone."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots, 0, -1))
        self._slot_of: dict[bytes, int] = {}
        self._users: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()  # the one unused for longest first
        self._to_load: dict[int, AdapterRef] = {}
        self.num_loads = 0

    def may_take(self, ref: AdapterRef | None) -> bool:
        return ref is None or ref.digest in self._slot_of or bool(self._free or self._unused)

    def take(self, ref: AdapterRef | None) -> int:
        """The slot for one more sequence with this adapter; 0 for None. The caller has asked `may_take`."""
        if ref is None:
            return 0
        digest = ref.digest
        if digest not in self._slot_of:
            if not self._free:
                oldest, _ = self._unused.popitem(last=False)
                self._free.append(self._slot_of.pop(oldest))
            slot = self._slot_of[digest] = self._free.pop()
            self._to_load[slot] = ref
            self.num_loads += 1
        self._unused.pop(digest, None)
        self._users[digest] = self._users.get(digest, 0) + 1
        return self._slot_of[digest]

    def release(self, ref: AdapterRef | None) -> None:
        """Ends one use. An adapter that nobody uses stays, unless it hasn't been brought yet."""
        if ref is None:
            return
        digest = ref.digest
        self._users[digest] -= 1
        if self._users[digest]:
            return
        del self._users[digest]
        slot = self._slot_of[digest]
        if slot in self._to_load:
            del self._to_load[slot], self._slot_of[digest]
            self._free.append(slot)
        else:
            self._unused[digest] = None

    def take_loads(self) -> tuple[tuple[int, AdapterRef], ...]:
        """(slot, adapter) of what the next step must bring to the device before it computes."""
        loads, self._to_load = tuple(self._to_load.items()), {}
        return loads

    def counters(self) -> dict[str, float]:
        return {"adapter_slots_used": float(len(self._users)), "adapter_slot_loads": float(self.num_loads)}

    def check_integrity(self, refs: list[AdapterRef | None]) -> None:
        """Raises AssertionError when an invariant does not hold. `refs`: the adapters of all running sequences."""
        used: dict[bytes, int] = {}
        for ref in refs:
            if ref is not None:
                used[ref.digest] = used.get(ref.digest, 0) + 1
        assert used == self._users, "uses of adapters are miscounted"
        assert sorted([*self._free, *self._slot_of.values()]) == list(range(1, self.num_slots + 1)), "a slot is lost"
        assert set(self._slot_of) == {*self._users, *self._unused}, "an adapter is neither used nor unused"
        assert all(self._slot_of[ref.digest] == slot for slot, ref in self._to_load.items())
