"""The states of a run, the edges between them, and every entry into a state.

    Waiting ──► Forming ──► Running ──► Finishing ──► Finished
       ▲           │           │            │
       │           ▼           ▼            ▼
       └─────── Stopping ◄─────┴────────────┘ ──► Stopped, Failed

Failure, growth and a user's stop are edges of this one table, so all transitions can be seen here.  The file
of a state says what a run does *in* that state.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.control import admission, ahead, copy_inventory, growth, membership, saves
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import averaged, begun
from elastic.control.rules import Rules
from elastic.control.run import (
    NEVER,
    Failed,
    Finished,
    Finishing,
    Forming,
    Running,
    RunState,
    Saves,
    State,
    Stopped,
    Stopping,
    Waiting,
)
from elastic.control.seating import candidates, layout_of, least_shard, make_plan
from elastic.ids import WorkerId
from elastic.plan.wager import WAIT
from elastic.protocol import lineage
from elastic.protocol.actions import Exit, Fence, Form, Go, Kill, Pause
from elastic.protocol.plan import Plan

ALLOWED: dict[type[State], frozenset[type[State]]] = {
    # Stopping: a world was found that the journal does not mention
    Waiting: frozenset({Forming, Stopped, Failed, Finished, Stopping}),
    # Finishing: the world begins at the target step; only its checkpoint is missing
    Forming: frozenset({Running, Stopping, Finishing}),
    Running: frozenset({Stopping, Finishing}),
    # Finishing: the target step came before the boundary
    Stopping: frozenset({Forming, Waiting, Stopped, Failed, Finishing, Finished}),
    Finishing: frozenset({Stopping, Finished}),
    Finished: frozenset(),
    Stopped: frozenset(),
    Failed: frozenset(),
}
"""Maps each state to the states that may follow it directly."""


def enter(decision: Decision, state: State) -> None:
    """Moves along an edge of the table.  No other function changes the state of a run, except that
    ``stop_unread`` replaces one stop by another.
    """
    before = type(decision.run.state)
    assert type(state) in ALLOWED[before], f"no edge from {before.__name__} to {type(state).__name__}"
    decision.know(state=state)


# ---- Forming, or Waiting


def form(decision: Decision) -> None:
    """Begins the next generation with the present workers, or waits if they are too few."""
    run, plan = decision.run, make_plan(decision.run, decision.rules)
    why = missing(decision, plan)
    if plan is None or why:
        return _wait(decision, why)
    if isinstance(run.state, Stopping) and plan.tier == "live" and run.state.ahead is None and not run.stop:
        choice = growth.at_the_end(run, decision.rules, plan.members, decision.now)
        if choice is not None and choice.what == WAIT:
            enter(decision, Waiting(decision.now, decision.now + choice.wait_s))
            return decision.say(
                f"wait up to {choice.wait_s:.1f} s for {names(tuple(run.members.starting))}: {choice.why}"
            )
    plan = ahead.taken_up(run.state, plan, run)
    given_up = lineage.abandoned(run.history.lineage, plan.version)
    _take_up(decision, plan)
    if run.saves.pending:
        saves.tell(decision)
    enter(decision, Forming(plan, decision.now + decision.rules.form_s, since=decision.now))
    decision.do(Form(plan))
    decision.say(_announcement(plan, run.generation, given_up))
    kinds = sorted({decision.run.workers[member].kind for member in plan.members})
    if len(kinds) > 1:
        decision.know("members", mixed=(*run.members.mixed, plan.generation))
        several = f"generation {plan.generation} has members of several kinds ({' and '.join(kinds)})"
        decision.say(f"{several}: its steps are marked as mixed, since their bits cannot be reproduced")
    admission.refuse_other_kinds(decision)


def missing(decision: Decision, plan: Plan | None) -> str:
    """Returns what is missing before ``plan``, the best plan at present, can be formed; "" if nothing is."""
    if plan is None:
        return _shortage(decision)
    if keepers := copy_inventory.awaited(decision, plan):
        silent = (
            f"{len(keepers)} of {count(len(decision.run.cluster.keepers), 'keeper')} have not reported "
            "their copies yet"
        )
        return f"{silent}, which may be newer than step {plan.version.step}"
    return ""


def _wait(decision: Decision, why: str) -> None:
    if not isinstance(decision.run.state, Waiting):
        enter(decision, Waiting(decision.now))
        decision.say(f"wait: {why}")


def _take_up(decision: Decision, plan: Plan) -> None:
    """Continues the history from the plan's version, and gives up the steps after it with their saves."""
    run, line = decision.run, decision.run.history.lineage
    # only copies prove this version: it is later than every reported commit
    proven = not lineage.contains(line, plan.version)
    decision.know(
        generation=plan.generation,
        left=None,
        asked="",
        skips=run.skips.cut(plan.version.step),
        saves=Saves(
            tuple(each for each in run.saves.pending if lineage.contains(plan.lineage, each.version))
        ),
    )
    decision.know(
        "history",
        lineage=plan.lineage,
        last=None if lineage.abandoned(line, plan.version) else run.history.last,
        untold=(),
        trusted=None,
        fruitless=0 if proven else run.history.fruitless,
    )
    decision.know("members", seats=plan.members, kind=run.members.kind or run.workers[plan.members[0]].kind)
    decision.know("watch", lease_until=0.0)
    decision.know("copies", copied=None, buddied=None, protected=(plan.protected, plan.buddied), unreported=0)


def _announcement(plan: Plan, before: int, given_up: tuple[tuple[int, int, int], ...]) -> str:
    zero = f", zero = {plan.zero}" if plan.zero is not None else ""
    text = (
        f"form generation {plan.generation} of {names(plan.members)} ({plan.layout}{zero}) at step "
        f"{plan.version.step} ({plan.tier})"
    )
    for generation, first, last in given_up:
        text += (
            f", abandons step{f' {first}' if first == last else f's {first}–{last}'} of generation "
            f"{generation}"
        )
    if plan.generation > before + 1:
        text += f"; a coordinator whose journal is lost may have used the numbers after {before}"
    return text


def _shortage(decision: Decision) -> str:
    workers, rule = candidates(decision.run, decision.rules), decision.rules.layout
    low = max(decision.rules.min_workers, rule.group)
    if layout_of(decision.run, workers, decision.rules) is not None:
        return "there is no keeper to host the store of the world"
    there, shards = len(workers), least_shard(decision.run.members, workers)
    if there >= low and shards > rule.min_parts:
        return (
            f"{count(there, 'worker')} cannot share the state: it fits the memory of {shards} or more workers"
        )
    return f"{count(there, 'worker')} {'is' if there == 1 else 'are'} too few for any layout (at least {low})"


# ---- Running, or Finishing


def go(decision: Decision, plan: Plan) -> None:
    """Lets the members step, because all of them have the plan's version.  Their noted holdings are cleared:
    only an answer to a fence tells what a stepping member holds.
    """
    workers = decision.run.workers
    newcomers = any(worker in workers and not workers[worker].holdings for worker in plan.members)
    membership.hold(decision, {worker: () for worker in plan.members})
    # only a forming that reads no bucket, since growth reads none
    if isinstance(decision.run.state, Forming) and plan.tier in ("live", "host"):
        took_s = decision.now - min(
            decision.run.state.since, decision.run.state.deadline - decision.rules.form_s
        )
        watch = decision.run.watch
        if newcomers:
            decision.know("watch", join_s=averaged(watch.join_s, took_s))
        # worlds with newcomers take longer; they are the best guess as long as no other world has formed
        if not newcomers or not watch.reform_s:
            decision.know("watch", reform_s=averaged(watch.reform_s, took_s))
    decision.know(watch=begun(decision.run.watch, decision.now))
    decision.know("watch", lease_until=decision.now + decision.rules.lease_over_s)
    decision.know("cluster", blamed=())
    copy_inventory.pair(decision, plan)
    decision.do(Go(plan.generation, plan.members))
    decision.say(f"generation {plan.generation} runs")
    if plan.version.step >= (plan.ends or decision.rules.target_step):
        saves.begin_again(decision, plan, plan.version)
        finish(decision, plan)
    else:
        enter(decision, Running(plan, decision.now))


def is_done(run: RunState, plan: Plan, rules: Rules) -> bool:
    """Returns whether the world of ``plan`` makes no more steps: its last step is committed, or the loops of
    all members have ended the run.
    """
    return run.step >= (plan.ends or rules.target_step) or (
        run.left is not None and 0 < run.enough <= run.step and {*plan.members} <= {*run.left}
    )


def finish(decision: Decision, plan: Plan) -> None:
    """Enters ``Finishing``: the last step is committed, and only its checkpoint is missing.  If a loop has
    ended the run early and the last step has no save yet, its save begins here.

    If the bucket already refuses an earlier save, the time to wait for it counts from now.
    """
    run = decision.run
    if (
        run.step < decision.rules.target_step
        and run.version not in run.history.saved
        and run.saves.find(run.version) is None
    ):
        saves.begin_again(decision, plan, run.version)
    pending = (
        each if each.refused_at is None else replace(each, refused_at=decision.now)
        for each in decision.run.saves.pending
    )
    decision.know(saves=Saves(tuple(pending)))
    enter(decision, Finishing(plan, decision.now + decision.rules.stop_s))
    decision.say(f"step {decision.run.step} is the last: its checkpoint is on the way")


# ---- Stopping


def pause(decision: Decision, cause: str, *, save: bool, hand_over: bool = False) -> None:
    """Stops as planned: the members agree in a commit on the boundary to stop at, and nothing is lost."""
    plan, state = decision.plan, decision.run.state
    met = ahead.met(decision.run, state) if isinstance(state, Running) else None
    enter(
        decision, Stopping(plan, cause, True, plan.members, NEVER, save=save, hand_over=hand_over, ahead=met)
    )
    decision.do(Pause(plan.generation, plan.members, save, hand_over))
    decision.say(f"{cause}: generation {plan.generation} pauses at the next boundary")


def stop(
    decision: Decision,
    cause: str,
    *,
    expelled: tuple[WorkerId, ...] = (),
    job_error: str = "",
    noticed: bool = False,
) -> None:
    """Stops at once, and fences the members first.  ``noticed``: only because a machine will be taken."""
    plan = decision.plan
    pending = tuple(worker for worker in plan.members if worker in decision.run.workers)
    present = decision.run.workers.keys() | frozenset(expelled)
    lost = tuple(worker for worker in plan.members if worker not in present)
    deadline = decision.now + decision.rules.fence_s
    enter(
        decision,
        Stopping(
            plan,
            cause,
            False,
            pending,
            deadline,
            lost=lost,
            expelled=expelled,
            job_error=job_error,
            noticed=noticed,
        ),
    )
    if pending:
        decision.do(Fence(plan.generation, pending))
    decision.say(f"{cause}: stop generation {plan.generation} of {count(len(plan.members), 'worker')}")
    copy_inventory.ask(decision)


def stop_unread(decision: Decision, plan: Plan) -> None:
    """Stops the world of ``plan``, which the journal does not mention because the journal ends too early."""
    run = decision.run
    cause = f"the journal ends in generation {run.generation}, but generation {plan.generation} was begun"
    # a starting worker was found too; it reports that it has joined before it answers
    found = {*run.workers, *run.members.starting}
    pending = tuple(worker for worker in plan.members if worker in found)
    unheard = tuple(worker for worker in plan.members if worker not in pending)
    state = Stopping(plan, cause, False, pending, decision.now + decision.rules.fence_s, expelled=unheard)
    # The plan may have given up some saves, for example because one was damaged.
    saved = tuple(each for each in run.history.saved if lineage.contains(plan.lineage, each))
    decision.know(generation=plan.generation, saves=Saves(), skips=run.skips.cut(plan.version.step))
    decision.know("history", lineage=plan.lineage, saved=saved, last=None, trusted=None)
    decision.know("members", seats=plan.members)
    decision.know("watch", lease_until=decision.now + decision.rules.lease_over_s)
    if isinstance(run.state, Stopping):
        decision.know(state=state)  # the stop of the later generation replaces the present one
    else:
        enter(decision, state)
    decision.do(Fence(plan.generation, pending))
    saves.tell(decision)
    copy_inventory.ask(decision)
    decision.say(f"{cause}: stop it with {names(pending)}")


# ---- the ends


def finished(decision: Decision, sentence: str, more: str = "") -> None:
    """Ends a run whose last step is in the bucket."""
    run, step = decision.run, saves.last_step(decision.run, decision.rules)
    early = Finished(step, run.why) if run.why and step < decision.rules.target_step else Finished()
    end(decision, early, f"{sentence}{f': {early.why}' if early.why else ''}{more}")


def end(decision: Decision, state: Finished | Stopped | Failed, sentence: str = "") -> None:
    """Ends the run.  Workers that have joined are told to exit; those that are still starting are killed."""
    enter(decision, state)
    decision.durable = True
    decision.say(sentence or getattr(state, "reason", ""))
    if summary := decision.run.skips.summary:
        decision.say(summary)
    if decision.run.workers:
        decision.do(Exit(tuple(decision.run.workers)))
    if decision.run.members.starting:
        decision.do(Kill(tuple(decision.run.members.starting), "the run is over"))


def end_as_asked(decision: Decision) -> None:
    """Ends a run that was asked to stop, gave up, or skipped too many steps.  The sentence says from which
    step it can be resumed.
    """
    run = decision.run
    saved = run.history.saved[-1].step if run.history.saved else 0
    unsaved = f"; steps {saved + 1}–{run.step} are not saved" if run.step > saved else ""
    if run.skips.failed:
        why = f"{run.skips.failed}; resumes from step {saved}{unsaved}"
        end(decision, Failed(why, why))
    elif run.gave_up:
        end(decision, Failed(run.gave_up), f"gave up ({run.gave_up}), resumes from step {saved}{unsaved}")
    else:
        end(decision, Stopped(run.stop), f"stopped ({run.stop}), resumes from step {saved}{unsaved}")
