"""Models workers that compute wrong gradients, and judges what the run makes of them.

A liar is a worker on a machine that computes wrong now and then, or always; its loss and its state are right.
The gradients of a microbatch are a number.  A liar's wrong number is its own: always the same error, or another one
each time.  The product compares the numbers where it does: in the steps that are due.

Five rules must hold:

* No step that is due is committed with a wrong gradient that another member has computed, too.
* A liar is in no later world if no other one was wrong, and it differs from two others, or from what it said
  before; and if the same step gives something else when it is done again.  The second time, its node gets no
  more workers.
* Nobody is called wrong whose gradients were right, unless two liars were wrong in that step: two wrong words count
  more than one that is right.
* The run does not go on once members have differed three times in a row and nobody was called wrong.
* It fails only then.  That no committed step is given up is judged elsewhere, as for all worlds that end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import inf
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from elastic.control.corruption import LIMIT
from elastic.ids import NodeId, Version, WorkerId
from elastic.plan.layout import Layout
from elastic.plan.placement import counterparts, data_ranks
from elastic.protocol.actions import Action, StartWorkers
from elastic.protocol.commit_record import CommitShape, Outcome
from elastic.protocol.events import Broken, Fact, Fenced, KeeperLost, Recovered, StepDone
from elastic.protocol.plan import Plan
from elastic.protocol.reruns import Differ, compared
from elastic.sim.scenario import MODEL
from elastic.sim.violation import Violation

if TYPE_CHECKING:
    from elastic.control.run import RunState
    from elastic.sim.simulation import Simulation

CALLED = " computed other gradients in step "
"""Words with which the run calls workers wrong."""
ROOM = 2**24
"""The distance between two right numbers; all errors are smaller."""

About = tuple[int, int]
"""The place in a model group, and the microbatch whose gradients a member computed there."""


class Word(NamedTuple):
    """A member's number for the gradients of a microbatch."""

    generation: int
    about: About
    worker: WorkerId
    digest: int


def right(step: int, about: About) -> int:
    """Returns the number of the right gradients."""
    place, microbatch = about
    return ((step * 64 + microbatch) * 8 + place) * ROOM


def place_of(layout: Layout, rank: int) -> tuple[int, int]:
    """Returns the data rank of a member, and its place in its model group, looked at axis by axis."""
    number = place = 0
    for axis, index in layout.coordinates(rank).items():
        degree = dict(layout.degrees)[axis]
        if axis in MODEL:
            place = place * degree + index
        else:
            number = number * degree + index
    return number, place


class Liars:
    """The gradients of one run, and the judge of these rules."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.rng = sim, Random(f"gradients {sim.seed}")
        self.share = dict(sim.scenario.liars)
        self._errors: dict[WorkerId, int] = {}
        self._wrong_at: dict[int, set[WorkerId]] = defaultdict(set)
        """The workers that have ever computed wrong gradients in a step."""
        self.disputes = 0
        """Number of times in a row that a coordinator was told that members differ, since nobody was called wrong."""
        self._step = 0
        """The last of these steps; 0 once members have agreed in it, or in a later one."""
        self._heard: set[int] = set()
        """The generations whose members differ, as far as a coordinator was told."""
        self._words: list[Word] = []
        """The numbers of that step that the acting coordinator was told and that nothing explains yet."""
        self._shown: set[WorkerId] = set()
        """The workers of which the acting coordinator can know that they were wrong."""
        self._named: dict[NodeId, set[int]] = defaultdict(set)
        """The generations in which workers were called wrong, by node."""

    # -- the gradients

    def compared(self, plan: Plan, step: int) -> tuple[tuple[int, int, int], ...]:
        """Returns the gradients on which members agree in ``step``.  Raises :class:`Differ` if they do not."""
        scenario, layout = self.sim.scenario, plan.layout
        every = scenario.rerun_every
        shape = CommitShape(
            plan.incarnation,
            plan.generation,
            scenario.microbatches,
            1,
            layout,
            nodes=plan.nodes,
            rerun_every=every,
        )
        if not every or not shape.reruns(step):
            return ()
        own, others, wrong = [0.0] * layout.world, [0.0] * layout.world, set[WorkerId]()
        for rank, worker in enumerate(plan.members):
            number, place = place_of(layout, rank)
            if (first := shape.first_of(number)) is not None:
                own[rank] = self._computed(worker, step, (place, first))
                wrong |= {worker} if own[rank] != right(step, (place, first)) else set()
            if (again := shape.again_of(number)) is not None:
                others[rank] = self._computed(worker, step, (place, again))
        begun = [shape.first_of(rank) for rank in range(data_ranks(layout))]
        try:
            found = compared(step, counterparts(layout), shape.apart, begun, own, others)
        except Differ:
            self.sim.strikes.disturbed_until = inf  # a liar may be wrong again at any time
            raise
        if wrong:
            raise Violation(f"step {step} is committed, and {min(wrong)} computed wrong gradients")
        self.sim.oracle.occasions["all agree in a step with reruns"] += 1
        return found

    def _computed(self, worker: WorkerId, step: int, about: About) -> int:
        found, share = right(step, about), self.share.get(self.sim.cluster.workers[worker].node, 0.0)
        if not share or self.rng.random() >= share:
            return found
        self._wrong_at[step].add(worker)
        if worker not in self._errors:
            self._errors[worker] = self.rng.choice((0, 1 + len(self._errors)))
        return found + (self._errors[worker] or self.rng.randrange(1000, ROOM))

    # -- what the coordinator is told, and what it decides

    def note(self, before: RunState, taken: tuple[Fact, ...], after: RunState, reason: str) -> None:
        """Judges a decision of the acting coordinator."""
        if not self.sim.scenario.rerun_every:
            return
        for each in taken:
            match each:
                case Recovered():  # it may not know what its predecessor was told
                    self._words, self._shown = [], set()
                case Broken(cause="differs") if each.generation not in self._heard:
                    self._differ(each)
                case StepDone():
                    self._agree(after, (each.outcome,))
                case Fenced():
                    self._agree(after, each.outcomes)
                case KeeperLost(with_its_node=True):  # no worker can start there again
                    self._named.pop(each.node, None)
        self._judge_reason(reason, after.generation)
        for node in after.cluster.refused.keys() - before.cluster.refused.keys():
            if CALLED in after.cluster.refused[node].why and node not in self._named:
                raise Violation(f"node {node} is refused, and no worker there was called wrong")
        if self.disputes >= LIMIT and not after.stop and not after.over and not self.sim.oracle.headless:
            raise Violation(f"the run goes on, and members differed {self.disputes} times in a row")

    def _differ(self, event: Broken) -> None:
        """Notes the words of members that differ.  It shows that a liar was wrong, if no other one was, and it
        differs from two others, or from itself.
        """
        plan = self.sim.worlds[event.generation].plan
        self._heard.add(event.generation)
        self.sim.oracle.occasions["gradients of members differ"] += 1
        self._words = [] if event.step != self._step else self._words
        self._step, self.disputes = event.step, self.disputes + 1
        for each in event.computed:
            about = place_of(plan.layout, each.rank)[1], each.microbatch
            self._words.append(Word(event.generation, about, plan.members[each.rank], each.digest))
        wrong = {each.worker for each in self._words if each.digest != right(event.step, each.about)}
        if len(wrong) == 1:
            own = [each for each in self._words if each.worker in wrong]
            compared = {(each.generation, each.about) for each in own}
            others = {
                each.worker for each in self._words if (each.generation, each.about) in compared
            } - wrong
            contradicts = len({(each.about, each.digest) for each in own}) > len({each.about for each in own})
            if len(others) > 1 or contradicts:
                self._show(wrong, "a liar differs from two others, or from itself")

    def _agree(self, after: RunState, outcomes: Iterable[Outcome]) -> None:
        """Notes that members agree in the step in which some have differed, or in a later one."""
        for outcome in sorted(outcomes, key=lambda each: each.step):
            told = after.history.contains(Version(outcome.step, outcome.generation))
            if not (self._step and outcome.reran and told and outcome.step >= self._step):
                continue
            agreed = {(place, microbatch): digest for place, microbatch, digest in outcome.reran}
            words = self._words if outcome.step == self._step else []
            sound = {each.about for each in words if agreed.get(each.about) == each.digest}
            wrong = {
                each.worker for each in words if each.about in sound and agreed[each.about] != each.digest
            }
            self._show(wrong, "a step that is done again shows who was wrong")
            self._step, self.disputes, self._words = 0, 0, []

    def _show(self, workers: set[WorkerId], how: str) -> None:
        self._shown |= workers
        self.sim.oracle.occasions[how] += bool(workers)
        self._forget(workers)

    def _forget(self, workers: set[WorkerId]) -> None:
        """Drops what was said of the microbatches of these workers: that they were wrong explains it."""
        theirs = {(each.generation, each.about) for each in self._words if each.worker in workers}
        self._words = [each for each in self._words if (each.generation, each.about) not in theirs]

    def _judge_reason(self, reason: str, generation: int) -> None:
        """Checks whom the run calls wrong."""
        for part in reason.split("; ") if CALLED in reason else ():
            if CALLED not in part:
                continue
            who, _, after = part.partition(CALLED)
            wrong_then = self._wrong_at[int(after.split()[0])]
            self.sim.oracle.occasions["a worker is called wrong for its gradients"] += 1
            words = {word.strip(",") for word in who.split()}
            named = {worker for worker in self.sim.cluster.workers if worker in words}
            self.disputes = 0
            self._forget(named)
            for worker in sorted(named):
                self._named[self.sim.cluster.workers[worker].node].add(generation)
                if worker not in wrong_then and len(wrong_then) < 2:
                    raise Violation(f"{worker} is called wrong, and its gradients were right")

    def judge(self, action: Action) -> None:
        """Checks that no worker is started on a node where workers of two worlds were called wrong."""
        if isinstance(action, StartWorkers) and not self.sim.oracle.headless:
            for node, generations in self._named.items():
                if len(generations) > 1 and node not in action.avoid:
                    raise Violation(
                        f"{action.workers[0]} may start on node {node}, where workers were wrong twice"
                    )

    def judge_plan(self, plan: Plan) -> None:
        """Checks the members of a new world."""
        if there := self._shown.intersection(plan.members):
            raise Violation(f"{min(there)} computed other gradients than others did, and is a member again")

    def resumed(self) -> None:
        """Forgets everything: what a run knows of workers ends with it."""
        self.disputes, self._step, self._words = 0, 0, []
        self._shown, self._named = set(), defaultdict(set)
