"""The outcome of a broken step: applied by all members or by none.

The all-gather of commit records may have completed on any subset of the members when a world breaks.  Whoever saw it complete is
evidence that the step is committed.  Then every member whose gradients are complete applies it, with that same record, and all
hold the same version.  Without evidence all drop it, and the next world computes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.control.run import Answer
from elastic.ids import Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.plan import Plan


@dataclass(frozen=True)
class Settlement:
    """What the members are told, and what each then holds."""

    outcome: Outcome | None
    """The step to apply where it is prepared; None drops it."""
    applied_by: tuple[WorkerId, ...]
    holdings: dict[WorkerId, tuple[Holding, ...]]


def newest(evidence: Iterable[Outcome | None], generation: int) -> Outcome | None:
    """Returns the latest commit of ``generation`` that anybody has seen."""
    return max((each for each in evidence if each and each.generation == generation), key=lambda each: each.step, default=None)


def settle(plan: Plan, answers: Iterable[Answer], top: Outcome | None) -> Settlement:
    """Decides from the answers who applies ``top``, the newest commit that anybody has seen, the dead included."""
    applied, holdings = [], {}
    ranks = {member: rank for rank, member in enumerate(plan.members)}
    for answer in answers:
        holding = _applies(plan, ranks[answer.worker], answer, top)
        if holding is not None:
            applied.append(answer.worker)
        holdings[answer.worker] = (holding,) if holding is not None else answer.held
    return Settlement(top if applied else None, tuple(applied), holdings)


def _applies(plan: Plan, world_rank: int, answer: Answer, top: Outcome | None) -> Holding | None:
    """Returns what the member holds once it has applied ``top``; None when it cannot, or has already."""
    if top is None or answer.prepared != top.step:
        return None
    cell = cell_of(plan.layout, world_rank)
    before = [each for each in answer.held if each.cell == cell and each.version.step == top.step - 1]
    return Holding(answer.worker, Version(top.step, top.generation), cell) if before else None
