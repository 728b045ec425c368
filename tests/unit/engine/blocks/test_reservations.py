"""Who gives back what to whom, and that nobody is left who can't go on (docs/blocks.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reservation_world import Handoff, Sequence, Setting, explore

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Hold, Kind, Reservations

RUNS = {"stage": "runs", "way": "over"}


def held(pool: BlockPool, kind: Kind, num: int, owner: object = None) -> Hold:
    """Blocks of the pool in a hold of this kind."""
    blocks = pool.allocate(num)
    assert blocks is not None

    def give_back() -> None:
        pool.reservations.end(hold)
        pool.free(blocks, None)

    hold = pool.reservations.add(kind, num, give_back, owner)
    return hold


def test_the_lowest_kind_gives_first_and_of_one_kind_the_newest() -> None:
    pool = BlockPool(8, enable_caching=False)
    kinds = (Kind.OFFER, Kind.HITS, Kind.PULL, Kind.LOAD, Kind.LOAD, Kind.PARKED)
    holds = [held(pool, kind, 1, "somebody") for kind in kinds]
    order = []
    for num in range(3, 8):
        assert pool.reservations.make_room(num, Kind.RUN)
        order.append([holds.index(hold) for hold in holds if hold not in pool.reservations._holds[hold.kind]])
    assert order == [[4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert not pool.reservations.make_room(8, Kind.RUN), "what is parked ends elsewhere"


@pytest.mark.parametrize("asker", [Kind.START, Kind.CLAIM, Kind.RUN])
@pytest.mark.parametrize("holder", [Kind.LOAD, Kind.PULL, Kind.HITS, Kind.OFFER, Kind.PARKED, Kind.CLAIMED])
def test_each_gives_way_to_those_after_it_alone(asker: Kind, holder: Kind) -> None:
    pool = BlockPool(2, enable_caching=False)
    held(pool, holder, 2, "somebody")
    assert pool.reservations.make_room(1, asker) == (holder < asker)


def test_nobody_asks_himself_and_nobody_is_asked_without_need() -> None:
    pool = BlockPool(4, enable_caching=True)
    held(pool, Kind.LOAD, 2, "me")
    assert not pool.reservations.make_room(3, Kind.START, "me")
    assert pool.reservations.make_room(2, Kind.START, "you")
    assert not pool.reservations.make_room(2, Kind.START, "me", hits=[2]), "a free hit is room that is not left"
    assert pool.num_free == 2
    assert pool.reservations.make_room(2, Kind.START, "you", hits=[2])
    assert pool.num_free == 4


def test_those_who_could_do_without_share_half_of_the_pool_or_one_has_more() -> None:
    pool = BlockPool(8, enable_caching=False)
    assert pool.reservations.may_wait_with(7)
    load = held(pool, Kind.LOAD, 3, "a question")
    assert pool.reservations.may_wait_with(1)
    assert not pool.reservations.may_wait_with(2)
    assert pool.reservations.num_spare() == 1
    assert pool.reservations.num_spare("a question") == 4, "what was loaded for an offer lets it have as much"
    pool.reservations.end(load)
    assert pool.reservations.num_spare() == 4


# --- exploring ----------------------------------------------------------------------------------------------

GROWS = Sequence(1, 1, 3, held=1, **RUNS)  # type: ignore[arg-type]
SEEDS = {
    setting.name: setting
    for setting in (
        # The sequence lacks a block, the claim waits for its end; what it lacks are the claim's hits.
        Setting("a claim's hits against a sequence", (3, 4), (replace(GROWS, held=2, most=4), Handoff(3, 3, hits=2))),
        # The claim's hits are what the request lacks, and what is loaded or pulled for that is what the claim lacks.
        Setting(
            "a claim against a load", (3, 4), (Sequence(1, 4, 4, hits=1, more=1, via="load"), Handoff(3, 3, hits=2))
        ),
        Setting(
            "a claim against a pull", (4, 4), (Sequence(1, 4, 4, hits=1, more=1, via="pull"), Handoff(3, 3, hits=2))
        ),
        Setting("two tickets' hits", (6, 4), (Handoff(3, 3, hits=2), Handoff(3, 3, hits=2)), headroom=1),
        Setting("two loads", (2, 4), (*(Sequence(1, need, 4, hits=1, more=1, via="load") for need in (4, 3)), GROWS)),
        Setting("two pulls", (4, 4), (*(Sequence(1, need, 4, hits=1, more=1, via="pull") for need in (4, 3)), GROWS)),
        Setting("the overtaken claim", (4, 5), (Handoff(2, 2), Handoff(4, 4)), most_parked=3, asks_early=True),
        Setting("small ones park before a large one", (4, 5), (Handoff(1, 1), Handoff(2, 2), Handoff(4, 4))),
        # Who waits in line before a granted prompt waits for the parked one, and that for what is granted.
        Setting("a granted prompt behind another", (4, 3), (Sequence(0, 4, 4), *(Handoff(2, 2),) * 2), most_parked=2),
    )
}
EVERYBODY = Setting(
    "everybody",
    (4, 4),
    (
        Handoff(2, 3, hits=1),
        Handoff(3, 3),
        Sequence(1, 3, 3, hits=1, more=1, via="load"),
        Sequence(0, 3, 3, hits=1, more=1, via="pull"),
    ),
    most_parked=2,
)


MORE = replace(EVERYBODY, name="everybody, and one that grows", actors=(GROWS, *EVERYBODY.actors))


@pytest.mark.parametrize(
    "setting", [*SEEDS.values(), EVERYBODY, pytest.param(MORE, marks=pytest.mark.slow)], ids=lambda each: each.name
)
def test_somebody_can_always_go_on(setting: Setting) -> None:
    assert explore(setting) > 10


class DeafReservations(Reservations):
    """One who asks does not ask one kind."""

    asker, holder = Kind.RUN, Kind.HITS

    def make_room(self, num, kind, owner=None, hits=()):
        holds = self._holds[self.holder]
        if kind is self.asker:
            self._holds[self.holder] = {}
        has_room = super().make_room(num, kind, owner, hits)
        self._holds[self.holder] = holds
        return has_room


class ClaimsAnything(Reservations):
    def may_claim(self, num):
        return True


class ParksAnything(Reservations):
    def may_park(self, claimed, most):
        return True


def deaf(asker: Kind, holder: Kind) -> type[Reservations]:
    return type("Deaf", (DeafReservations,), {"asker": asker, "holder": holder})


# What is broken on purpose, and the setting that shows it.
MUTATIONS = [
    ({"reservations": deaf(Kind.RUN, Kind.HITS)}, "a claim's hits against a sequence"),
    ({"reservations": deaf(Kind.RUN, Kind.LOAD)}, "two loads"),
    ({"reservations": deaf(Kind.RUN, Kind.PULL)}, "two pulls"),
    ({"reservations": deaf(Kind.CLAIM, Kind.HITS)}, "two tickets' hits"),
    ({"reservations": deaf(Kind.CLAIM, Kind.LOAD)}, "a claim against a load"),
    ({"reservations": deaf(Kind.CLAIM, Kind.PULL)}, "a claim against a pull"),
    ({"reservations": deaf(Kind.START, Kind.LOAD)}, "two loads"),
    ({"reservations": deaf(Kind.START, Kind.PULL)}, "two pulls"),
    ({"reservations": ClaimsAnything}, "the overtaken claim"),
    ({"reservations": ParksAnything}, "small ones park before a large one"),
    ({"flaws": frozenset({"granted_wait_in_line"})}, "a granted prompt behind another"),
]


@pytest.mark.parametrize(("broken", "name"), MUTATIONS, ids=lambda each: each if isinstance(each, str) else "")
def test_the_explorer_finds_what_is_broken(broken: dict, name: str) -> None:
    with pytest.raises(AssertionError, match="nobody can go on"):
        explore(replace(SEEDS[name], **broken))
