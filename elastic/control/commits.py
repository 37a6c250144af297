"""Commits: decides which steps count, while a world steps and when it breaks.

A member that has seen a commit is proof of it, whoever else died.  World rank 0 reports each commit, and an
answer to the fence brings the commits that may not have been reported.

The all-gather of commit records may have completed on any subset of the members when a world breaks.  A
member that saw it complete is evidence that the step is committed.  Then every member whose gradients are
complete applies the step, with that same record, and all hold the same version.  Without evidence all members
drop the step, and the next world computes it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elastic.control import copy_inventory, edges, saves
from elastic.control.decision import Decision
from elastic.control.health import watch
from elastic.control.liveness import stepped
from elastic.control.run import Answer, Forming, Running, Stopping
from elastic.control.stragglers import judge as stragglers_after
from elastic.ids import Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.transfer import Holding
from elastic.protocol import lineage
from elastic.protocol.actions import Pause
from elastic.protocol.commit_record import (
    ENDS,
    GO_ON,
    Outcome,
    Score,
    Validated,
    better_of,
    out_of_patience,
    told_of,
)
from elastic.protocol.copy_schedule import due
from elastic.protocol.events import Ends, Evaluated, StepDone
from elastic.protocol.plan import Plan

LEFT, ASKED = "the loop was left", "the loop asked to stop"
"""The reasons recorded for a loop that ends the run without telling one; ``ASKED`` stands until the loop's
own reason comes, which may be lost.
"""

# ---- commits that are told


def step_done(decision: Decision, event: StepDone) -> None:
    committed(decision, event.outcome)
    if event.validated is not None and decision.run.history.contains(version := version_of(event.outcome)):
        _validated(decision, version, event.validated)
    if event.quarantined and decision.run.history.contains(version_of(event.outcome)):
        _complete_the_quarantine(decision, event)
    state = decision.run.state
    if isinstance(state, Stopping) and state.planned and event.outcome.boundary == GO_ON:
        # the first request was too late for this commit, or lost
        decision.do(Pause(state.plan.generation, state.plan.members, state.save, state.hand_over))


def _complete_the_quarantine(decision: Decision, event: StepDone) -> None:
    """Takes note of the samples in quarantine of which only an earlier coordinator, or an earlier run, was
    told.
    """
    skips = decision.run.skips.completed(event.quarantined, event.quarantined_by)
    if more := len(skips.quarantined) - len(decision.run.skips.quarantined):
        decision.know(skips=skips)
        decision.say(
            f"the state has {more} sample{'s' * (more > 1)} in quarantine that the journal had not recorded"
        )


def all_committed(decision: Decision, outcomes: Iterable[Outcome]) -> None:
    """Takes note of the commits that a fenced member remembers, oldest first."""
    for outcome in sorted(outcomes, key=lambda each: each.step):
        committed(decision, outcome)


def committed(decision: Decision, outcome: Outcome) -> None:
    """Takes note of one commit; one of another generation, or one that was told before, changes nothing."""
    run, history, plan = decision.run, decision.run.history, decision.plan
    if outcome.generation != plan.generation:
        return
    if outcome.step in history.untold:
        _watch(decision, outcome)
        return decision.know("history", untold=tuple(step for step in history.untold if step != outcome.step))
    if not history.is_news(outcome):
        return
    _watch(decision, outcome)
    _note_the_late(decision, outcome)
    version = version_of(outcome)
    if outcome.validated is not None and history.version.step == outcome.step - 1:
        _validated(decision, history.version, outcome.validated)
    history = decision.run.history
    decision.know(
        "history",
        lineage=lineage.extended(history.lineage, version),
        last=outcome,
        untold=(*history.untold, *range(history.version.step + 1, outcome.step)),
        failures=tuple(failure for failure in history.failures if failure.step > outcome.step),
    )
    whole = isinstance(run.state, Running) or (isinstance(run.state, Stopping) and run.state.planned)
    validated, own_s = outcome.validated is not None, outcome.usage.step_s
    decision.know(watch=stepped(run.watch, decision.now, whole=whole, validated=validated, own_s=own_s))
    copy_inventory.committed(decision, outcome, run)
    if version.step > history.furthest.step:
        decision.know("history", furthest=version, fruitless=0)
    if outcome.boundary == ENDS:
        _know_the_end(decision, outcome.step, asked=True)
    if outcome.saves:
        saves.begin(decision, outcome)
    elif outcome.behind and due(outcome.step, decision.rules.save_every, decision.rules.target_step):
        decision.say(
            "a save is due, but the save before it is not in the bucket yet, or a worker's newest "
            "copy is not complete: training goes on, and the save follows as soon as possible"
        )
        saves.tell(decision)  # in case a member waits for a save that nobody knows of any more


def ends(decision: Decision, event: Ends) -> None:
    """Takes note that the loop of a member has ended the run at a step, or asks for it.

    Whoever left a step behind takes part in no later commit, so the step is the last one for all, also in a
    later world.
    """
    if event.why and not decision.run.asked:
        decision.know(asked=event.why, why=event.why if decision.run.why == ASKED else decision.run.why)
        decision.say(f"the loop of {event.worker} ends the run: {event.why}")
    if event.step:
        if not event.patience:
            _know_the_end(decision, event.step, asked=event.asked)
        decision.know(left=tuple(dict.fromkeys((*(decision.run.left or ()), event.worker))))
        if isinstance(decision.run.state, Forming):
            edges.stop(
                decision, f"the loop of {event.worker} had passed step {event.step} when its world broke"
            )


def _know_the_end(decision: Decision, step: int, *, asked: bool) -> None:
    """Takes note, durably, that the loop has made ``step`` the last one: the commit of the step says so
    (``asked``), or the loop was left.

    A loop's request counts only once a commit has it: a world may break before that commit, and then the next
    world goes on.
    """
    if decision.run.enough != step or (asked and decision.run.why == LEFT):
        decision.know(enough=step, why=(decision.run.asked or ASKED) if asked else LEFT)
        decision.durable = True
        decision.say(f"step {step} is the last: {decision.run.why}")


def evaluated(decision: Decision, event: Evaluated) -> None:
    """Takes note of a validation that no member has made."""
    if not decision.run.history.contains(event.version):
        return decision.refuse(f"{event.version}, which was validated, was given up")
    known = decision.run.history.validated
    _validated(decision, event.version, event.found)
    if known is not None and known.version > event.version and decision.run.history.contains(known.version):
        decision.know("history", validated=known)  # the members have validated a later state meanwhile


def version_of(outcome: Outcome) -> Version:
    return Version(outcome.step, outcome.generation)


def _validated(decision: Decision, version: Version, found: Validated) -> None:
    """Takes note of a validation, and says whether it is the best so far; abandoned versions are not
    compared.
    """
    history, score = decision.run.history, Score(version, found, decision.run.members.reference.held_out)
    known = history.best
    best = better_of(
        known
        if known is not None and history.contains(known.version) and known.held_out == score.held_out
        else None,
        score,
    )
    decision.know("history", validated=score, best=best)
    if decision.rules.patience:
        mark = decision.run.mark or known
        on_line = mark is not None and history.contains(mark.version) and mark.held_out == score.held_out
        mark = better_of(mark if on_line else None, score, decision.rules.min_delta)
        later = {
            each
            for each in (*(decision.run.worse or ()), version)
            if each > mark.version and history.contains(each)
        }
        decision.know(mark=mark, worse=tuple(sorted(later)) or None)
    against = "" if best is score else f"; the best is {best.found.mean:.6g} after step {best.version.step}"
    decision.say(f"{told_of(version.step, found)}{against}")
    _count_the_worse(decision, version.step)


def _count_the_worse(decision: Decision, step: int) -> None:
    """Takes note that the validation after ``step`` was the last one for which the run has patience."""
    mark, rules = decision.run.mark, decision.rules
    if decision.run.enough or mark is None or not 0 < rules.patience <= len(decision.run.worse or ()):
        return
    decision.know(enough=step)
    decision.say(out_of_patience(rules.patience, rules.min_delta, mark.version.step, step))


def _watch(decision: Decision, outcome: Outcome) -> None:
    """Takes note of what the commit tells of layers, and of a step that was skipped, and says the warnings
    that follow from it.
    """
    rules = decision.rules
    known, ends = (decision.run.skips, decision.run.health), outcome.step >= rules.target_step
    skips, health, sentences = watch(*known, outcome, rules.watch, ends=ends)
    if skips is not decision.run.skips:
        decision.know(
            skips=skips, stop=decision.run.stop or (skips.failed and ("too many steps in a row were skipped"))
        )
    if health is not decision.run.health:
        decision.know(health=health)
    for each in sentences:
        decision.say(each)


def _note_the_late(decision: Decision, outcome: Outcome) -> None:
    """Takes note of the members that held up the others, and says which are stragglers."""
    known = decision.run.stragglers
    stragglers, sentences = stragglers_after(known, decision.plan, outcome)
    if stragglers is not known:
        decision.know(stragglers=stragglers)
    for each in sentences:
        decision.say(each)


# ---- the step in which a world broke: all members apply it, or none does


@dataclass(frozen=True)
class Settlement:
    """The settlement of a broken step: the outcome that the members are told, and the state that each then
    holds.
    """

    outcome: Outcome | None
    """The step to apply where it is prepared; None drops it."""
    applied_by: tuple[WorkerId, ...]
    holdings: dict[WorkerId, tuple[Holding, ...]]


def newest(evidence: Iterable[Outcome | None], generation: int) -> Outcome | None:
    """Returns the latest commit of ``generation`` that anybody has seen."""
    return max(
        (each for each in evidence if each and each.generation == generation),
        key=lambda each: each.step,
        default=None,
    )


def settle(plan: Plan, answers: Iterable[Answer], top: Outcome | None) -> Settlement:
    """Decides from the answers who applies ``top``, the newest commit that anybody has seen, the dead
    included.
    """
    applied, holdings = [], {}
    for answer in answers:
        holding = _applies(plan, plan.ranks[answer.worker], answer, top)
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
