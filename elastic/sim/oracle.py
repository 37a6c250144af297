"""Judges a simulated run from outside: the oracle sees everything, and raises :class:`Violation` if a promise
is broken.

The oracle keeps the truth apart from the coordinator's knowledge.  ``parent`` has the version to which each
step was really applied.  ``evidence``, ``answered``, ``lost`` and ``expelled`` have what the coordinator was
really told.  The oracle shares no code with the machine that it judges: for example, it looks row by row
whether cells cover a state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations
from typing import TYPE_CHECKING

from elastic.control.run import Failed, Finished, Finishing, Forming, Stopped, Stopping, Waiting
from elastic.ids import Cell, NodeId, Version, WorkerId
from elastic.plan.placement import cell_of
from elastic.plan.routes import Routes
from elastic.protocol.actions import Action, CommitManifest, Form, Go, Kill, Quarantine, Settle, StartWorkers
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import (
    Attached,
    Beat,
    Capacity,
    Event,
    Fact,
    Fenced,
    Here,
    Joined,
    KeeperLost,
    Kept,
    Lost,
    Ready,
    Recovered,
    Renewed,
    Saved,
    SaveFailed,
    ShardSaved,
    StepDone,
    StopRequested,
    Stumbled,
    Tick,
    parts,
)
from elastic.protocol.plan import Plan
from elastic.sim.copies import CopiesOracle
from elastic.sim.notices import NoticesOracle
from elastic.sim.slow_workers import PaceOracle
from elastic.sim.sour import LemonsOracle
from elastic.sim.truth import (
    JOINS,
    NO_KEEPER,
    a_budget_is_spent,
    axes_of,
    base_of,
    check_last_step,
    check_layout,
    check_routes,
    covers,
    expanded,
    parts_of,
)
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.machine import Transition
    from elastic.control.run import RunState
    from elastic.sim.coordinator import Coordinator
    from elastic.sim.simulation import Simulation
    from elastic.sim.worker import Worker

ORIGIN = Version(0, 0)
OVERDUE_S = 3.0
"""Longest time in seconds in which a coordinator notes that it has waited long enough."""
LONGEST_SAVE_S = 90.0
"""Longest time in seconds, after the last fault has ended, that a save may be on its way.  A slow part takes
30 s.  The last save may wait for the save before it, which may also have a slow part and then lack another
part for ``stop_s``.  Three long steps come on top: so long a member that stands still may delay the save
before it is blamed.
"""


class Oracle:
    """Follows one run, keeps the truth about it, and judges every decision of its coordinators."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.copies = CopiesOracle(sim)
        self.notices = NoticesOracle(sim)
        self.pace = PaceOracle(sim)
        self.lemons = LemonsOracle(sim)
        self.parent: dict[Version, Version] = {}
        self.first_commit_at: dict[int, float] = {}
        self.plans: dict[int, Plan] = {}
        self.unread: dict[int, Plan] = {}
        """Plans by generation that coordinators began whose records no later coordinator found."""
        self.headless: set[int] = set()
        """Generations during which a new coordinator took over.  Perhaps only the old coordinator knows their
        last events.
        """
        self.plan: Plan | None = None
        self.names: dict[WorkerId, Transition] = {}
        """The decision that gave each worker its name, for all workers that a coordinator has ordered."""
        self.joined: set[WorkerId] = set()
        self.lost: set[WorkerId] = set()
        self.expelled: set[WorkerId] = set()
        self.answered: dict[int, set[WorkerId]] = defaultdict(set)
        self.evidence: dict[int, dict[int, Outcome]] = defaultdict(dict)
        self.told: set[tuple[int, int]] = set()
        """The (step, generation) of each commit that was ever reported, late or in time, to any coordinator
        that has a safe record of it or acted on it.
        """
        self.answered_at: dict[int, dict[WorkerId, int]] = defaultdict(dict)
        """The latest step, by generation, that each worker had applied when it answered the fence.  A worker
        is left out that was lost while the world stopped and before its answer brought its commits.
        """
        self.leases: dict[WorkerId, float] = {}
        """The time, by its own clock, until which each worker may apply steps."""
        self.went: set[int] = set()
        self.here: dict[int, set[WorkerId]] = defaultdict(set)
        """The workers, by generation, that have reported that the plan has arrived."""
        self.settled: set[int] = set()
        self.settle: Settle | None = None
        """The latest settlement, which perhaps has not reached all members yet."""
        self.settlements: dict[int, Outcome | None] = {}
        self.counting: set[Version] = set()
        self.stop_asked = self.asked = self.refused = False
        self.startups, self.stumbles = 0, Counter[str]()
        """Number of coordinators in a row that died before they achieved anything, and a count of the
        reported reasons for deaths of coordinators.
        """
        self.occasions: Counter[str] = Counter()
        """Number of times that each rare situation happened.  A promise is only tested by situations that
        endanger it.
        """
        self.met: Counter[tuple[str, str]] = Counter()
        """Number of times that a world with both axes of a pair met one of ``BLOWS``, by (pair, blow)."""
        self.waiting_since: float | None = 0.0
        self.enough: set[WorkerId] = set()
        """The workers that could have formed a world when the run chose to wait for others."""
        self.took_over_at = 0.0
        """The time at which the present coordinator took over.  Before it, it knew of no free places."""
        self.pending_since: dict[tuple[Version, int], float] = {}
        """The time since which each save has been on its way, by its version and the generation that writes
        it.
        """
        self.refused_at: dict[tuple[Version, int], float] = {}
        """The time since which the bucket has refused parts of a save, as far as a coordinator was told, by
        the save's version and the generation that writes it.
        """
        self.begun = False
        """True once a coordinator has ordered a world to form since the run began or was resumed."""

    # -- what workers do
    # ------------------------------------------------------------------------------------------

    def granted(self, worker: Worker, asked_at: float) -> None:
        """Notes that ``worker`` may have a lease that counts from ``asked_at``, by its own clock."""
        self.leases[worker.name] = max(self.leases.get(worker.name, 0.0), asked_at + self.sim.rules.lease_s)

    def contributes(self, worker: Worker, step: int) -> None:
        """Checks that ``worker``, which contributes to ``step``, has not answered the fence of its world."""
        if worker.world is not None and worker.answered >= worker.world.generation:
            raise Violation(f"{worker.name} contributes to step {step} after it has answered its fence")

    def forgets(self, worker: Worker, outcomes: tuple[Outcome, ...]) -> None:
        """Checks commits whose evidence ``worker`` forgets: a coordinator was told of each, and none is the
        last commit that the worker applied.
        """
        for each in outcomes:
            what = f"{worker.name} forgets the commit of step {each.step} of generation {each.generation}"
            if (each.step, each.generation) not in self.told:
                raise Violation(f"{what}, which no coordinator was told of")
            if (each.step, each.generation) == worker.newest:
                raise Violation(f"{what}, the last it has applied")

    def applying(self, worker: Worker, outcome: Outcome, settled: bool) -> None:
        """Checks an update that ``worker`` begins.

        Its outcome and base must be those of the worker's world, and no newer world may have committed
        before.  If the update is not part of a settlement (``settled``), the worker must not be fenced and
        must have a lease.
        """
        world, base = worker.world, worker.version
        assert world is not None
        step, generation = outcome.step, outcome.generation
        if worker.answered > generation or (worker.answered == generation and not settled):
            raise Violation(
                f"{worker.name} applies step {step} of generation {generation} after it has answered its "
                "fence"
            )
        if not settled and worker.now > self.leases[worker.name]:
            raise Violation(
                f"{worker.name} applies step {step} of generation {generation} after its lease ran out"
            )
        if outcome != world.outcomes.get(step):
            raise Violation(
                f"{worker.name} applies an outcome of step {step} that generation {generation} never had"
            )
        expected = base_of(world.plan, step)
        if base != expected:
            raise Violation(
                f"{worker.name} applies step {step} of generation {generation} to {base}, not to {expected}"
            )
        self.parent[Version(step, generation)] = expected
        self.first_commit_at.setdefault(generation, self.sim.clock.now)
        self.occasions["an expelled worker applies a step"] += worker.name in self.expelled
        for newer, at in self.first_commit_at.items():
            if newer > generation and world.completed_at[step] > at:
                raise Violation(
                    f"two worlds commit: generation {generation} does, step {step}, after generation "
                    f"{newer} did"
                )

    # -- what the coordinator is told, and what it decides
    # ------------------------------------------------------------

    def hears(self, event: Event) -> None:
        """Notes which commits a coordinator was told of by ``event``."""
        for each in parts(event):
            if isinstance(each, StepDone):
                self.told.add((each.outcome.step, each.generation))
            elif isinstance(each, Fenced):
                self.told.update((outcome.step, outcome.generation) for outcome in each.outcomes)

    def judge(self, before: RunState, event: Event, transition: Transition, by: Coordinator) -> None:
        """Judges one decision (a call of ``advance``) of the coordinator ``by``."""
        after = transition.run
        for worker in (
            worker
            for action in transition.actions
            if isinstance(action, StartWorkers)
            for worker in action.workers
        ):
            if self.names.setdefault(worker, transition) is not transition:
                raise Violation(f"the name {worker} is given twice")
        self.hears(event)
        if by is not self.sim.coordinators.acting:
            return self._judge_the_superseded(transition, by)
        if after.generation < before.generation or after.incarnation < before.incarnation:
            raise Violation("generation or incarnation went back")
        for each in parts(event):
            self._note(before, each, taken=each in transition.taken)
            self.copies.note(before, each, refused=each not in transition.taken)
        self._judge_saves(before, event, after)
        self.notices.note(before, event, after)
        if transition.taken:
            self.notices.judge_spares(after, by.decided_at + by.ahead_s)
        self.pace.note(before, event, after)
        self.sim.flips.hears(before, event, after)
        self.sim.flips.judge_reason(before, transition.reason)
        self.sim.liars.note(before, transition.taken, after, transition.reason)
        self.lemons.note(before, transition.taken, transition.actions, after, by.decided_at + by.ahead_s)
        for each in transition.taken:
            if isinstance(each, Here | Ready) and isinstance(before.state, Forming):
                self.here[each.generation].add(each.worker)
        for action in transition.actions:
            if isinstance(action, Kill):
                self._judge_kill(before, action)
                # dead workers are not expelled: their reports stay facts
                self.expelled.update(set(action.workers) - self.lost)
        for action in transition.actions:
            self.settle = action if isinstance(action, Settle) else self.settle
            self._judge_action(before, after, action, transition.reason)
        if isinstance(before.state, Stopping):
            # a worker is asked again for its commits only once all have answered; it may be gone before
            brief = (answer.worker for answer in before.state.answers if not answer.whole)
            for worker in {*before.state.pending, *brief} - after.workers.keys():
                self.answered_at[before.generation].pop(worker, None)
        if (
            before.plan is not None
            and isinstance(after.state, Waiting)
            and before.generation not in self.settled
        ):
            self._all_out(self.plans[before.generation], "is left")
            if untold := self.answered[before.generation] - self.lost - self.expelled:
                raise Violation(f"generation {before.generation} is left, and {min(untold)} is not told")
            self.settled.add(before.generation)
        self._judge_wait(before, after, by)
        if after.state is not before.state:
            self._judge_end(after, transition.reason)
            # a run that leaves ``Stopping`` has asked every member that can report
            self.asked = isinstance(before.state, Stopping)
            since = by.decided_at if self.waiting_since is None else self.waiting_since
            self.waiting_since = since if isinstance(after.state, Waiting) else None

    def _judge_wait(self, before: RunState, after: RunState, by: Coordinator) -> None:
        """Checks that workers that could form a world wait for others no longer than they wanted to."""
        state, now = after.state, by.decided_at + by.ahead_s
        if not isinstance(state, Waiting) or not state.until or after.stop:
            return
        if not isinstance(before.state, Waiting):
            self.occasions["a world waits for a worker that is starting"] += 1
            self.enough = set(after.workers)
        if now > state.until + OVERDUE_S and self.enough <= after.workers.keys() and after.cluster.keepers:
            raise Violation(
                f"the run has waited since {state.since:.1f} s, and wanted to until {state.until:.1f} s"
            )

    def _judge_the_superseded(self, transition: Transition, by: Coordinator) -> None:
        """Checks that a superseded coordinator begins and settles a generation only if its follower has read
        this.
        """
        self.occasions["a superseded coordinator acts on"] += bool(transition.actions)
        harm = [action for action in transition.actions if isinstance(action, Form | Settle)]
        if harm and by.journal.read_to == by.journal.disk.end:
            self.occasions["a superseded coordinator does what its follower has read"] += 1
        elif harm:
            raise Violation(f"a coordinator that was followed by another performs {harm[0]}")

    def _judge_saves(self, before: RunState, event: Event, after: RunState) -> None:
        """Checks that no save stays on its way too long, because it delays the next save, and that the run
        waits for its last save.
        """
        now, calm_at = self.sim.clock.now, self.sim.strikes.calm_at
        if isinstance(event, SaveFailed) and event.again:
            self.refused_at.setdefault((event.version, event.by or event.version.generation), now)
        elif isinstance(event, ShardSaved | Saved | Recovered):
            self.refused_at.clear()
        waits = isinstance(before.state, Finishing) and before.saves.find(before.version) is not None
        if waits and isinstance(after.state, Stopping) and isinstance(event, Beat | Tick | Renewed):
            if now > calm_at + self.sim.rules.stop_s and any(
                node.uploads.writing for node in self.sim.cluster.nodes.values()
            ):
                raise Violation("the run does not wait for its last save, which is being written")
            under_way = {(each.version, each.by or each.version.generation) for each in before.saves.pending}
            refused = [now - since for save, since in self.refused_at.items() if save in under_way]
            if any(each < self.sim.rules.wait_s for each in refused):
                raise Violation("the run does not wait for the bucket, which refuses its last save")
            self.refused |= bool(refused)
        self.pending_since = {
            (each.version, each.by): self.pending_since.get((each.version, each.by), now)
            for each in after.saves.pending
        }
        for (version, _), since in self.pending_since.items():
            if now - max(since, calm_at) > LONGEST_SAVE_S + 3 * after.watch.step_s:
                raise Violation(f"the save of {version} has been on its way for {now - since:.0f} s")

    def judge_reading(self, before: Coordinator, follower: Coordinator) -> None:
        """Checks that ``follower`` has read every record on which ``before`` acted, if it believes to have
        read all.
        """
        if follower.whole and before.acted_to > before.journal.read_to:
            raise Violation(
                f"coordinator {follower.incarnation} has not read all that coordinator {before.incarnation} "
                "acted on"
            )

    def _note(self, before: RunState, event: Fact, *, taken: bool) -> None:
        if not isinstance(event, Recovered | Attached | Stumbled | Tick | Beat | Renewed | Capacity | Kept):
            self.startups = 0
        match event:
            case Joined():
                self.joined.add(event.worker)
            case Lost() if event.certain:
                self.lost.add(event.worker)
            case Lost() if event.worker not in self.lost:  # the reports of one that is surely dead stay facts
                self.expelled.add(event.worker)
            case Stumbled():
                self.stumbles[event.what] += 1
            case Recovered():  # the record of what its predecessors achieved may be lost
                self.took_over_at = self.sim.clock.now
                self.startups = max(self.startups, before.takeover.startups) + 1
                self.headless.add(before.generation)
                known = self.evidence[before.generation]
                # later commits are reported again
                self.evidence[before.generation] = {
                    step: known[step] for step in known if step <= before.step
                }
                self.here.clear()  # workers report to the new coordinator again, or their reports are lost
                if before.plan is not None and before.generation not in self.settlements:
                    # the new coordinator does not know that the generation was left
                    self.settled.discard(before.generation)
                # The new coordinator may not know that damaged versions were put away.  It finds the damage
                # again.
                self.counting |= self.sim.cluster.bucket.damaged & set(before.history.saved)
                if not event.whole:
                    self._forget_the_unread(before)
                gone = self.joined - set(event.workers)
                dead = {
                    worker
                    for worker in gone & before.workers.keys()
                    if before.workers[worker].node in event.keepers
                }
                # the keeper answers but the worker is gone, so it is dead, and its reports stay facts
                self.lost |= dead - self.expelled
                self.expelled |= gone - self.lost
                ours = {*before.workers, *before.members.starting}
                # those that still live were not killed, although that may have been ordered
                self.expelled -= ours.intersection(event.workers)
            case Attached() if (
                taken  # the coordinator ignores strangers; a worker may join in this very decision
                and event.plan is not None
                and event.plan.generation in self.unread
                and event.plan.generation
                > max(before.generation, self.plan.generation if self.plan is not None else 0)
            ):
                self.plan = self.plans[event.plan.generation] = self.unread.pop(event.plan.generation)
                self._forget_what_was_said(event.plan.generation, before)
            case StepDone() if event.worker not in self.expelled and event.generation not in self.settled:
                self.occasions["a dead worker's report is evidence"] += event.worker in self.lost
                self.evidence[event.generation][event.outcome.step] = event.outcome
            case Fenced() if event.worker not in self.expelled and event.generation not in self.settled:
                if stale := (event.heeds or 0) < before.incarnation:
                    self.occasions["an answer to an earlier coordinator"] += 1
                self.answered[event.generation].update(() if stale else (event.worker,))
                applied = (
                    each.version.step for each in event.held if each.version.generation == event.generation
                )
                self.answered_at[event.generation][event.worker] = max(applied, default=0)
                self.evidence[event.generation].update(
                    {o.step: o for o in event.outcomes if o.generation == event.generation}
                )
            case KeeperLost() if before.plan is not None:
                self.meets(before.plan, NO_KEEPER)
            case Saved() if self.on_lineage(event.version) and not before.over:
                self.counting.add(event.version)
            case Saved():
                self.occasions["a manifest comes in for a version given up"] += 1
            case StopRequested():
                self.stop_asked = True

    def meets(self, plan: Plan, blow: str) -> None:
        """Notes one of ``BLOWS`` for each pair of axes of the world of ``plan``."""
        axes = axes_of(plan.layout, self.sim.scenario.experts)
        self.met.update((f"{first} × {second}", blow) for first, second in combinations(axes, 2))

    def _forget_the_unread(self, run: RunState) -> None:
        """Moves plans that the new coordinator could not read to ``unread``, and forgets the reports about
        them.
        """
        self.unread |= {
            generation: plan for generation, plan in self.plans.items() if generation > run.generation
        }
        self.plans = {
            generation: plan for generation, plan in self.plans.items() if generation <= run.generation
        }
        self.plan = self.plans.get(run.generation) if run.generation else None
        self.counting = set(run.history.saved)  # may include versions that were found damaged meanwhile
        if run.plan is not None:
            self._forget_what_was_said(run.generation, run)

    def _forget_what_was_said(self, generation: int, run: RunState) -> None:
        known = {step for step, by in enumerate(expanded(run.history.lineage), 1) if by == generation}
        self.evidence[generation] = {
            step: o for step, o in self.evidence[generation].items() if step in known
        }
        self.settlements.pop(generation, None)
        self.settled.discard(generation)

    def _judge_action(self, before: RunState, after: RunState, action: Action, reason: str) -> None:
        self.copies.judge(before, action)
        self.notices.judge(after, action)
        self.pace.judge(action)
        self.lemons.judge(after, action)
        self.sim.liars.judge(action)
        match action:
            case Settle():
                self._judge_settle(action)
            case CommitManifest():
                self.sim.flips.judge_asking(action.version)
            case Go():
                self.went.add(action.generation)
            case Form():
                self._judge_form(before, after, action.plan, reason)
                self.plans[action.plan.generation] = self.plan = action.plan
                self.begun = True
            case Quarantine():
                self.occasions["a damaged checkpoint is put away"] += 1
                if action.version not in self.sim.cluster.bucket.damaged:
                    raise Violation(f"{action.version} is put away and was not damaged")
                self.counting.discard(action.version)

    def _judge_kill(self, before: RunState, kill: Kill) -> None:
        """Checks that no member that has arrived is expelled because other members did not arrive in time."""
        if isinstance(before.state, Forming) and self.sim.coordinators.acting.now >= before.state.deadline:
            here = self.here[before.generation]
            if (innocent := here & set(kill.workers)) and here < set(before.state.plan.members):
                raise Violation(
                    f"{min(innocent)} said Here and is expelled because others of generation "
                    f"{before.generation} did not"
                )

    def _judge_settle(self, settle: Settle) -> None:
        """Checks a settlement: every member was fenced or gone before it, and evidence is neither dropped nor
        invented.
        """
        generation, outcome = settle.generation, settle.outcome
        if generation in self.settlements:
            if self.settlements[generation] != outcome:
                raise Violation(
                    f"generation {generation} is settled twice: {self.settlements[generation]}, then "
                    f"{outcome}"
                )
            return  # a coordinator that took over repeats the order
        self.settlements[generation] = outcome
        self._all_out(self.plans[generation], "is settled")
        evidence = self.evidence[generation]
        top = max(evidence, default=0)
        workers = self.sim.cluster.workers
        prepared = [m for m in settle.members if workers[m].alive and workers[m].member.prepared == top]
        if outcome is None and top and prepared:
            raise Violation(
                f"step {top} of generation {generation} is dropped in spite of evidence: {prepared} are "
                "prepared"
            )
        if outcome is not None and evidence.get(outcome.step) != outcome:
            raise Violation(
                f"step {outcome.step} of generation {generation} is to be applied without evidence"
            )
        if outcome is not None and outcome.step != top:
            raise Violation(
                f"step {outcome.step} of generation {generation} is to be applied, but there is evidence "
                f"of step {top}"
            )
        if outcome is not None:  # the members will apply the step, even if none has begun to
            self.parent[Version(top, generation)] = base_of(self.plans[generation], top)
        self.occasions["a step is applied after its world broke"] += outcome is not None
        self.occasions["a prepared step is dropped"] += outcome is None and any(
            workers[m].member.prepared for m in settle.members
        )
        self.settled.add(generation)

    def _all_out(self, plan: Plan, what: str) -> None:
        for member in plan.members:
            if not (
                member in self.lost or member in self.expelled or member in self.answered[plan.generation]
            ):
                raise Violation(
                    f"generation {plan.generation} {what}, {member} has neither answered its fence nor been "
                    "expelled"
                )

    def _judge_form(self, before: RunState, after: RunState, plan: Plan, reason: str) -> None:
        if plan == self.plan:
            return  # a coordinator that took over repeats the order
        rules, members = self.sim.rules, set(plan.members)
        if plan.generation <= max((*self.plans, *self.unread), default=0):
            raise Violation(f"generation {plan.generation} is begun twice")
        if (
            not len(members) == len(plan.members) == plan.layout.world
            or not rules.min_workers <= len(members) <= rules.max_workers
        ):
            raise Violation(f"a world of {plan.layout} with members {plan.members}")
        if unable := members - self.joined | members & (self.lost | self.expelled):
            raise Violation(f"members that cannot act: {sorted(unable)}")
        if misfits := {m for m in members if self.sim.cluster.workers[m].node in self.sim.cluster.misfits}:
            raise Violation(f"members that do not see the bucket: {sorted(misfits)}")
        if self.plan is not None:
            self._all_out(self.plan, "is followed by another")
            self._cannot_commit(self.plan)
            held = any(
                m in self.answered[self.plan.generation]
                for m in self.plan.members
                if m not in self.lost | self.expelled
            )
            if held and self.plan.generation not in self.settled:
                raise Violation(f"generation {self.plan.generation} was not settled")
            self.settled.add(self.plan.generation)
        for other in self.unread.values():
            self._cannot_commit(other)
        check_layout(plan.layout, self.sim.scenario.experts)
        check_routes(Routes, plan.layout, plan.nodes)
        if self.plan is not None and members - set(self.plan.members):
            self.meets(plan, JOINS)
        self._judge_seats(plan)
        self._judge_version(before, after, plan, reason)
        self.sim.flips.judge_plan(plan, self.counting)
        self.sim.liars.judge_plan(plan)

    def _judge_seats(self, plan: Plan) -> None:
        """Checks that no worker without state sits in the place of a survivor of the last world on its node
        that holds a cell of this world.
        """
        if self.plan is None or plan.tier not in ("live", "host"):
            return
        workers = self.sim.cluster.workers
        held = {
            name: {cell for at, cell in workers[name].held_after(self.settle) if at == plan.version}
            for name in {*plan.members, *self.answered[self.plan.generation].intersection(self.plan.members)}
        }
        seats = Counter(
            (workers[name].node, cell_of(plan.layout, rank)) for rank, name in enumerate(plan.members)
        )
        kept = Counter((workers[name].node, cell) for name in plan.members for cell in held[name])
        idle = {workers[name].node for name in plan.members if not held[name]}
        for name in held.keys() - set(plan.members) - self.lost - self.expelled:
            node = workers[name].node
            for cell in held[name] if node in idle and workers[name].alive else ():
                if kept[node, cell] < seats[node, cell]:
                    raise Violation(
                        f"generation {plan.generation}: {name} holds {cell!r} and is left over, and a worker of "
                        f"node {node} without state is seated"
                    )

    def _cannot_commit(self, plan: Plan) -> None:
        """Checks that the world of ``plan`` can commit nothing more.

        One of these must be true: the world was never told to go, its last step is reached, a member is dead,
        fenced or ended, or no lease runs.
        """
        seen = max(self.evidence[plan.generation], default=plan.version.step)
        if plan.generation not in self.went or seen >= (plan.ends or self.sim.rules.target_step):
            return
        members = [self.sim.cluster.workers[m] for m in plan.members]
        out = any(
            not w.alive or plan.generation in (w.ended, w.member.fenced) or w.member.fenced > plan.generation
            for w in members
        )
        over = all(w.member.lease_until <= w.now for w in members)
        self.occasions["a silent world's leases are waited out"] += over and not out
        if not (out or over):
            raise Violation(f"generation {plan.generation} may still commit: nobody is out and a lease runs")

    def _judge_version(self, before: RunState, after: RunState, plan: Plan, reason: str) -> None:
        version = plan.version
        self.copies.judge_plan(before, after, plan)
        if not self.on_lineage(version):
            raise Violation(f"generation {plan.generation} starts from {version}, which was given up")
        claimed = frozenset(h.cell for h in plan.holders if h.version == version)
        if not (version == ORIGIN or version in self.counting or covers(claimed, self.sim.scenario.rows)):
            raise Violation(f"generation {plan.generation} starts from {version}, which nobody holds whole")
        for better in self._held_whole(before, after.cluster.keepers):
            if better.step > version.step:
                if self._can_be_seated(better, before, after.cluster.keepers):
                    raise Violation(f"{better} is given up for {version} although every slice of it is held")
                self.occasions["whole model groups leave over the only holder of a slice"] += 1
        lineage, truth = expanded(after.history.lineage), self.chain(version)
        if lineage != truth:
            raise Violation(f"the coordinator's lineage {lineage} is not what happened, {truth}")
        given_up = len(expanded(before.history.lineage)) > version.step
        if given_up and "abandon" not in reason:
            raise Violation(f"steps after {version} are abandoned and the reason does not say so: {reason!r}")
        self.occasions["steps are abandoned"] += given_up
        self.occasions[f"a world starts from tier {plan.tier}"] += 1
        self.occasions["shards are cut anew"] += any(
            parts_of(cell) != plan.layout.world // plan.layout.replicas for cell in claimed
        )

    def _held_whole(self, before: RunState, keepers: tuple[NodeId, ...]) -> list[Version]:
        """Returns the versions of the lineage that are in the bucket, or completely in the memory of workers
        and in copies.

        Only living workers that are not expelled count, with what they hold once they have received the
        settlement.
        """
        cells: dict[Version, set[Cell]] = defaultdict(set)
        for version, cell in self.copies.known(before, keepers):
            cells[version].add(cell)
        for name in self.joined - self.lost - self.expelled:
            worker = self.sim.cluster.workers[name]
            for version, cell in worker.held_after(self.settle) if worker.alive else ():
                cells[version].add(cell)
        whole = [v for v, found in cells.items() if covers(frozenset(found), self.sim.scenario.rows)]
        if self.sim.flips.since is not None:  # state after the newest checkpoint is not trusted
            whole = []
        return [v for v in (*whole, *self.sim.flips.trusted(self.counting)) if self.on_lineage(v)]

    def _can_be_seated(self, version: Version, before: RunState, keepers: tuple[NodeId, ...]) -> bool:
        """Returns whether the members of a world of whole model groups can hold all of ``version`` in the
        bucket, in their memory and in copies: a worker that is left over gives nobody its state.
        """
        group, rows = self.sim.rules.layout.group, self.sim.scenario.rows
        if group == 1 or version in self.counting:
            return True
        copies = {cell for at, cell in self.copies.known(before, keepers) if at == version}
        workers = [self.sim.cluster.workers[name] for name in self.joined - self.lost - self.expelled]
        held = [
            {cell for at, cell in worker.held_after(self.settle) if at == version}
            for worker in workers
            if worker.alive
        ]
        seats = min(len(held), self.sim.rules.max_workers) // group * group
        return any(covers(frozenset(copies.union(*some)), rows) for some in combinations(held, seats))

    def resumed(self) -> None:
        """Notes that the run is resumed after a stop: no earlier worker belongs to it, and nobody has asked
        it to stop.
        """
        self.expelled |= self.joined
        self.stop_asked = self.begun = False
        self.copies.forget()
        self.notices.heard.clear()
        self.lemons.resumed()
        self.sim.liars.resumed()
        self.waiting_since = self.sim.clock.now

    # -- the truth
    # ------------------------------------------------------------------------------------------------

    def chain(self, version: Version) -> list[int]:
        """Returns the generations that committed steps 1, 2, ... up to ``version``."""
        generations: list[int] = []
        while version.step:
            generations.append(version.generation)
            version = self.parent[version]
        return generations[::-1]

    def on_lineage(self, version: Version) -> bool:
        """Returns whether ``version`` belongs to the lineage of the last plan.

        It does if the plan starts from this version or from a version after it, or if the plan's world
        committed the version and did not drop it.
        """
        if version == ORIGIN:
            return True
        if self.plan is None or version not in self.parent:
            return False
        if version.generation == self.plan.generation:
            seen = max(self.evidence[version.generation], default=0)
            silent = version.generation not in self.settlements
            return version.step <= max(seen, self.copies.reported(version.generation) if silent else 0)
        tip = self.plan.version
        while tip.step > version.step:
            tip = self.parent[tip]
        return tip == version

    # -- the end
    # --------------------------------------------------------------------------------------------------

    def judge_ledger(self, run: RunState) -> None:
        """Checks that a coordinator was told what each step of a finished run consumed, if a worker that
        could be asked had applied the step.
        """
        if not isinstance(run.state, Finished):
            return
        for step, generation in enumerate(expanded(run.history.lineage), 1):
            if (step, generation) not in self.told:
                self.occasions["what a step consumed is known from the bucket only"] += 1
                asked = generation != run.generation or self.asked
                if step <= max(self.answered_at[generation].values(), default=0) or not asked:
                    raise Violation(f"nobody told what step {step} of generation {generation} consumed")

    def _judge_end(self, after: RunState, reason: str) -> None:
        match after.state:
            case Finished():
                generations = expanded(after.history.lineage)
                final = Version(check_last_step(self.sim, after.state.step, generations), generations[-1])
                if generations != (truth := self.chain(final)):
                    raise Violation(f"finished with the ledger {generations}, what happened is {truth}")
                if final not in self.sim.cluster.bucket.manifests:
                    raise Violation(f"finished, and {final} is not in the bucket")
            case Stopped() if not self.stop_asked:
                raise Violation("stopped, and nobody asked for it")
            case Failed() if not a_budget_is_spent(self):
                raise Violation(f"failed with its budget unspent: {reason}")
            case Failed() if (
                after.step >= self.sim.rules.target_step
                and self.sim.clock.now - self.sim.strikes.calm_at > LONGEST_SAVE_S
            ):
                raise Violation(f"failed at the target step, long after the last fault: {reason}")
