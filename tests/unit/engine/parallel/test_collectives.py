"""What ranks owe each other in a step, without ranks."""

from __future__ import annotations

from tandem.engine.parallel.collectives import Collective, holds_rank_0_up, of_layers, of_sampling


def test_all_norms_but_the_first_take_in_a_sum_the_last_two_of_wanted_tokens() -> None:
    assert [count for _, count in of_layers(3, 40, 2)] == [40, 40, 40, 40, 2, 2]
    assert [count for _, count in of_layers(1, 40, 2)] == [2, 2]
    assert [count for _, count in of_layers(2, 40, None)] == [40, 40, 40, 40]


def test_rank_0_waits_for_what_it_needs_of_others_and_for_nothing_else() -> None:
    drawn, greedy, sums = of_sampling(3, False), of_sampling(3, True), of_layers(2, 40, 0)
    assert of_sampling(0, True) == []
    assert holds_rank_0_up(drawn)
    assert holds_rank_0_up(greedy)
    assert holds_rank_0_up(sums)
    assert not holds_rank_0_up(drawn[1:]), "its own tokens"
    assert not holds_rank_0_up(sums[2:]), "of no rows"
    assert not holds_rank_0_up([])
    assert drawn[0] == Collective("gather", 3)
