"""A run whose coordinator has died is read back from its own disk, the keepers or the bucket, whichever
reaches furthest.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.control.health import Health
from elastic.control.run import Failed, Finished, RunState, State, Stopped
from elastic.control.takeover import UNREAD
from elastic.errors import JobError
from elastic.ids import Version, WorkerId
from elastic.job import NUMERICS, Job
from elastic.journal import codec
from elastic.plan.layout import Layout
from elastic.protocol.authority import Replica
from elastic.protocol.events import Recovered, StepDone, Tick
from elastic.runs import data, forks
from elastic.runs.branches import Origin
from elastic.runs.receipts import KEPT, Parts, SavedShard
from elastic.runs.run import Run
from storage.errors import Damaged, Deposed, Exists
from storage.journal import Journal, replicas
from storage.objects import ObjectStore
from tests.control.play import Play, stepping
from tests.storage.states import TENSORS, state_of, write
from tests.support.patience import PATIENCE_S
from tests.support.stores import Forwarding
from tests.support.toys import toy_job

_numbers = itertools.count()


def a_run() -> Run:
    job = Job(
        name="toy",
        bucket=f"memory://runs-{next(_numbers)}",
        model="tests.support.toys:own",
        steps=12,
        global_batch=16,
        microbatch=2,
        data={"dataset": "tests.support.toys:Sums"},
    )
    return Run.open(job)


class Life:
    """A coordinator that records a story, with its claim, its disk and one keeper."""

    def __init__(self, run: Run, folder: Path, play: Play, life: str = "one") -> None:
        self.run, self.folder, self.play = run, folder, play
        self.incarnation = run.claim("here", life)
        self.recorded = play.run
        self.journal: Journal = run.journal(self.local, codec.snapshot(play.run))
        self.keeper, self.held = Replica(), 0

    @property
    def local(self) -> Path:
        return replicas.folder_of(self.folder, self.incarnation)

    def step(self, step: int) -> None:
        self.play.step(step)
        known = self.play.run
        self.journal.append(
            codec.record(self.journal.next, 0.0, Tick(), self.recorded, self.play.last),
            lambda: codec.snapshot(known),
            durable=True,
        )
        self.recorded = known

    def copy(self) -> None:
        self.held = self.keeper.copy(self.incarnation, *self.journal.tail(self.held))


def end_as(life: Life, state: State) -> None:
    life.play.run = replace(life.play.run, state=state)
    record = codec.record(
        life.journal.next, 0.0, Tick(), life.recorded, replace(life.play.last, run=life.play.run)
    )
    life.journal.append(record, lambda: codec.snapshot(life.play.run), durable=True)
    assert life.journal.ship(PATIENCE_S)


def recovered(life: Life, sources: list[replicas.Written]) -> RunState | None:
    """Returns what the next coordinator of the same life knows, and checks that its journal continues from
    there.
    """
    (first, *_) = life.run.claims("one")
    incarnation = life.run.claim("here", "one")
    assert life.run.read(first, sources) == life.run.read(first, reversed(sources)), (
        "in whatever order they are found"
    )
    found = life.run.recover(first, replicas.folder_of(life.folder, incarnation), sources)
    if found is None:
        return None
    run, journal = found
    journal.close()
    records = life.run.records()
    assert [record["n"] for record in records] == list(range(journal.next))
    return run


@pytest.fixture
def life(tmp_path: Path) -> Life:
    life = Life(a_run(), tmp_path, stepping(2))
    for step in range(1, 6):
        life.step(step)
        if step == 3:
            life.copy()
    return life


def test_who_looks_begins_nothing() -> None:
    """Looking writes nothing, even for a job that cannot work; the first job that trains decides whose the
    folder is.
    """
    job = a_run().job.replace(name="looked-at")
    run = Run.look(job)
    assert run.newest() is None and run.owner() is None and run.records() == []
    data.check(run, "theirs", 64)
    assert run.store.list("looked-at/") == []
    data.bind(Run.open(job.replace(seed=7)), "others", 64)
    with pytest.raises(JobError, match="seed = 7 in the run and 0 now"):
        Run.look(job)
    with pytest.raises(
        JobError,
        match=(
            r"the fingerprint theirs, but the run 'looked-at' in .* was begun on data with the "
            r"fingerprint others"
        ),
    ):
        data.check(Run.look(job.replace(seed=7)), "theirs", 64)


class Noting(Forwarding):
    """Notes the documents of runs that are read."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.read = list[str]()

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        if key.endswith(("/job.json", "/data.json")):
            self.read.append(key)
        return super().get(key, start, stop)


def test_a_run_reads_each_of_its_documents_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge is the store.  Who binds a run to its samples looks at them once, as does who finds them
    bound.
    """
    job, version = a_run().job.replace(name="once"), Version(2, 1)
    store = Noting(ObjectStore.open(job.bucket))
    monkeypatch.setattr(ObjectStore, "open", classmethod(lambda cls, url: store))
    fork = job.replace(name="forked")

    def read(act: Callable[[], object]) -> list[str]:
        store.read.clear()
        act()
        return store.read[:]

    assert read(lambda: Run.open(job).checkpoints) == ["once/job.json"]
    run = Run.begun(job)
    assert (
        read(lambda: data.bind(run, "ours", 64))
        == ["once/data.json"]
        == read(lambda: data.bind(run, "ours", 64))
    )
    run.commit(
        version, write(run.checkpoints, version, state_of(TENSORS[:1], seed=1), 1), ((1, 2),), Layout()
    )
    forks.begin(store, fork, Origin("once", version), {})
    for find in (Run.begun, Run.find, Run.look):
        assert read(lambda find=find: (find(job).newest(), find(job).origin)) == ["once/job.json"] * 2, (
            "each run reads its own"
        )
        assert read(lambda find=find: find(fork).newest()) == ["forked/job.json"]
    going_on = Run.look(fork)
    with pytest.raises(JobError, match="was begun on data with the fingerprint ours"):
        data.bind(going_on, "others", 64)
    assert not store.exists("forked/data.json")
    assert read(lambda: data.bind(going_on, "ours", 64)) == [
        "forked/data.json",
        "once/data.json",
    ] and store.exists("forked/data.json")
    assert read(lambda: data.bind(going_on, "ours", 64)) == ["forked/data.json"]


def test_another_job_is_told_why_it_cannot_go_on() -> None:
    """The class of the changed setting decides: another value changes the weights (branch), or the state does
    not fit it (refused).
    """
    job = a_run().job.replace(name="told", model_args={"dim": 8})
    Run.open(job)
    has = f": the run 'told' in bucket = {job.bucket!r} has other settings, and "
    do = "; either use the settings of the run"
    with pytest.raises(JobError) as caught:
        Run.look(job.replace(steps=3))
    assert str(caught.value) == (
        f"steps = 12 in the run and 3 now{has}the new values would change the weights from here on{do} "
        "(--steps 12), or take the new values with --branch, or begin at step 0 with another --name"
    )
    with pytest.raises(JobError) as caught:
        Run.look(job.replace(seed=3, model_args={"dim": 9}))
    does_not_fit = "the state of the run does not fit another value of model_args.dim"
    assert str(caught.value) == (
        f"model_args.dim = 8 in the run and 9 now, seed = 0 in the run and 3 now{has}{does_not_fit}{do} "
        "(--model-args.dim 8 --seed 0), or begin at step 0 with another --name"
    )


def test_a_run_goes_on_with_its_own_numerics() -> None:
    """A number that the user names must be the run's.  A run of an older version is refused, also if its
    ``job.json`` names no number.
    """
    old = Job(name="old", bucket=a_run().job.bucket)
    new = Run.open(old.replace(name="new"))
    assert (
        new.job.numerics == NUMERICS
        and json.loads(new.store.get("new/job.json"))["job"]["numerics"] == NUMERICS
    )
    about = json.loads(new.store.get("new/job.json"))
    about["job"]["numerics"] = 4
    new.store.put("old/job.json", json.dumps(about).encode())
    for job in (old, old.replace(steps=old.steps), old.replace(numerics=4)):
        assert (Run.open(job).job.numerics, Run.open(Run.open(job).job).job.numerics) == (4, 4)
    assert Run.open(old).job.digest == old.replace(numerics=4).digest != old.digest
    with pytest.raises(
        JobError,
        match=(
            r"numerics = 4 in the run and 5 now: .*the state of the run does not fit another value of numerics"
        ),
    ):
        Run.open(old.replace(numerics=5))
    del about["job"]["numerics"]
    new.store.put("old/job.json", json.dumps(about).encode())
    for look in (Run.open, Run.look, Run.find):
        with pytest.raises(
            JobError,
            match=(
                "numerics = 1 belongs to a run of a version of Elastic before 2026-11-27; go on with "
                "that version"
            ),
        ):
            look(old)


def test_a_run_goes_on_with_its_own_recompute() -> None:
    """A run that began before ``auto`` was there recomputes nothing; one that begins now, what its workers
    choose.
    """
    old = Job(name="old", bucket=a_run().job.bucket)
    new = Run.open(old.replace(name="new"))
    assert new.job.recompute == "auto" and Run.open(old.replace(name="new")).job.recompute == "auto"
    about = json.loads(new.store.get("new/job.json"))
    for stored, recompute in (
        ({}, "none"),
        ({"recompute": "none"}, "none"),
        ({"recompute": "block"}, "block"),
    ):
        job = {name: value for name, value in about["job"].items() if name != "recompute"} | stored
        new.store.put("old/job.json", json.dumps({**about, "job": job}).encode())
        assert (
            Run.open(old).job.recompute == Run.open(old.replace(recompute="auto")).job.recompute == recompute
        )
    with pytest.raises(JobError, match=r"^recompute = 'block' in the run and 'none' now: "):
        Run.open(old.replace(recompute="none"))


def test_a_run_goes_on_with_its_own_microbatch() -> None:
    """A job with another batch is another run, whether or not the number divides it, and the sentence names
    the batch.
    """
    named = Job(name="auto", bucket=a_run().job.bucket, microbatch=4)
    Run.open(named)
    auto = named.replace(microbatch="auto")
    assert (
        auto.digest != named.digest and Run.look(auto.replace(workers={"max": 9})).job.digest == named.digest
    )
    assert Run.open(auto).job.microbatch == Run.find(auto).job.microbatch == 4
    for batch in (32, 18):  # of which the one is a multiple of 4, and the other is not
        with pytest.raises(JobError, match=f"global_batch = 16 in the run and {batch} now"):
            Run.look(auto.replace(global_batch=batch))
    with pytest.raises(JobError, match=r"^microbatch = 4 in the run and 2 now: "):
        Run.look(named.replace(microbatch=2))


def test_a_run_can_be_gone_on_with_when_a_setting_of_its_cluster_is_no_longer_valid() -> None:
    """A setting that was valid when the run began is not checked again, unless it defines the trajectory."""
    run = a_run()
    stored = json.loads(run.store.get("toy/job.json"))
    # one is retired
    stored["job"] |= {
        "deadlines": {"lease_s": -1},
        "workers": "many",
        "copies": {"copy_every": 1, "price_per_gb": 0.01},
    }
    run.store.put("toy/job.json", json.dumps(stored).encode())
    assert Run.open(run.job).job == run.job
    stored["job"]["seed"] = 7
    run.store.put("toy/job.json", json.dumps(stored).encode())
    with pytest.raises(JobError, match="seed = 7 in the run and 0 now"):
        Run.look(run.job)


def test_its_own_disk_has_everything(life: Life) -> None:
    assert recovered(life, replicas.local(life.folder)) == life.play.run


def test_a_keeper_has_what_it_was_sent(life: Life) -> None:
    found = recovered(life, [(life.keeper.by, bytes(life.keeper.data))])
    assert found is not None and found.step == 3


def test_whichever_reaches_furthest(life: Life) -> None:
    assert (
        recovered(life, [(life.keeper.by, bytes(life.keeper.data)), *replicas.local(life.folder)])
        == life.play.run
    )


def test_the_bucket_where_nothing_else_is_left(life: Life) -> None:
    life.journal.close()
    assert recovered(life, []) == life.play.run


def test_a_keeper_goes_on_where_the_bucket_ends(life: Life) -> None:
    life.journal.close()
    life.journal = life.run.journal(life.local, codec.snapshot(life.play.run))
    life.held = 0
    life.step(6)
    life.copy()
    assert recovered(life, [(life.keeper.by, bytes(life.keeper.data))]) == life.play.run


@pytest.fixture
def continued(tmp_path: Path) -> Life:
    """A life whose keeper and disk hold a continuation of the journal that is in the bucket."""
    life = Life(a_run(), tmp_path, stepping(6))
    for step in range(1, 8):
        life.step(step)
        if step < 5:
            assert life.journal.ship(PATIENCE_S)
    life.copy()
    assert (
        bytes(life.keeper.data).startswith(b'{"format":4,"continues":') and life.keeper.data.count(b"\n") == 4
    )
    return life


@pytest.mark.parametrize("source", ["keeper", "disk"])
def test_a_continuation_is_read_after_the_snapshot_in_the_bucket(continued: Life, source: str) -> None:
    """A third coordinator reads it too, after the second has brought a part of it to the bucket in objects of
    its own.
    """
    sources = (
        replicas.local(continued.folder)
        if source == "disk"
        else [(continued.keeper.by, bytes(continued.keeper.data))]
    )
    assert recovered(continued, sources) == continued.play.run
    assert recovered(continued, sources) == continued.play.run


def test_a_continuation_whose_snapshot_is_not_in_the_bucket_is_damage(continued: Life) -> None:
    """Negative control: nothing is made up in place of the snapshot."""
    sources = [(continued.keeper.by, bytes(continued.keeper.data))]
    (base, *_) = keys = continued.run.store.list("toy/journal/")
    assert len(keys) > 1
    continued.run.store.delete(base)
    with pytest.raises(Damaged, match="which record"):
        recovered(continued, sources)


def test_again_and_again(life: Life) -> None:
    """Each coordinator finds what those before it have left, also where none of them has reached the bucket."""
    assert recovered(life, replicas.local(life.folder)) == life.play.run
    again = Life(life.run, life.folder, life.play)
    again.step(6)
    assert recovered(again, replicas.local(life.folder)) == life.play.run


def test_nothing_was_recorded_in_this_life(tmp_path: Path) -> None:
    """Records of an earlier life do not count in this one: its workers are gone, so only the bucket counts."""
    before = Life(a_run(), tmp_path / "before", stepping(2), life="zero")
    before.step(1)
    before.journal.close()
    before.run.claim("here", "one")
    assert recovered(before, []) is None


def test_the_second_was_the_first_to_record_anything(tmp_path: Path) -> None:
    """The second coordinator began from the bucket, because this life had recorded nothing; its own records
    belong to this life.
    """
    run = a_run()
    run.claim("here", "one")
    play = stepping(2)
    play.run = replace(play.run, incarnation=0)
    second = Life(run, tmp_path, play)
    play.tell(Recovered(second.incarnation, tuple(play.run.workers), play.run.cluster.keepers))
    second.step(1)
    assert recovered(second, replicas.local(tmp_path)) == play.run


def test_who_was_followed_by_another_life_is_deposed(life: Life) -> None:
    life.run.claim("another cluster", "two")
    with pytest.raises(Deposed, match=r"owner/000002.json was written by another coordinator"):
        life.run.claims("one")
    assert life.run.claims("two") == {2: ""}
    assert life.run.claims("three") == {}


def test_a_life_after_one_that_was_cut_off_begins_under_numbers_of_its_own(life: Life) -> None:
    """The last records of the other life are on lost disks: a generation known only there may have written
    parts of a checkpoint.
    """
    assert life.run.state(2, 0.0).generation == 0, "nothing is in the bucket yet"
    life.journal.ship(PATIENCE_S)
    assert life.run.state(2, 0.0).generation == life.play.run.generation + 2 * UNREAD
    assert life.run.state().generation == life.play.run.generation, (
        "who takes over, or only looks, counts by itself"
    )


def test_a_life_after_another_says_what_is_done_again(life: Life) -> None:
    """The control is a run that never ran."""
    assert life.run.begins(2, 0.0)[1] == "", "the control"
    life.step(3)
    life.journal.ship(PATIENCE_S)
    reached = life.play.run.step
    state, said = life.run.begins(2, 0.0)
    assert state == life.run.state(2, 0.0)
    begins = "begins again at step 0, since it has no complete checkpoint"
    assert (
        f"{begins}; the steps after it are done again, at least up to {reached}; the next generation" in said
    )
    assert said.endswith(f"the next generation is {2 * UNREAD + 2}, since the last used number is not known")


def test_a_life_after_one_that_ended_well_goes_on_counting(life: Life) -> None:
    """The control: a journal that records the end is complete."""
    end_as(life, Stopped("Ctrl-C"))
    assert life.run.state(2, 0.0).generation == life.play.run.generation


def test_a13_a_life_after_another_remembers_what_was_said_of_layers(life: Life) -> None:
    """A13: a warning is said once in a run.  The control: a run that never ran knows nothing."""
    assert life.run.state(2, 0.0).health == Health(), "the control"
    layers = (("layers.0", 1.0), ("layers.1", 0.0))
    for step in range(6, 11):
        life.play.tell(StepDone(life.play.plan.members[0], 1, replace(life.play.commit(step), layers=layers)))
    end_as(life, Stopped("Ctrl-C"))
    health = life.run.state(2, 0.0).health
    assert health == life.play.run.health and health.said == ("dead layers.1",)


def test_a_run_has_ended_as_its_last_owner_recorded(life: Life) -> None:
    """A coordinator that claims the run afterwards may have continued it, and nobody knows how far."""
    assert life.run.end() is None, "nothing is in the bucket yet"
    assert life.journal.ship(PATIENCE_S)
    assert life.run.end() is None, "it was left in the middle"
    end_as(life, Failed("it went wrong", "a traceback"))
    assert life.run.end() == Failed("it went wrong", "a traceback")
    life.run.claim("local")
    assert life.run.end() is None


def test_a_run_that_has_saved_its_last_step_is_finished_whoever_did_it() -> None:
    """A worker in the user's own process keeps no journal."""
    run = a_run()
    version = Version(run.job.steps, 1)
    receipts = write(run.checkpoints, version, state_of(TENSORS, seed=1), 1)
    run.claim("local")
    assert run.end() is None
    run.commit(version, receipts, ((1, version.step),), Layout())
    assert run.end() == Finished()


def part(generation: int) -> SavedShard:
    return SavedShard(generation, Layout(), b"")


def test_a_manifest_is_made_of_the_parts_of_one_world() -> None:
    parts = Parts()
    parts.add(Version(6, 1), WorkerId("w2"), part(1))
    parts.add(Version(6, 1), WorkerId("w2"), part(2))
    parts.add(Version(6, 1), WorkerId("w3"), part(2))
    assert parts.of(Version(6, 1), 2) == [part(2), part(2)]
    assert parts.of(Version(6, 1), 1) == [part(1)], "in time for a manifest that was asked for before"
    for version, generation in ((Version(6, 1), 3), (Version(7, 1), 1)):
        with pytest.raises(KeyError):
            parts.of(version, generation)


def test_parts_of_a_future_that_was_given_up_do_not_push_out_those_of_now() -> None:
    """A world that nobody knows any more went on and saved later steps; the next one begins with step 6."""
    parts = Parts()
    for step in range(12, 12 + 6 * KEPT, 6):
        parts.add(Version(step, 1), WorkerId("w1"), part(1))
    parts.add(Version(6, 101), WorkerId("w103"), part(101))
    parts.add(Version(6, 101), WorkerId("w104"), part(101))
    assert len(parts.of(Version(6, 101), 101)) == 2
    with pytest.raises(KeyError):
        parts.of(Version(12, 1), 1)


def test_a_manifest_that_is_there_already_counts_whichever_world_wrote_it() -> None:
    """The coordinator that wrote it died before it could report it, and the next world saved the same step in
    other parts.

    The control: a manifest of another line does not count.
    """
    run, version, line = a_run(), Version(6, 1), ((1, 6),)
    one, two = (write(run.checkpoints, version, state_of(TENSORS, seed=1), shards) for shards in (1, 2))
    digest = run.commit(version, one, line, Layout(1, 1))
    assert run.commit(version, two, line, Layout(1, 2)) == digest
    assert (
        run.checkpoints.manifest(version).layout == {"dp_replicate": 1, "dp_shard": 1}
        and run.checkpoints.verify(version).problems == ()
    )
    with pytest.raises(Exists):
        run.commit(version, two, ((1, 5), (2, 6)), Layout(1, 2))


def test_a_run_is_begun_only_after_what_its_command_has_seen(tmp_path: Path) -> None:
    """R19: another life may have claimed it in between, also at the last moment.  A coordinator of the same
    life begins nothing.
    """
    run = Run.open(toy_job(tmp_path))
    assert run.follows(0) == 0
    seen = run.claim("10.0.0.1:6379", "first")
    assert run.follows(seen) == seen
    later = run.claim("10.0.0.1:6379", "first")
    assert run.follows(seen) == later == seen + 1
    assert run.claim("10.0.0.2:6379", "second", after=later) == later + 1
    with pytest.raises(Exists):
        run.claim("10.0.0.3:6379", "third", after=later)
    with pytest.raises(Exists, match=f"owner/{later + 1:06d}"):
        run.follows(later)
    assert run.claim("10.0.0.3:6379", "third") == later + 2, (
        "the control: who has seen nothing takes the next"
    )
