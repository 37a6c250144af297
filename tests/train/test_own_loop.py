"""A loop of one's own: the bits of our own loop in every layout, numbers and side effects of its own, and a
sentence for wrong use.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from actors.launch import launch
from elastic.control.run import Finished
from elastic.engine.world import World
from elastic.errors import CodeError, JobError, LoopError, PlatformGaveUp
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import GO_ON, Outcome
from elastic.report.story import Line, StepLine
from elastic.runs.begin import finished
from elastic.runs.run import Run
from elastic.train.alone import local
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from elastic.train.context import Context
from elastic.train.effects import Effects
from elastic.train.step import Step
from storage.errors import Unavailable
from storage.objects import Data, ObjectStore
from tests.support.chaos import exported_hash
from tests.support.own_loops import steps_in
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.segments import Member, Part, Trained, finish, here, member, shard_hash, train_here
from tests.support.stores import Forwarding
from tests.support.toys import SMALL, small_job, toy_job

HERE = "tests.support.own_loops"
STEPS = 4


def looped(world: World, job: Job, version: Version) -> Part:
    """Trains with the loop of the job."""
    outcomes, hashes = list[Outcome](), list[str]()
    with member(world, job, version) as me:

        def done(outcome: Outcome, metrics: Any) -> None:
            outcomes.append(outcome)
            hashes.append(shard_hash(me.state.shard))

        effects = Effects(ObjectStore.open(job.bucket), job.name, tells=world.rank == 0)
        assert me.session.loop is not None
        Context(job, me.state, partial(steps_of, me, done), effects).run(me.session.loop)
        return Part(outcomes, me.save(), hashes, me.rates, me.session.counters["microbatches_run"])


def steps_of(me: Member, done: Any) -> Iterator[Step]:
    with me.fence as rules:
        rules.go(me.shape.generation)
    for number in range(me.state.shard.version.step + 1, me.session.job.steps + 1):
        yield (step := Step(me.session, me.state, me.fence, me.shape, number, lambda: GO_ON, done=done))
        assert step.outcome is not None


def with_loop(ranks: Ranks, job: Job, layout: Layout) -> Trained:
    arguments = job, Version(0, 0)
    parts = ranks.run(layout, looped, *arguments) if layout.world > 1 else [here(looped, *arguments)]
    end = Version(job.steps, parts[0].outcomes[-1].generation)
    return Trained(finish(job, layout, [part.receipt for part in parts], end), end, parts)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"precision": "fp16", "recompute": "block"}, marks=pytest.mark.full),
        {"precision": "bf16", "global_batch": 12},
    ],
    ids=str,
)
def test_u4_a_loop_of_ones_own_has_the_bits_of_ours_in_every_layout(
    ranks: Ranks, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """U4: batch by batch and in one call, with idle rounds in the last of the settings; the control leaves a
    microbatch out.
    """
    settings = SMALL | {"steps": 3} | settings
    ours = train_here(toy_job(tmp_path / "ours", **settings), 3)
    for loop, layout in (("whole", Layout(1, 2)), ("by_batches", Layout(2, 2)), ("by_batches", Layout(1, 1))):
        found = with_loop(
            ranks, toy_job(tmp_path / f"{loop} {layout}", loop=f"{HERE}:{loop}", **settings), layout
        )
        assert (found.hash, [each.loss for each in found.outcomes]) == (
            ours.hash,
            [each.loss for each in ours.outcomes],
        )
    control = with_loop(
        ranks, toy_job(tmp_path / "control", loop=f"{HERE}:without_one", **settings), Layout(1, 1)
    )
    assert control.hash != ours.hash
    assert ours.outcomes[-1].loss < ours.outcomes[0].loss


def stopped(job: Job, at: int) -> list[Line]:
    """Trains in this process, with a stop after the line of step ``at``, and resumes."""
    lines: list[Line] = []

    def show(line: Line) -> None:
        lines.append(line)
        if (
            isinstance(line, StepLine)
            and line.step == at
            and sum(isinstance(each, StepLine) for each in lines) == at
        ):
            raise KeyboardInterrupt

    assert run_local(job, show)[::2] == ("Stopped", at)
    assert run_local(job, show)[0] == "Finished"
    return lines


@pytest.mark.fast
def test_u4_numbers_and_side_effects_in_this_process_over_a_stop(tmp_path: Path) -> None:
    """U4: the same bits with ``--local``; each step is told once, although the stop comes before step 2 is
    told; the metrics have the numbers.
    """
    ours, job = (
        small_job(tmp_path / "ours", steps=STEPS),
        small_job(tmp_path / "own", steps=STEPS, loop=f"{HERE}:told"),
    )
    run_local(ours, lambda _: None)
    (tmp_path / "own").mkdir()
    stopped(job, 2)
    assert exported_hash(job) == exported_hash(ours)
    assert steps_in(tmp_path / "own" / "committed") == [1, 2, 3, 4]
    rows = [
        json.loads(line)
        for file in sorted((tmp_path / "own" / "toy" / "metrics").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert [row["user/double"] for row in rows] == [2, 4, 6, 8]
    assert all(row["terms"] > 0 and list(row).index("terms") > list(row).index("tokens") for row in rows)


@pytest.mark.fast
@pytest.mark.parametrize("how", ["break", "all"])
def test_a_loop_ends_its_run_with_a_save(tmp_path: Path, how: str) -> None:
    """U4: what comes after the loop runs once; the same command says that the run is finished, and does no
    step.

    ``--resume`` with that step goes on, and so does a branch with more steps.
    """
    flat = {"schedule": {"kind": "constant"}}
    shorter = small_job(tmp_path / "shorter", steps=3, **flat)
    job = small_job(tmp_path / "own", steps=6, loop=f"{HERE}:ends", export={"every": 1000}, **flat)
    run_local(shorter, lambda _: None)
    (tmp_path / "own" / "how").mkdir(parents=True)
    (tmp_path / "own" / "how" / how).touch()
    why = "it is good enough" if how == "all" else "the loop was left"
    for _ in range(2):
        lines: list[Line] = []
        assert run_local(job, lines.append) == ("Finished", why, 3)
        run = Run.open(job)
        assert exported_hash(job) == exported_hash(shorter) and run.newest() == Version(3, 1)
        assert run.end() == Finished(3, why) and finished(Run.look(job)) == (
            f"finished: step 3 is in the bucket: {why}",
            3,
        )
        assert steps_in(tmp_path / "own" / "after")[-1:] == [3] and [*tmp_path.glob("own/toy/exports/*3")]
    assert not [line for line in lines if isinstance(line, StepLine)]
    (tmp_path / "own" / "how" / how).unlink()
    gone_on = launch(job, local=True, resume=3, show=lambda line: None)
    assert (gone_on.state, gone_on.step) == ("Finished", 6) and exported_hash(job) != exported_hash(shorter)
    assert (
        launch(job, local=True, resume=3, show=lambda line: None).step == 6 and len(run.branches.every()) == 1
    )
    more = job.replace(steps=7)
    Run.look(more, branch=True).branch(0.0)
    assert run_local(more, lines.append)[::2] == ("Finished", 7)


@pytest.mark.fast
@pytest.mark.parametrize("how", ["break", "all"])
def test_an_error_after_the_loop_does_not_move_the_end(tmp_path: Path, how: str) -> None:
    """U4: the step is saved as the last one by then.  The control: an error within the loop, behind the same
    commit, ends no run.
    """
    for loop in ("ends", "fails_behind"):
        job = small_job(tmp_path / loop, steps=6, loop=f"{HERE}:{loop}")
        (tmp_path / loop / "how").mkdir(parents=True)
        for each in (how, "fails"):
            (tmp_path / loop / "how" / each).touch()
        with pytest.raises(RuntimeError, match="the user's own words"):
            run_local(job, lambda _: None)
        run = Run.open(job)
        assert run.newest() == Version(3, 1) and isinstance(run.end(), Finished) is (loop == "ends") is (
            finished(Run.look(job)) is not None
        )


def unavailable(*_: object) -> None:
    raise Unavailable("toy", "the bucket is down")


@pytest.mark.fast
def test_an_end_without_its_save_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """U4: the loop ends the run, and the bucket takes no save.  The next start does the steps again, and ends
    with a save.

    The control: the note of the end is there, which a process that dies after the save leaves, too.
    """
    job = small_job(tmp_path, steps=6, loop=f"{HERE}:ends")
    (tmp_path / "how").mkdir()
    (tmp_path / "how" / "all").touch()
    with monkeypatch.context() as patch:
        patch.setattr(local, "save_here", unavailable)
        with pytest.raises(PlatformGaveUp):
            run_local(job, lambda _: None)
    run = Run.open(job)
    assert (
        [*tmp_path.glob("toy/ends/*")]
        and run.end() is None
        and run.newest() is None
        and not finished(Run.look(job))
    )
    assert run_local(job, lambda _: None) == ("Finished", "it is good enough", 3)


WRONG = [
    ("breaks_at_once", r"it ended after step 0 of 4; go through ctx\.steps\(\)"),
    (
        "breaks_within",
        (r"it was left within step 3; leave the loop after step\.commit\(\), or before the first batch"),
    ),
    ("stops_without_a_word", r"ctx\.stop\(''\): say why in words"),
    ("never_steps", "it ended after step 0 of 4"),
    ("no_run", r"step 1: step\.commit\(\) before step\.run\(\); run the microbatches of the step first"),
    ("runs_twice", "step 1: the microbatches are run twice"),
    ("no_commit", r"step 1 is not committed; call step\.commit\(\), and do not skip a step"),
    ("commits_twice", r"step 1: step\.commit\(\) is called twice"),
    (
        "leaves_batches",
        (
            r"step 1: step\.commit\(\) after 1 of 4 microbatches; run all of step\.batches\(\), "
            r"without `break`"
        ),
    ),
    ("swallows", r"step 1: step\.commit\(\) after 0 of 4 microbatches"),
    ("no_backward", r"step 1: a microbatch had no step\.backward\(loss_sum, count\)"),
    ("late_function", r"ctx\.on_committed\(\) after ctx\.steps\(\) has begun"),
]


@pytest.mark.fast
@pytest.mark.parametrize(("name", "said"), WRONG)
def test_wrong_use_gets_a_sentence(tmp_path: Path, name: str, said: str) -> None:
    """U4."""
    with pytest.raises(LoopError, match=rf"^loop = '{HERE}:{name}': {said}"):
        run_local(small_job(tmp_path, steps=STEPS, loop=f"{HERE}:{name}"), lambda _: None)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bad_metrics", r"step.commit(metrics={'accuracy': nan}): the value is not a finite number"),
        (
            "taken_metrics",
            (
                r"step.commit(metrics={'loss': 1.0}): the metrics of every step have 'loss' "
                r"already"
            ),
        ),
        ("many_metrics", r"step.commit(metrics=…) has 33 numbers, and a step may have 32"),
        ("mean", "step.backward() got (a tensor of shape [], NoneType None); it must return (sum, count)"),
    ],
)
def test_wrong_values_get_a_sentence(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(JobError, match=f"^{re.escape(said)}"):
        run_local(small_job(tmp_path, steps=STEPS, loop=f"{HERE}:{name}"), lambda _: None)
    assert not [*tmp_path.glob("toy/checkpoints/*")], "no step was committed"


@pytest.mark.fast
@pytest.mark.parametrize(("name", "function"), [("hides", "failing"), ("fails", "fails")])
def test_an_exception_of_the_users_comes_with_its_frame_even_if_the_loop_hides_it(
    tmp_path: Path, name: str, function: str
) -> None:
    """U4."""
    with pytest.raises(RuntimeError, match="the user's own words") as caught:
        run_local(small_job(tmp_path, steps=STEPS, loop=f"{HERE}:{name}"), lambda _: None)
    assert caught.traceback[-1].name == function


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wholly", f"did you mean '{HERE}:whole'"),
        ("A_NUMBER", "names a int; name a function"),
        ("Path", "names a class"),
    ],
)
def test_what_is_no_loop_is_refused_before_a_worker_starts(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(CodeError, match=f"^loop = '{HERE}:{name}'.*{said}"):
        preflight(toy_job(tmp_path, loop=f"{HERE}:{name}"))


@pytest.mark.fast
def test_the_digest_of_a_run_without_a_loop_stays() -> None:
    assert toy_job("/b", loop="").digest == toy_job("/b").digest != toy_job("/b", loop=f"{HERE}:whole").digest


@pytest.mark.fast
def test_u4_a_step_is_told_once_whoever_tells_it(tmp_path: Path) -> None:
    """U4: another process goes on where the one before noted; steps that are done again are not told again; a
    failure tells it again.
    """
    store, seen = ObjectStore.open(str(tmp_path)), list[int]()

    def teller(function: Any = seen.append, *, tells: bool = True) -> Effects:
        effects = Effects(store, "toy", tells=tells)
        effects.add(function)
        return effects

    first = teller()
    first.begin(0)
    for step in (1, 2, 3):
        first.committed(step)
    first.close(broken=False)
    teller(tells=False).begin(9)
    again = teller()
    again.begin(2)  # the state fell back behind what was told
    again.committed(3)
    again.committed(4)
    again.close(broken=False)
    assert seen == [1, 2, 3, 4]

    def dies(step: int) -> None:
        raise RuntimeError

    broken = teller(dies)
    broken.begin(4)
    with pytest.raises(RuntimeError):
        broken.committed(5)
    broken.close(broken=True)
    teller().begin(5)
    assert seen == [1, 2, 3, 4, 5], "owed, and told when the next world stands there"


class Down(Forwarding):
    """A store that does not answer while it is down."""

    down = True

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        if self.down:
            raise Unavailable(key, "it is down")
        return super().get(key, start, stop)


def test_a_bucket_that_is_down_ends_no_world_and_loses_no_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps that were told before stay told.  The control: the same steps are told at once if the bucket
    answers.
    """
    before, after = list[int](), list[int]()
    first = Effects(ObjectStore.open(str(tmp_path)), "toy", tells=True)
    first.add(before.append)
    first.begin(0)
    first.committed(1)
    first.close(broken=False)
    store = Down(ObjectStore.open(str(tmp_path)))
    again = Effects(store, "toy", tells=True)
    again.add(after.append)
    again.begin(2)
    again.committed(3)
    assert (before, after) == (
        [1],
        [],
    ) and "the bucket does not say yet for which steps" in capsys.readouterr().out
    store.down = False
    again.committed(4)
    again.close(broken=False)
    assert after == [2, 3, 4]


class Held(Forwarding):
    """A store that takes nothing more once it is held, until the test lets it; ``writes`` are the steps in
    the notes that it was given.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.holds, self.held, self.free, self.writes = False, Event(), Event(), list[int]()

    def put(self, key: str, data: Data) -> None:
        self.writes.append(json.loads(bytes(data))["step"])
        if self.holds:
            self.held.set()
            if not self.free.wait(PATIENCE_S):
                raise Unavailable(key, "nothing has let it go, since the step waits for it")
        super().put(key, data)


@pytest.mark.fast
def test_u4_no_step_waits_for_the_note_of_what_was_told(tmp_path: Path) -> None:
    """U4: while the bucket holds the note of step 1, four more steps are told.  What was told meanwhile goes
    in one note, and the world does not end before it is there.  The control: a note that the bucket has taken
    is read by the next teller, so that one tells step 6 alone.
    """
    store, seen, after = Held(ObjectStore.open(str(tmp_path))), list[int](), list[int]()
    effects = Effects(store, "toy", tells=True)
    effects.add(seen.append)
    effects.begin(0)
    store.holds = True
    effects.committed(1)
    assert store.held.wait(PATIENCE_S)
    for step in (2, 3, 4, 5):
        effects.committed(step)
    assert seen == [1, 2, 3, 4, 5] and store.writes == [0, 1]
    store.holds = False
    store.free.set()
    effects.close(broken=False)
    assert store.writes == [0, 1, 5]
    again = Effects(ObjectStore.open(str(tmp_path)), "toy", tells=True)
    again.add(after.append)
    again.begin(4)
    again.committed(6)
    again.close(broken=False)
    assert after == [6]


@pytest.mark.fast
def test_u4_a_kill_at_any_moment_loses_no_step_and_tells_again_what_has_no_note(tmp_path: Path) -> None:
    """U4: a process is killed by SIGKILL at each moment between two steps, in a function and around each
    write of the note, and another one goes on.  Every step is told to its end; told again is what has no
    note, and nothing else.  If the bucket has taken each note before the next step, that is one step.  The
    control: a process that notes before it tells loses steps.
    """

    told = subprocess.run(
        [sys.executable, "-m", "tests.support.tellers", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    found, control = json.loads(told.stdout)
    assert len(found) > 40 and {each["noted"] for each in found} >= {None, 0, 1, 2, 3, 4, 5}
    for each in found:
        assert {*each["finished"]} == {*range(1, 7)}
        assert each["told"] == [*each["before"], *range((each["noted"] or 0) + 1, 7)]
        assert not each["waits"] or max(each["before"], default=0) - (each["noted"] or 0) <= 1
    assert any({*each["finished"]} != {*range(1, 7)} for each in control)
