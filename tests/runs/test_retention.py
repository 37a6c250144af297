"""L7: rounds of deletions on a run in its bucket: what is protected, who may delete, and the commands that
do.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from actors.cli import checkpoint_commands
from elastic.config.values import seconds_of
from elastic.errors import JobError, PlatformGaveUp
from elastic.ids import Version
from elastic.plan.layout import Layout
from elastic.plan.retention import Keep
from elastic.protocol.actions import Retain
from elastic.protocol.lineage import Lineage, extended
from elastic.runs import branches, forks
from elastic.runs.retention import Retention, collect
from elastic.runs.run import Run
from storage.checkpoints import MANIFEST, Checkpoints
from storage.errors import Exists, Full, Unavailable
from storage.objects import PARTIAL, ObjectStore
from tests.storage.states import TENSORS, state_of, write
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

KEEP, STATE = Keep(last=2), state_of(TENSORS[:2], seed=1)
_numbers = itertools.count()


class Saved:
    """A run with a checkpoint at each of ``steps``, all of generation 1, and a claim."""

    def __init__(self, steps: range, **settings: object) -> None:
        self.run = Run.open(toy_job(f"memory://retention-{next(_numbers)}", **settings))
        self.claim, self.lineage = self.run.claim("local"), ((1, steps[-1]),)
        for step in steps:
            self.save(Version(step, 1), ((1, step),))

    def save(self, version: Version, lineage: Lineage, now: float | None = None) -> None:
        self.run.commit(version, write(self.run.checkpoints, version, STATE, 1), lineage, Layout(), now)
        self.lineage = lineage

    def asked(self, *spared: Version, best: Version | None = None) -> Retain:
        return Retain((Version(self.lineage[-1][1], self.lineage[-1][0]),), self.lineage, best, spared)

    def rounds(self, keep: Keep = KEEP, asked: Retain | None = None) -> None:
        for _ in range(2):
            collect(self.run, keep, asked or self.asked(), self.claim)

    def steps(self) -> list[int]:
        """Returns the steps of which there is any object."""
        return sorted({int(key.split("/")[2]) for key in self.run.store.list(f"{self.run.job.name}/steps/")})

    def good(self) -> list[int]:
        return [each.version.step for each in self.run.checkpoints.versions() if each.good]


def test_l7_a_round_marks_and_the_next_one_removes() -> None:
    saved = Saved(range(1, 7))
    collect(saved.run, KEEP, saved.asked(), saved.claim)
    assert saved.good() == [5, 6] and saved.steps() == [1, 2, 3, 4, 5, 6], "whoever reads one still can"
    collect(saved.run, KEEP, saved.asked(), saved.claim)
    assert saved.good() == saved.steps() == [5, 6]
    control = Saved(range(1, 7))
    control.rounds(Keep())
    assert control.good() == [1, 2, 3, 4, 5, 6], "the control: without a rule nothing is deleted"


def test_l7_what_is_younger_than_the_job_says_stays() -> None:
    """A save an hour.  A manifest without a time, as older releases wrote them, counts as written with the
    one after it.
    """
    saved = Saved(range(1, 2))
    for step in range(2, 11):
        saved.save(Version(step, 1), ((1, step),), 3600.0 * step)
    old = saved.run.checkpoints.manifest(Version(6, 1))
    about = {name: value for name, value in old.about.items() if name != "written_at"}
    saved.run.store.put(
        f"{saved.run.checkpoints.folder(Version(6, 1))}/{MANIFEST}", replace(old, about=about).to_bytes()
    )
    keep, now = Keep(last=2, younger_s=4 * 3600.0), 3600.0 * 10 + 60
    for _ in range(2):
        collect(saved.run, keep, saved.asked(), saved.claim, now)
    assert saved.steps() == saved.good() == [6, 7, 8, 9, 10]
    assert saved.run.checkpoints.manifest(Version(6, 1)).written_at is None
    for _ in range(2):
        collect(saved.run, keep, saved.asked(), saved.claim, now + 3600.0)
    assert saved.steps() == [8, 9, 10]
    saved.rounds(Keep(last=2))
    assert saved.steps() == [9, 10], "the control"


def test_l7_a_run_that_starts_again_knows_when_its_checkpoints_were_written() -> None:
    saved = Saved(range(1, 2), checkpoint={"keep_last": 2, "keep_younger": "24h"})
    for step in range(2, 5):
        saved.save(Version(step, 1), ((1, step),), 100.0 * step)
    history = saved.run.state(2, 1000.0).history
    assert (
        history.written[1:] == tuple((Version(step, 1), 100.0 * step) for step in (2, 3, 4))
        and len(history.written) == 4
    )
    control = Run(saved.run.job.replace(checkpoint={"keep_younger": ""}), saved.run.store)
    assert control.state(2, 1000.0).history.written == ()


def test_a_save_made_again_at_another_time_is_the_same_save() -> None:
    """The first manifest stays, with its time; the control is another lineage."""
    saved = Saved(range(1, 2))
    version, receipts = Version(2, 1), write(saved.run.checkpoints, Version(2, 1), STATE, 1)
    first = saved.run.commit(version, receipts, ((1, 2),), Layout(), 100.0)
    assert saved.run.commit(version, receipts, ((1, 2),), Layout(), 200.0) == first
    assert saved.run.checkpoints.manifest(version).written_at == 100.0
    other = Saved(range(1, 2))
    other.run.commit(version, write(other.run.checkpoints, version, STATE, 1), ((1, 2),), Layout(), 300.0)
    assert other.run.checkpoints.manifest(version).same_but_for_time(saved.run.checkpoints.manifest(version))
    with pytest.raises(Exists):
        saved.run.commit(version, receipts, ((1, 1), (2, 2)), Layout(), 100.0)


def test_l7_what_is_needed_is_never_deleted() -> None:
    """A branch, what is read or on its way, the best, what is newer than the newest good one, and all of it
    without a good one.
    """
    saved = Saved(range(1, 9))
    write(saved.run.checkpoints, Version(2, 1), STATE, 2)
    write(saved.run.checkpoints, Version(4, 7), STATE, 1)  # begun by a dead generation
    write(saved.run.checkpoints, Version(5, 7), STATE, 1)  # on its way
    write(saved.run.checkpoints, Version(9, 7), STATE, 1)  # newer
    job = saved.run.job
    branches.begin(saved.run.branches, job.replace(steps=99), job, Version(2, 1), 0.0)
    saved.rounds(Keep(last=2, best=True), saved.asked(Version(5, 7), Version(3, 1), best=Version(6, 1)))
    left = {each.version for each in saved.run.checkpoints.versions()}
    assert left == {*(Version(step, 1) for step in (2, 3, 6, 7, 8)), Version(5, 7), Version(9, 7)}
    assert all(saved.run.checkpoints.verify(version).good for version in left if version.generation == 1)
    for step in (2, 3, 6, 7, 8):
        saved.run.checkpoints.quarantine(Version(step, 1), "all are damaged")
    saved.rounds()
    assert {each.version for each in saved.run.checkpoints.versions()} == left, "there is no good one"


def test_l7_what_a_branch_needs_stays_off_the_line_too() -> None:
    """The run has fallen back behind it since.  A branch may also begin between the mark and the removal.
    The control is beside it.
    """
    saved = Saved(range(1, 6))
    for step in range(3, 9):
        saved.save(Version(step, 2), ((1, 2), (2, step)))
    job = saved.run.job
    branches.begin(saved.run.branches, job.replace(steps=99), job, Version(4, 1), 0.0)
    collect(saved.run, KEEP, saved.asked(), saved.claim)
    listed = {each.version: each.deleted for each in saved.run.checkpoints.versions()}
    assert listed[Version(3, 1)] and listed[Version(5, 1)] and not listed[Version(4, 1)]
    branches.begin(saved.run.branches, job.replace(steps=98), job, Version(5, 1), 0.0, number=3)
    collect(saved.run, KEEP, saved.asked(), saved.claim)
    left = {each.version for each in saved.run.checkpoints.versions()}
    assert left == {Version(4, 1), Version(5, 1), Version(7, 2), Version(8, 2)}
    assert saved.run.checkpoints.verify(Version(4, 1)).good


def test_l7_what_a_fall_back_abandoned_is_collected_once_the_run_has_passed_it() -> None:
    saved = Saved(range(1, 7))
    line = extended(((1, 3),), Version(5, 2))
    saved.save(Version(5, 2), line)
    saved.rounds()
    assert [each.version for each in saved.run.checkpoints.versions()] == [
        Version(3, 1),
        Version(5, 2),
        Version(6, 1),
    ]
    saved.save(Version(7, 2), extended(line, Version(7, 2)))
    saved.rounds()
    assert [each.version for each in saved.run.checkpoints.versions()] == [Version(5, 2), Version(7, 2)]
    assert saved.run.newest() == Version(7, 2)


def test_l7_an_owner_that_was_replaced_deletes_nothing() -> None:
    saved = Saved(range(1, 7))
    collect(saved.run, KEEP, saved.asked(), saved.claim)
    saved.run.claim("elsewhere", "another life")
    with pytest.raises(Exists):
        collect(saved.run, KEEP, saved.asked(), saved.claim)
    assert saved.steps() == [1, 2, 3, 4, 5, 6]
    collect(saved.run, KEEP, saved.asked(), saved.claim + 1)
    assert saved.steps() == [5, 6], "the control: the next one ends what this one has begun"


class Down(Forwarding):
    """Deletes nothing as long as it is down."""

    down = True

    def delete(self, key: str) -> None:
        if self.down:
            raise Unavailable(key, "503")
        super().delete(key)


def test_a_bucket_that_refuses_is_said_once_and_tried_again() -> None:
    saved, said = Saved(range(1, 7)), list[str]()
    store = Down(saved.run.store)
    run = Run(saved.run.job.replace(checkpoint={"keep_last": 2}), store)
    rounds = Retention(run, saved.claim, said.append)
    for _ in range(3):
        rounds.round(saved.asked())
    assert (
        len(said) == 1
        and "could not be deleted" in said[0]
        and "503" in said[0]
        and saved.steps() == [1, 2, 3, 4, 5, 6]
    )
    store.down = False
    rounds.round(saved.asked())
    assert saved.steps() == [5, 6] and len(said) == 1


def test_l7_an_owner_that_dies_in_the_middle_of_a_deletion_leaves_it_to_the_next() -> None:
    """Each call that writes or deletes is the last one of its owner; the next owner's newest one is as good,
    and it ends the deletion.
    """

    class Dies(Forwarding):
        left = 0

        def put_if_absent(self, key: str, data: object) -> None:
            self._tick()
            super().put_if_absent(key, data)  # type: ignore[arg-type]

        def delete(self, key: str) -> None:
            self._tick()
            super().delete(key)

        def _tick(self) -> None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt

    for calls in itertools.count():
        saved = Saved(range(1, 6))
        store = Dies(saved.run.store)
        store.left = calls
        mortal = Run(saved.run.job, store)
        try:
            for _ in range(2):
                collect(mortal, KEEP, saved.asked(), saved.claim)
        except KeyboardInterrupt:
            pass
        assert saved.run.newest() == Version(5, 1) and {4, 5} <= set(saved.good())
        assert all(saved.run.checkpoints.verify(Version(step, 1)).good for step in saved.good())
        saved.claim = saved.run.claim("next")
        saved.rounds()
        assert saved.steps() == saved.good() == [4, 5]
        if store.left >= 0:
            break
    assert calls >= 3 * 5


def test_l7_five_hundred_saves_leave_a_bounded_bucket() -> None:
    """Every save is followed by a round, as in a run; every tenth leaves parts of a save that died."""
    saved, sizes = Saved(range(1, 2)), list[int]()
    for step in range(2, 502):
        saved.save(Version(step, 1), ((1, step),))
        if step % 10 == 0:
            write(saved.run.checkpoints, Version(step, 9), STATE, 3)
        collect(saved.run, Keep(last=3, every=200), saved.asked(), saved.claim)
        sizes.append(len(saved.run.store.list(f"{saved.run.job.name}/steps/")))
    assert max(sizes[250:]) <= max(sizes[:50]) + 2 * 3, (
        "what grows is one checkpoint of three objects in 200 steps"
    )
    assert saved.good() == [200, 400, 499, 500, 501]


# ---- commands


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, list[str]]]:
    """Returns a run that has ended, in a folder, and the list to which commands say what they do."""

    def make(steps: int = 6, **settings: object) -> tuple[Run, list[str]]:
        run, said = Run.open(toy_job(tmp_path / "bucket", **settings)), list[str]()
        for step in range(1, steps + 1):
            run.commit(
                Version(step, 1), write(run.checkpoints, Version(step, 1), STATE, 1), ((1, step),), Layout()
            )
        run.claim("local")
        monkeypatch.setattr(checkpoint_commands, "say", lambda text, *style: said.append(text))
        return run, said

    return make


def test_l7_rm_deletes_one_and_refuses_what_is_needed(ended: Callable[..., tuple[Run, list[str]]]) -> None:
    run, said = ended()
    branches.begin(run.branches, run.job.replace(steps=99), run.job, Version(3, 1), 0.0)
    for step, why in (
        (6, "the newest good checkpoint"),
        (3, "branch 2 of toy goes on from it"),
        (9, "has no checkpoint of this step"),
    ):
        with pytest.raises(JobError, match=rf"--step {step}\b.*{why}"):
            checkpoint_commands.rm(run.job, str(step), force=False)
    assert len(run.checkpoints.versions()) == 6
    checkpoint_commands.rm(run.job, "2", force=False)
    assert said == ["step 2 of generation 1 is deleted"]
    assert [each.version.step for each in run.checkpoints.versions()] == [1, 3, 4, 5, 6]


def test_rm_deletes_the_checkpoint_of_the_present_line_and_one_that_was_left_behind_when_it_is_named(
    ended: Callable[..., tuple[Run, list[str]]],
) -> None:
    """A rewind to step 2 has left behind steps 3 to 6 of generation 1, and the run has made 3 and 4 again.
    The judge is the folders.
    """
    run, said = ended()
    branches.begin(run.branches, run.job, run.job, Version(2, 1), 0.0, until=1)
    for step in (3, 4):
        lineage = ((1, 2), (2, step))
        run.commit(Version(step, 2), write(run.checkpoints, Version(step, 2), STATE, 1), lineage, Layout())
    steps = Path(run.job.bucket) / run.job.name / "steps"
    there = lambda: sorted(f"{int(path.parent.name)}.{path.name[1:]}" for path in steps.glob("*/g*"))  # noqa: E731
    assert there() == ["1.1", "2.1", "3.1", "3.2", "4.1", "4.2", "5.1", "6.1"], "the control"
    checkpoint_commands.rm(run.job, "3", force=False)
    assert there() == ["1.1", "2.1", "3.1", "4.1", "4.2", "5.1", "6.1"]
    told = (
        "abandoned checkpoints of this step stay: step 3 of generation 1 (--step 3.1); to delete one, "
        "give the --step in brackets"
    )
    assert said == ["step 3 of generation 2 is deleted", told]
    for named, gone in (
        ("3.1", "step 3 of generation 1"),
        ("4.1", "step 4 of generation 1"),
        ("6.1", "step 6 of generation 1"),
    ):
        checkpoint_commands.rm(run.job, named, force=False)
        assert said[-1] == f"{gone} is deleted"
    assert there() == ["1.1", "2.1", "4.2", "5.1"] and run.newest() == Version(4, 2)
    write(run.checkpoints, Version(9, 2), STATE, 1)
    refused = {
        "9": "is later than step 4, from which toy goes on",
        "5": r"no checkpoint of this step, except abandoned ones: step 5 of generation 1 \(--step 5.1\)",
        "5.2": r"no checkpoint of this step, except abandoned ones: step 5 of generation 1 \(--step 5.1\)",
        "4.2": "the newest good checkpoint",
        "2.1": "branch 2 of toy goes on from it",
        "8.1": "has no checkpoint of this step",
        "4.2.1": "must be a step, such as 400, or a step and its generation",
    }
    for named, why in refused.items():
        with pytest.raises(JobError, match=f"--step .*{named}.*{why}"):
            checkpoint_commands.rm(run.job, named, force=False)
    assert there() == ["1.1", "2.1", "4.2", "5.1", "9.2"]


def test_a_checkpoint_that_was_left_behind_can_be_looked_at_when_it_is_named(
    ended: Callable[..., tuple[Run, list[str]]], tmp_path: Path
) -> None:
    """The control: a step without a generation is that of the present line."""
    run, said = ended()
    branches.begin(run.branches, run.job, run.job, Version(2, 1), 0.0, until=1)
    run.commit(Version(3, 2), write(run.checkpoints, Version(3, 2), STATE, 1), ((1, 2), (2, 3)), Layout())
    for named, version in (
        ("5.1", Version(5, 1)),
        ("3.1", Version(3, 1)),
        ("3", Version(3, 2)),
        (None, Version(3, 2)),
    ):
        checkpoint_commands.show(run.job, named)
        assert str(version) in said
        said.clear()
        assert checkpoint_commands.verify(run.job, named) == 0 and str(version) in said[-1]
        checkpoint_commands.export(run.job, tmp_path / f"to-{named}", named)
    checkpoint_commands.diff(run.job, ["3.1", "3"], all=False, top=0)
    for named, why in (
        ("5", r"no good checkpoint at step 5 .*abandoned checkpoints of this step: 5\.1"),
        ("5.2", r"abandoned checkpoints of this step: 5\.1"),
        ("x", "--step = 'x'"),
    ):
        with pytest.raises(JobError, match=why):
            checkpoint_commands.verify(run.job, named)


def test_ls_says_for_which_run_a_checkpoint_that_was_left_behind_stays(
    ended: Callable[..., tuple[Run, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The controls: a column only where there is something to say, and nothing for the one that nobody needs."""
    run, _ = ended()
    branches.begin(run.branches, run.job, run.job, Version(2, 1), 0.0, until=1)
    run.commit(Version(3, 2), write(run.checkpoints, Version(3, 2), STATE, 1), ((1, 2), (2, 3)), Layout())
    other = run.job.replace(name="f")
    run.store.put("f/job.json", branches.document(other, origin := branches.Origin("toy", Version(5, 1))))
    forks.make_sure(run.store, other, origin)
    checkpoint_commands.ls(run.job)
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    kept = {
        (int(row[1]), int(row[2])): " ".join(row[-2].split()) for row in rows if row[1].strip().isdecimal()
    }
    assert kept[5, 1] == "run 'f'" and kept[4, 1] == kept[6, 1] == "" and "branch" in kept[2, 1]


class Refuses(Forwarding):
    """Takes nothing, for want of room or for another reason."""

    why: type[Unavailable] = Full

    def put_if_absent(self, key: str, data: object) -> None:
        raise self.why(key, "no")


def test_a_bucket_without_room_for_a_mark_names_a_folder_that_may_go(
    ended: Callable[..., tuple[Run, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge is the run once that folder was removed.  The control: another failure of the bucket is told
    as it is.
    """
    run, _ = ended(checkpoint={"keep_last": 2})
    full, opened = Refuses(run.store), ObjectStore.open
    for command in (
        lambda: checkpoint_commands.gc(run.job, dry_run=False, force=False),
        lambda: checkpoint_commands.rm(run.job, "2", force=False),
    ):
        monkeypatch.setattr(ObjectStore, "open", lambda url: full)
        with pytest.raises(PlatformGaveUp, match=r"the bucket is so full .*by hand") as refused:
            command()
        monkeypatch.setattr(ObjectStore, "open", opened)
        found = re.search(r"by hand \((.*)\)", str(refused.value))
        assert found is not None
        shutil.rmtree(found[1])
    assert [each.version.step for each in run.checkpoints.versions()] == [
        3,
        4,
        5,
        6,
    ] and run.newest() == Version(6, 1)
    full.why = Unavailable
    monkeypatch.setattr(ObjectStore, "open", lambda url: full)
    with pytest.raises(Unavailable):
        checkpoint_commands.rm(run.job, "3", force=False)


def test_l7_gc_applies_the_rules_and_collects_orphans(ended: Callable[..., tuple[Run, list[str]]]) -> None:
    run, said = ended(checkpoint={"keep_last": 2, "keep_every": 3})
    write(run.checkpoints, Version(2, 8), STATE, 1)
    run.checkpoints.mark(Version(1, 1), "a round that was the last of its coordinator")
    checkpoint_commands.gc(run.job.replace(checkpoint={"keep_last": 0}), dry_run=True, force=False)
    assert said[-1] == "2 would be deleted, 5 kept; checkpoint.keep_last = 0 keeps all complete checkpoints"
    said.clear()
    folder = Path(run.job.bucket) / run.job.name
    dead = [
        folder / f"steps/{6:012d}/g1/{PARTIAL}0",
        folder / f"metrics/{PARTIAL}1",
        folder / f"steps/{7:012d}",
    ]
    for path in dead:
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if path.parent.name == "steps" else path.write_bytes(b"half")
    checkpoint_commands.gc(run.job, dry_run=True, force=False)
    assert said == [
        "step 1 of generation 1 would be deleted: an earlier command has begun to delete it",
        "step 2 of generation 1 would be deleted: no rule keeps it",
        "step 2 of generation 8 would be deleted: never completed",
        "step 4 of generation 1 would be deleted: no rule keeps it",
        "4 would be deleted, 3 kept",
    ]
    assert len(run.checkpoints.versions()) == 7, "it only said so"
    checkpoint_commands.gc(run.job, dry_run=False, force=False)
    assert [each.version.step for each in run.checkpoints.versions()] == [3, 5, 6]
    assert not any(path.exists() for path in dead), "what dead writers have left half written"
    assert all(run.checkpoints.verify(each.version).good for each in run.checkpoints.versions())


def test_l7_a_run_that_may_live_is_left_alone(ended: Callable[..., tuple[Run, list[str]]]) -> None:
    run, _ = ended(checkpoint={"keep_last": 2})
    run.claim("127.0.0.1:1", "a cluster that cannot be reached")
    for command in (
        lambda force: checkpoint_commands.rm(run.job, "1", force),
        lambda force: checkpoint_commands.gc(run.job, False, force),
    ):
        with pytest.raises(
            PlatformGaveUp, match=r"has not said how it ended, and its cluster on this machine.*--force"
        ):
            command(False)
    assert len(run.checkpoints.versions()) == 6
    checkpoint_commands.gc(run.job, dry_run=False, force=True)
    assert len(run.checkpoints.versions()) == 2


def test_a_command_ends_when_the_run_begins_again(
    ended: Callable[..., tuple[Run, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = ended(checkpoint={"keep_last": 2})
    mark = Checkpoints.mark

    def marks(self: Checkpoints, version: Version, why: str) -> None:
        mark(self, version, why)
        run.claim("elsewhere", "a new life")

    monkeypatch.setattr(Checkpoints, "mark", marks)
    with pytest.raises(PlatformGaveUp, match="another command has just started toy"):
        checkpoint_commands.gc(run.job, dry_run=False, force=False)
    assert len(run.checkpoints.versions()) == 6


def test_ls_says_what_keeps_a_checkpoint(
    ended: Callable[..., tuple[Run, list[str]]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, said = ended(checkpoint={"keep_last": 2, "keep_every": 3})
    run.checkpoints.mark(Version(1, 1), "a test")
    times = {
        str(step): str(
            datetime.fromtimestamp(run.checkpoints.manifest(Version(step, 1)).written_at).replace(
                microsecond=0
            )
        )
        for step in range(1, 7)
    }
    checkpoint_commands.ls(run.job)
    rows = [
        re.split(r" *│ *", line)[1:-1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("│")
    ]
    found = {row[0]: (row[6], row[7]) for row in rows}
    assert {row[0]: row[5] for row in rows} == {step: at[:16] for step, at in times.items()}
    checkpoint_commands.show(run.job, "2")
    assert said[:2] == ["step 2 of generation 1", times["2"]]
    assert (
        found["1"] == ("being deleted", "")
        and found["2"] == ("complete", "")
        and found["3"] == ("complete", "every")
    )
    assert found["5"] == ("complete", "last") and found["6"] == ("newest complete", "last, every")
    assert ObjectStore.open(run.job.bucket).exists(f"{run.checkpoints.folder(Version(2, 1))}/MANIFEST.json")


@pytest.mark.parametrize(
    ("checkpoint", "validated", "said"),
    [
        ({"keep_last": 1}, 0, "keep_last = 1 leaves nothing to go on from .* set it to 2 or more, or to 0"),
        (
            {"keep_every": 500},
            0,
            "keep_every = 500 has no effect with checkpoint.keep_last = 0, which keeps all",
        ),
        (
            {"keep_younger": "24h"},
            0,
            "keep_younger = '24h' has no effect with checkpoint.keep_last = 0, which keeps all",
        ),
        (
            {"keep_last": 2, "keep_younger": "a day"},
            0,
            "keep_younger = 'a day'.*must be a time with its unit .*as '24h', '90m' or '7d'",
        ),
        ({"keep_last": 2, "keep_younger": "0h"}, 0, "must be a time with its unit"),
        (
            {"keep_best": True},
            100,
            "keep_best = true has no effect with checkpoint.keep_last = 0, which keeps all",
        ),
        (
            {"keep_last": 2, "keep_best": True},
            0,
            "keep_best = true with validation.every = 0: only a step that is both validated and saved",
        ),
        (
            {"keep_last": 2, "keep_best": True, "save_every": 40},
            100,
            "a multiple of checkpoint.save_every = 40",
        ),
    ],
)
def test_rules_that_cannot_work_are_refused(checkpoint: dict[str, object], validated: int, said: str) -> None:
    with pytest.raises(JobError, match=said):
        toy_job("/bucket", checkpoint=checkpoint, validation={"every": validated} if validated else {})
    good = toy_job(
        "/bucket",
        checkpoint={
            "save_every": 50,
            "keep_last": 2,
            "keep_every": 500,
            "keep_best": True,
            "keep_younger": "1.5h",
        },
        validation={"every": 100},
    )
    assert good.keep() == good.rules().keep == Keep(2, 500, best=True, younger_s=5400.0), "the control"
    assert [seconds_of(text) for text in ("", "30s", "90m", "24h", "7d")] == [
        0.0,
        30.0,
        5400.0,
        86400.0,
        604800.0,
    ]
