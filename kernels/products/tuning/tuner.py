"""A tuning run: which plans are measured in the time there is, and which of them the table gets. Pure.

What is not finished when the time is over is left out, and is begun anew by the next run: no table holds half a choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from tandem.kernels.products.matmul_plans import Plan, Table
from tandem.kernels.products.tuning.candidates import Product

WORTH = 0.98  # a plan is taken when it needs less than this share of torch's time; a guess
REUSE = 1.015  # a plan whose kernel is compiled for other sizes anyway may be this much slower than the best; a guess

Times = Mapping["Plan | None", float]  # None: torch's


class Measures(Protocol):
    """Where times come from."""

    def seconds(self, rows: int, product: Product, plan: Plan | None) -> float | None:
        """Seconds of one product by `plan` (None: by torch); None: it fails, is wrong, or finds no memory."""
        ...


@dataclass(frozen=True)
class Tuned:
    """What a run has measured: (rows, product) -> seconds by plan. `left`: what no time was left for."""

    times: dict[tuple[int, Product], Times]
    left: int

    @property
    def table(self) -> Table:
        return picked(self.times)


def tune(
    wanted: Iterable[tuple[int, Product]],
    plans_of: Callable[[int, Product], Iterable[Plan]],
    measures: Measures,
    budget_s: float,
    clock: Callable[[], float],
    on_measured: Callable[[int, Product, Times], object] = lambda *_: None,
) -> Tuned:
    """Measures what is wanted, in order, for `budget_s` seconds and what the last plan takes beyond."""
    ends_at = clock() + budget_s
    found: dict[tuple[int, Product], Times] = {}
    todo = list(wanted)
    for done, (rows, product) in enumerate(todo):
        times = _measured(rows, product, plans_of(rows, product), measures, lambda: clock() >= ends_at)
        if times is None:
            return Tuned(found, len(todo) - done)
        if None in times:
            found[rows, product] = times
            on_measured(rows, product, times)
    return Tuned(found, 0)


def _measured(
    rows: int, product: Product, plans: Iterable[Plan], measures: Measures, is_over: Callable[[], bool]
) -> Times | None:
    """Seconds by plan, nothing where torch's can't be measured; None: the time is over."""
    times: dict[Plan | None, float] = {}
    for plan in _torch_first(plans):
        if is_over():
            return None
        seconds = measures.seconds(rows, product, plan)
        if seconds is not None:
            times[plan] = seconds
        elif plan is None:
            return {}
    return times


def _torch_first(plans: Iterable[Plan]) -> Iterator[Plan | None]:
    yield None
    yield from plans


def picked(measured: Mapping[tuple[int, Product], Times]) -> Table:
    """The fastest plans, where near ones are as good those whose kernels serve other sizes too; what doesn't beat torch
    is None."""
    used: Counter[tuple[int, ...]] = Counter()
    for times in measured.values():
        limit = REUSE * min(times.values())
        used.update({tuple(plan[:5]) for plan, time in times.items() if plan and time <= limit})
    table: dict[tuple[int, int], list[tuple[int, Plan | None]]] = {}
    for (rows, product), times in sorted(measured.items(), key=lambda item: item[0]):
        ours = {plan: time for plan, time in times.items() if plan is not None}
        best = min(ours.values(), default=float("inf"))
        near = [plan for plan, time in ours.items() if time <= REUSE * best and best <= WORTH * times[None]]
        chosen = max(near, key=lambda plan: (used[tuple(plan[:5])], -ours[plan]), default=None)
        table.setdefault(product[:2], []).append((rows, chosen))
    return {sizes: tuple(steps) for sizes, steps in table.items()}
