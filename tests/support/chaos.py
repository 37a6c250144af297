"""Makes the six assertions of a chaos test.  During the run a witness collects what they need from the
operating system.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import ray

from actors.launch import launch
from actors.living import attach
from actors.result import Result
from actors.view import View
from elastic.code.imports import load
from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.journal import codec
from elastic.protocol.commit_record import Outcome
from elastic.report.ledger import ledger
from elastic.report.story import Line, Scored, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.gauges.counters import FIELDS, Counters, segment
from elastic.train.own_faults import EXIT_CODE
from tests.support.left import GONE_S, left_of
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, Watched
from tests.support.state_hash import state_hash

ASK_S = 0.025
"""Seconds between two questions of a witness that need not act: each takes time of the processor from the
workers.
"""


@dataclass
class Seen:
    """One worker.  Its process is held by a pidfd and its shared memory is mapped, from its first moments
    until after its death.
    """

    worker: str
    process: Watched
    counters: Counters
    final: dict[str, int] = field(default_factory=dict)
    ended: Ended | None = None
    ended_at: float = float("inf")
    """Time (``time.time()``) at which its end was seen; infinite if that was after the run."""

    def counts(self) -> dict[str, int]:
        return {name: self.counters[name] for name in FIELDS}

    def follow(self) -> None:
        if self.ended is None and (ended := self.process.ended()) is not None:
            self.ended, self.ended_at = ended, time.time()
            self.final = self.counts()


class Witness(threading.Thread):
    """Follows every worker process of a run.  ``act(witness, view)`` may interfere; it is called until it
    returns True.

    It is called every 5 ms, or every ``act.look_s`` seconds: each look takes time of the processor from the
    run.
    """

    def __init__(self, name: str, act: Any = None) -> None:
        super().__init__(daemon=True)
        self.look_s = getattr(act, "look_s", 0.005)
        self.job_name, self.act, self.seen, self.done = name, act, {}, threading.Event()  # type: ignore[var-annotated]
        self.token = ""
        self.generation = 0
        self.asked_at = 0.0
        """Time of the last question to the coordinator, by the monotonic clock."""
        self.errors: list[BaseException] = []
        self._coordinator: Any = None

    def run(self) -> None:
        try:
            while not self.done.is_set():
                self._look()
                # whoever interferes must meet a state that lasts a moment
                time.sleep(self.look_s if self.act is not None else 0.02)
        except BaseException as error:  # shown by ``close``; nobody steers the run any more, so it ends
            self.errors.append(error)
            if (coordinator := attach(self.job_name)) is not None:
                ray.kill(coordinator)

    def _look(self) -> None:
        due = self.act is not None or time.monotonic() > self.asked_at + ASK_S
        # else Ray would join any cluster of this machine
        if due and self._coordinator is None and ray.is_initialized():
            self._coordinator = attach(self.job_name)
        if due and self._coordinator is not None:
            try:
                view = ray.get(self._coordinator.view.remote(10**9), timeout=5)
            except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                view = self._coordinator = None
            if view is not None:
                self.token, self.generation, self.asked_at = (
                    view.token,
                    max(self.generation, view.generation),
                    time.monotonic(),
                )
                if self.act is not None and self.act(self, view):
                    self.act = None
        if self.token:
            self._find_workers()
        for each in self.seen.values():
            each.follow()

    def _find_workers(self) -> None:
        prefix = segment(self.token, "").name
        for path in segment(self.token, "").parent.glob(f"{prefix}*"):
            worker = path.name.removeprefix(prefix)
            if worker in self.seen or path.stat().st_size < 8 * len(FIELDS):
                continue
            counters = Counters(path, create=False)
            if counters["pid"]:
                # it ended before it was seen; a member of a world lives longer
                with suppress(ProcessLookupError):
                    self.seen[worker] = Seen(worker, Watched(counters["pid"]), counters)

    def close(self) -> None:
        self.done.set()
        self.join(PATIENCE_S)
        # less than two leases, after which a worker that nobody ended leaves by itself
        deadline = time.monotonic() + 4 * GONE_S
        for each in self.seen.values():
            each.ended = each.ended or each.process.wait(max(deadline - time.monotonic(), 0.1))
            each.final = each.final or each.counts()
        if self.errors:
            raise self.errors[0]

    def total(self, field_name: str) -> int:
        """Returns a counter, summed over all workers, dead ones too."""
        return sum(each.final[field_name] for each in self.seen.values())

    def killed(self, by: signal.Signals = signal.SIGKILL) -> list[Seen]:
        return [each for each in self.seen.values() if each.ended is not None and each.ended.signal is by]


Story = Generator[None, tuple[Witness, View], None]
"""The events of a run, one after the other; it gets each look at the run."""


def act_by(story: Story) -> Callable[[Witness, View], bool]:
    """Returns the ``act`` of a witness by which ``story`` happens.  What the story waits for lasts, so it is
    not looked for so often.
    """
    next(story)

    def act(witness: Witness, view: View) -> bool:
        try:
            story.send((witness, view))
        except StopIteration:
            return True
        return False

    act.look_s = ASK_S  # type: ignore[attr-defined]
    return act


def comes(
    true: Callable[[Witness, View], Any],
) -> Generator[None, tuple[Witness, View], tuple[Witness, View]]:
    """Waits, in a story, for a look at which ``true``, and returns it."""
    while not true(*(look := (yield))):
        pass
    return look


@dataclass
class Trial:
    """A run, with everything that is known of it."""

    job: Job
    result: Result
    witness: Witness
    lines: list[Line]
    ledger: dict[int, Outcome]
    hash: str
    losses: list[float]


def trial(
    job: Job, act: Any = None, *, hash_it: bool = True, tell: Callable[[Line], None] = lambda _: None
) -> Trial:
    """Runs ``job`` on the cluster of this process, and exports and hashes its last state.  ``tell`` gets each
    line of its story at once.
    """
    witness, lines = Witness(job.name, act), list[Line]()

    def show(line: Line) -> None:
        print(line)  # a test that fails shows it
        lines.append(line)
        tell(line)

    witness.start()
    try:
        result = launch(job, show=show)
    finally:
        witness.close()
    steps = ledger(Run.open(job).segments())
    return Trial(
        job,
        result,
        witness,
        lines,
        steps,
        exported_hash(job) if hash_it else "",
        [steps[step].loss for step in sorted(steps)],
    )


def alone(job: Job) -> Any:
    """Runs the job in one process without Ray.

    Returns its hash, its losses, also those of validations, and the samples that the cursor gives each step.
    """
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    dataset = load(job.data.dataset)(**job.data.args)
    lengths = dataset.lengths if job.data.group_by_length else None
    cursor = Cursor(len(dataset), job.global_batch, job.seed, job.data.sampling, lengths)
    due = {
        step: SimpleNamespace(
            samples=tuple(
                cursor.microbatch_ids(step, each, job.microbatch) for each in range(job.microbatches)
            )
        )
        for step in range(1, job.steps + 1)
    }
    losses = [line.loss for line in lines if isinstance(line, StepLine)]
    return SimpleNamespace(hash=exported_hash(job), losses=losses, validated=validated(lines), ledger=due)


def validated(lines: Iterable[Line]) -> list[tuple[int, float]]:
    """Returns the step and the loss of each validation."""
    return [(line.step, line.loss) for line in lines if isinstance(line, Scored)]


def exported_hash(job: Job) -> str:
    """Returns the sha256 of the newest checkpoint, exported as plain safetensors, or "" without a checkpoint."""
    run = Run.open(job)
    version = run.newest()
    if version is None:
        return ""
    with TemporaryDirectory() as folder:
        run.checkpoints.export(version, Path(folder))
        return state_hash(sorted(Path(folder).glob("*.safetensors")))


def samples(steps: dict[int, Outcome]) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Returns (step, samples of each microbatch) for each step of the ledger, in order."""
    return [(step, outcome.samples) for step, outcome in sorted(steps.items())]


ENDS = {
    "SIGKILL": [("signal", signal.SIGKILL)],
    "SIGSEGV": [("signal", signal.SIGSEGV)],
    "exit": [("exit code", EXIT_CODE)],
    "SIGSTOP": [("signal", signal.SIGKILL)],
    "held_gil": [("signal", signal.SIGKILL)],
    # Ray and its keeper both end it: either may be first
    "device_assert": [("signal", signal.SIGKILL), ("exit code", 1)],
}
"""Statuses that the kernel may report for the victim, by kind of fault.  Elastic kills a victim that only
stands still; a victim of kind "exception" lives, so this kind is not listed."""
CAUSES = {"exception": "job", "device_assert": "device"}
"""Causes that victims report, by kind of fault; victims of other kinds report nothing."""
SAID: Mapping[str, str] = {"job": "InjectedError", "device": "device-side assert"}
"""Words that the report contains, by cause."""
LIBRARY = re.compile(r"\.cc:\d|\.cpp:\d|[Gg]loo|NCCL|Connection (closed|reset)|socket|keys: /")
"""Words of gloo, NCCL and torch's store."""
LEFT = ("exit code", 0)
"""Status of a process that ended in good order."""


def how(ended: Ended | None) -> tuple[str, Any]:
    """Returns how a process ended, as the kernel reports it."""
    assert ended is not None
    return ("signal", ended.signal) if ended.signal is not None else ("exit code", ended.exit_code)


@dataclass(frozen=True)
class Formed:
    """One generation, as the journal has it.  ``redone`` is the number of committed steps that it does again;
    ``ahead`` is the attempt with which it was connected beside the steps before it, or 0.
    """

    generation: int
    members: tuple[str, ...]
    layout: tuple[int, int]
    tier: str
    step: int
    redone: int
    ahead: int


def formed(records: Iterable[Mapping[str, Any]]) -> list[Formed]:
    """Returns every world that was to be formed, in order."""
    found, reached = [], 0
    for record in records:
        told = codec.parts_of(record["event"])
        seen = [
            each
            for event in told
            for each in ([event["outcome"]] if event["$"] == "StepDone" else event.get("outcomes", ()))
        ]
        latest = found[-1].generation if found else 1
        # those of earlier worlds are known
        reached = max([reached, *(each["step"] for each in seen if each["generation"] == latest)])
        for action in record["actions"]:
            plan = action.get("plan")
            # a coordinator may say it again
            if action["$"] == "Form" and plan["generation"] not in [each.generation for each in found]:
                layout, step = plan["layout"], plan["version"]["step"]
                degrees = (layout["dp_replicate"], layout["dp_shard"])
                found.append(
                    Formed(
                        plan["generation"],
                        tuple(plan["members"]),
                        degrees,
                        plan["tier"],
                        step,
                        reached - step,
                        plan.get("ahead", 0),
                    )
                )
                reached = step
    return found


def assert_survived(
    chaos: Trial,
    reference: Trial | Any,
    *,
    worlds: Sequence[int],
    tiers: Sequence[str],
    unsaved: int = 0,
    said: Mapping[str, str] = SAID,
) -> None:
    """Makes the six assertions, for the faults of the job.

    ``worlds``: number of members of each generation that was to be formed, in order; ``tiers``: tier from
    which each of them began; ``unsaved``: number of steps that may be done again, beside those in ``REDONE``,
    because the bucket was down; ``said``: words of the reports of members that cannot go on, by cause.
    """
    job, witness = chaos.job, chaos.witness
    records = Run.open(job).records()
    generations = formed(records)
    # 0: it ended well, and it learned
    assert chaos.result.state == "Finished", chaos.result
    assert chaos.losses[-1] <= 0.8 * chaos.losses[0]
    # 4: the path: exactly the worlds that were due
    assert [len(each.members) for each in generations] == list(worlds), generations
    assert witness.generation == len(worlds)
    # 1: the faults happened, inside the run, as the kernel reports them
    assert_struck(job, witness, generations)
    assert_exceptions(job, witness, generations, records, said)
    # 2: the bits
    assert chaos.losses == reference.losses
    assert chaos.hash == reference.hash
    # R14: exactly once
    assert samples(chaos.ledger) == samples(reference.ledger)
    assert sorted(chaos.ledger) == list(range(1, job.steps + 1))
    # 3, 5: the work and the tier
    assert_work(job, witness.total("microbatches_run"), generations, unsaved)
    assert [each.tier for each in generations] == list(tiers), generations
    assert_bytes(witness, generations)
    # what is said to the user is in plain words; those of a communication library are in the logs
    told = [
        line.text
        for line in chaos.lines
        if isinstance(line, Sentence) and "its world broke (peer" in line.text
    ]
    assert not [text for text in told if LIBRARY.search(text)], told
    # 6: nothing is left
    assert_nothing_left(chaos)


def assert_struck(job: Job, witness: Witness, generations: Sequence[Formed]) -> None:
    """Checks that each fault ended its victim in its way, generation and step, and that every other member
    ended in good order.

    A member of the last world is one process from first to last, and has applied updates.
    """
    by_seat = {
        (each.generation, rank): member for each in generations for rank, member in enumerate(each.members)
    }
    fatal = {by_seat[fault.generation, fault.world_rank]: fault for fault in job.faults if fault.kind in ENDS}
    ends = {worker: how(witness.seen[worker].ended) for each in generations for worker in each.members}
    wrong = {
        worker: end
        for worker, end in ends.items()
        if end not in (ENDS[fatal[worker].kind] if worker in fatal else [LEFT])
    }
    assert not wrong, (wrong, fatal)
    for worker, fault in fatal.items():
        final = witness.seen[worker].final
        assert final["generation"] == fault.generation, (fault, final)
        assert (
            0 < generations[fault.generation - 1].step < job.steps - 1 or 0 < final["step"] < job.steps - 1
        ), (fault, final)
        if fault.step and fault.point != "save":
            assert final["step"] == fault.step - 1, (fault, final)
    last = generations[-1]
    for worker in last.members:
        final = witness.seen[worker].final
        assert (final["pid"], final["generation"]) == (witness.seen[worker].process.pid, last.generation), (
            worker,
            final,
        )
        assert final["updates_applied"] > 0


def assert_exceptions(
    job: Job,
    witness: Witness,
    generations: Sequence[Formed],
    records: Sequence[Mapping[str, Any]],
    said: Mapping[str, str],
) -> None:
    """Checks that each process that raised reports it and is fenced.

    The process is a member of the next world too, unless it has lost its device.

    A process that raised in the copy of a save only writes this into its log: the copy is made once more, and
    no save fails.
    """
    events = [event for record in records for event in codec.parts_of(record["event"])]
    told = [event for event in events if event["$"] == "Broken" and event["cause"] != "peer"]
    raised = [fault for fault in job.faults if fault.kind in CAUSES]
    broke = [fault for fault in raised if fault.point != "save"]
    expected = [
        (generations[fault.generation - 1].members[fault.world_rank], fault.generation, CAUSES[fault.kind])
        for fault in broke
    ]
    assert [(event["worker"], event["generation"], event["cause"]) for event in told] == expected, told
    assert all(said[event["cause"]] in event["signature"] for event in told), told
    for worker, generation, cause in expected:
        assert any(
            event["$"] == "Fenced" and (event["worker"], event["generation"]) == (worker, generation)
            for event in events
        )
        goes_on = worker in generations[generation].members
        assert goes_on == (cause == "job"), (
            "who raised is a member of the next world, who lost its device is not"
        )
        assert not goes_on or witness.seen[worker].final["generation"] > generation
    run = Run.open(job)
    for fault in raised:
        if fault.point == "save":
            member = generations[fault.generation - 1].members[fault.world_rank]
            (log,) = [key for key in run.store.list(f"{job.name}/logs/") if key.endswith(f"/{member}.log")]
            assert "InjectedError" in run.store.get(log).decode(errors="replace"), log
    assert not [
        event for event in events if event["$"] == "SaveFailed" and "InjectedError" in event["reason"]
    ]


REDONE: Mapping[str, Callable[[Job], int]] = {
    "init": lambda job: 0,
    "live": lambda job: 0,
    "host": lambda job: 2 * job.copies.buddy_every if isinstance(job.copies.buddy_every, int) else 1,
    "bucket": lambda job: 2 * job.checkpoint.save_every,
}
"""Number of committed steps that a world may do again, by the tier from which it begins.

Every step is copied, but a copy under way dies with its worker.  If ``buddy_every`` is a number, nodes die,
and one more copy may be on its way to a buddy.
"""


def assert_work(job: Job, work: int, generations: Sequence[Formed], unsaved: int = 0) -> None:
    """Checks how many microbatches all workers ran, dead ones too.

    They ran at least every step once, and at most also the steps done again by the journal and one step in
    flight at each fault.
    """
    for each in generations:
        assert each.redone <= REDONE[each.tier](job) + (unsaved if each.tier == "bucket" else 0), each
    undisturbed, again = job.steps * job.microbatches, sum(each.redone for each in generations)
    assert undisturbed <= work <= undisturbed + (again + len(job.faults)) * job.microbatches, (
        work,
        undisturbed,
        again,
    )


def assert_bytes(witness: Witness, generations: Sequence[Formed]) -> None:
    """Checks the healed bytes, counted where they arrived.

    Bytes come from the bucket, and from copies, if and only if some world begins from there.  If a world
    grows, some come from its peers.
    """
    live, host, bucket = (witness.total(f"healed_{tier}_bytes") for tier in ("live", "host", "bucket"))
    grew = any(
        len(after.members) > len(before.members) and after.tier == "live"
        for before, after in pairwise(generations)
    )
    assert (bucket > 0) == any(each.tier == "bucket" for each in generations), bucket
    assert (host > 0) == any(each.tier == "host" for each in generations), host
    assert not grew or live > 0, live


def assert_nothing_left(chaos: Trial, deadline_s: float = GONE_S) -> None:
    """Checks that no process, segment, memory of copies, actor, placement group or log of the run is left:
    see ``tests/support/left.py``.
    """
    assert all(not seen.process.running for seen in chaos.witness.seen.values())
    assert not (left := left_of(chaos.job.name, chaos.witness.token, deadline_s)), left
