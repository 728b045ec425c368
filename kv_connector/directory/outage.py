"""How often the log hears of a Redis that is away."""

from __future__ import annotations

REPEAT_S = 30.0  # a guess: between two lines about the same outage


class Outage:
    """An error is said when it is new and then every `REPEAT_S`, so that who looks at the log late finds it, too."""

    def __init__(self) -> None:
        self._said, self._next = "", 0.0

    def is_to_be_said(self, text: str, now: float) -> bool:
        if text == self._said and now < self._next:
            return False
        self._said, self._next = text, now + REPEAT_S
        return True

    def over(self) -> None:
        self._said = ""
