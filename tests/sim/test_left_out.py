"""A member that a world left out, since it was out of reach, holds what the next world needs: each rule about it is broken in turn."""

from __future__ import annotations

import pytest

from elastic.sim import Violation, simulate
from tests.sim.mutants import Edit, Mutant
from tests.sim.scenarios import left_out


def test_not_hearing_whom_the_last_generation_left_out_is_noticed() -> None:
    edit = Edit("admission", "isinstance(event, Fenced) and _left_out(run, event, now)", "False")
    deaf = Mutant("closed", (edit,)).advance()
    with pytest.raises(Violation, match="given up for step 0 of generation 0 although every slice of it is held"):
        simulate(9, left_out(9), deaf)
    assert simulate(9, left_out(9)).end


def test_not_fencing_whom_a_later_generation_left_out_is_noticed() -> None:
    """A member was expelled before the fence reached it, lives on, and is heard after a member of the later generation."""
    edit = Edit("takeover", "        elif event.worker not in run.state.plan.ranks:", "        elif False:")
    with pytest.raises(Violation, match="given up for step 0 of generation 0 although every slice of it is held"):
        simulate(161, left_out(161), Mutant("trusting", (edit,)).advance())
    assert simulate(161, left_out(161)).end


def test_not_asking_again_who_was_out_of_reach_at_the_takeover_is_noticed() -> None:
    """The fence of the coordinator that took over did not reach the member, which attaches before the later generation is known."""
    edit = Edit("takeover", "event.worker in run.state.pending", "False")
    with pytest.raises(Violation, match="step 9 of generation 3 is given up for step 0 of generation 0 although every slice of it is held"):
        simulate(143, left_out(143), Mutant("unasked", (edit,)).advance())
    assert simulate(143, left_out(143)).end
