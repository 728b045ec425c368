"""Steps that a rank has lost, as rank 0 finds them in the pipe."""

from __future__ import annotations

from tandem.node.ranks.lost_steps import LostSteps, write_lost


def test_a_lost_step_is_found_once_by_it_or_by_one_after_it() -> None:
    steps = LostSteps()
    assert not steps.have(0)
    for lost in (1, 1, 3, 5):  # two ranks lost step 1
        write_lost(steps.write_fd, lost)
    assert [steps.have(step) for step in range(1, 7)] == [True, False, True, False, True, False]
    write_lost(steps.write_fd, 7)
    assert steps.have(8)
    steps.started()
    assert not steps.have(9), "all ranks are gone"
    steps.close()
