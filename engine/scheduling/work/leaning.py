"""Which work a node that does all is for first, as it knows itself. Pure; docs/elastic.md."""

from __future__ import annotations

from tandem.engine.contracts.wire.work import Leaning, LeaningName

# A node that has just leaned the other way stays so: several routers may ask for the same, one of them late.
LEAST_S = 2.0  # a guess


class OwnLeaning:
    """The leaning of this node. Routers change it: an operator at any time, demand on a node that began with a leaning
    and isn't pinned."""

    def __init__(self, role: LeaningName = "unified", now: float = 0.0) -> None:
        self._began_with = role
        self._is = Leaning(role, why="" if role == "unified" else "its start")
        self._since = now
        self._not_before = now
        self.num_changes = 0

    def ask(self, asked: Leaning, now: float) -> None:
        if not asked.is_pinned and asked.role == "unified":  # an operator leaves it to demand again
            role = "unified" if self._began_with == "unified" else self._is.role
            self._become(Leaning(role, why=asked.why), now)
        elif asked.is_pinned:
            self._become(asked, now)
        elif not self._is.is_pinned and self._is.role not in ("unified", asked.role) and now >= self._not_before:
            self._become(asked, now)
            self._not_before = now + LEAST_S

    def told(self, now: float) -> Leaning:
        """The leaning, as a status tells it."""
        return Leaning(self._is.role, self._is.is_pinned, self._is.why, max(0.0, now - self._since))

    def counters(self) -> dict[str, float]:
        shown = {f"leans_{role}": float(self._is.role == role) for role in ("prefill", "decode")}
        return {**shown, "leaning_changes": float(self.num_changes)}

    def _become(self, leaning: Leaning, now: float) -> None:
        if leaning.role != self._is.role:
            self.num_changes += 1
            self._since = now
        self._is = leaning
