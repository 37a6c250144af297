"""L7: a run keeps a checkpoint for a fork, until the fork is gone or turns out never to have begun."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest

from actors.cli import checkpoint_commands
from elastic.errors import JobError
from elastic.ids import Version
from elastic.runs import forks
from elastic.runs.branches import Origin
from elastic.runs.retention import release
from elastic.runs.run import Run
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.runs.test_forks import OLD, Taking, rounds, saved
from tests.support.patience import PATIENCE_S


def gc(run: Run) -> list[int]:
    """Deletes by command, without a rule that keeps an old checkpoint, and returns the steps that are left."""
    checkpoint_commands.gc(run.job.replace(checkpoint={"keep_last": 2}), dry_run=False, force=True)
    return [each.version.step for each in run.checkpoints.versions()]


@pytest.mark.parametrize(
    "ended", ["it died before it began", "its folder was removed", "its name was used for another run"]
)
def test_l7_a_reference_that_nobody_needs_is_collected(
    ended: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """L7: in two phases, and what it has kept goes after that.  The controls stay: a fork that lives, and a
    run with the weights of it.
    """
    run, lost = saved(range(1, 7)), Origin("run", Version(3, 1))
    forks.begin(run.store, run.job.replace(name="fork"), Origin("run", Version(1, 1)), {})
    forks.begin(run.store, run.job.replace(name="warm", init="run@2.1"), Origin("run", OLD), {})
    if ended == "its folder was removed":
        forks.begin(run.store, run.job.replace(name="lost"), lost, {})
        run.store.delete("lost/job.json")
    else:
        forks.refer(run.store, lost, "lost")
    if ended == "its name was used for another run":
        Run.open(run.job.replace(name="lost"))
    checkpoint_commands.gc(run.job.replace(checkpoint={"keep_last": 2}), dry_run=True, force=True)
    assert (
        not run.store.list("run/unused/")
        and "step 3 of generation 1 is kept for the run 'lost'" in capsys.readouterr().out
    )
    assert [gc(run), len(run.store.list("run/references/")), len(run.store.list("run/unused/"))] == [
        [1, 2, 3, 5, 6],
        3,
        1,
    ]
    assert [gc(run), len(run.store.list("run/references/")), len(run.store.list("run/unused/"))] == [
        [1, 2, 3, 5, 6],
        2,
        0,
    ]
    assert [gc(run) for _ in range(3)] == [[1, 2, 5, 6]] * 3
    assert set(forks.references(run.store, "run")) == {Version(1, 1), OLD}


def test_l7_a_fork_that_begins_again_is_marked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """L7: the mark of an earlier attempt does not count for the next one, which may take long before it
    begins.
    """
    run = saved()
    forks.refer(run.store, Origin("run", OLD), "fork")
    gc(run)
    forks.refer(run.store, Origin("run", OLD), "fork")
    assert gc(run) == [2, 4, 5] and set(forks.references(run.store, "run")) == {OLD}
    forks.begin(run.store, run.job.replace(name="fork"), Origin("run", OLD), {})
    assert [gc(run) for _ in range(3)] == [[2, 4, 5]] * 3 and not run.store.list("run/unused/")


class Trusting(Taking):
    """The control: a fork that takes its reference for granted."""

    def exists(self, key: str) -> bool:
        return "/references/" in key or super().exists(key)


def meets(at: int, commands: int, during: int = 10**6, kind: type[Taking] = Taking) -> tuple[bool, bool]:
    """Lets a fork make ``at`` calls, and collects by ``commands``, in which ``during`` calls are made before
    the fork goes on to its end.

    Returns whether the fork began, and whether it has its reference and its checkpoint.
    """
    run, began, paused, go, over = (
        saved((2, 4, 5)),
        list[bool](),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )

    def pause() -> None:
        paused.set()
        assert go.wait(PATIENCE_S)

    def fork() -> None:
        try:
            forks.begin(kind(run.store, at, pause), run.job.replace(name="fork"), Origin("run", OLD), {})
            began.append(True)
        except JobError:
            began.append(False)
        over.set()
        paused.set()

    def goes_on() -> None:
        go.set()
        assert over.wait(PATIENCE_S)

    thread = threading.Thread(target=fork)
    thread.start()
    assert paused.wait(PATIENCE_S)
    collecting = Run(run.job, Taking(run.store, during, goes_on))
    for _ in range(commands):
        rounds(collecting)
        release(collecting, run.latest_claim())
    go.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and run.store.exists("fork/job.json") is began[0], (
        "a fork that was refused leaves nothing"
    )
    return began[0], OLD in forks.references(run.store, "run") and Checkpoints(run.store, "run").verify(
        OLD
    ).good


@pytest.mark.parametrize(
    ("ats", "durings"),
    [((5, 6), range(74, 82)), pytest.param((5, 6, 7, 8), range(112), marks=pytest.mark.full)],
    ids=("some", "everywhere"),
)
def test_l7_a_fork_and_the_collection_of_its_reference_at_the_same_time(
    ats: Iterable[int], durings: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: wherever a fork that is about to begin meets commands that collect and delete, it has its
    checkpoint if it begins.

    After two commands it does, after three it is refused.  The controls lose them: a fork that does not look
    whether its reference is there, and a collection that does not look for the run once more.
    """
    assert [meets(5, commands) for commands in (1, 2, 3)] == [(True, True), (True, True), (False, False)]
    assert {meets(at, 2, during) for at in ats for during in durings} == {(True, True)}
    assert meets(5, 2, kind=Trusting) == (True, False)

    def rash(store: ObjectStore, name: str, reference: forks.Reference) -> bool:
        if marked := store.exists(f"{name}/unused/{reference.name}"):
            store.delete(f"{name}/references/{reference.name}")
            store.delete(f"{name}/unused/{reference.name}")
        else:
            store.put_if_absent(f"{name}/unused/{reference.name}", reference.to_bytes())
        return marked

    monkeypatch.setattr(forks, "collect", rash)
    assert (True, False) in {meets(at, 2, during) for at in ats for during in durings}


# ---- a command dies between two calls


class Died(BaseException):
    """Ends a command where it stands."""


class Dying(Taking):
    """Lets another one come in before call ``calls``, and dies before call ``last``."""

    def __init__(self, store: ObjectStore, calls: int, meanwhile: Callable[[], None], last: int) -> None:
        super().__init__(store, calls, meanwhile)
        self.left = last

    def _tick(self) -> None:
        super()._tick()
        self.left -= 1
        if self.left == -1:
            raise Died


def died(command: Callable[[ObjectStore], object], store: Dying) -> bool:
    try:
        command(store)
    except Died:
        return True
    return False


def deleting(run: Run) -> None:
    """Deletes what is due, and then collects references: a command `gc`."""
    rounds(run)
    release(run, run.latest_claim())


def keeps(run: Run) -> bool:
    """Returns whether the fork has its reference, and its checkpoint after more commands."""
    for _ in range(2):
        deleting(run)
    return OLD in forks.references(run.store, "run") and Checkpoints(run.store, "run").verify(OLD).good


def collection_dies(forked: int, last: int) -> bool | None:
    """Collects for the second time: a fork begins before call ``forked`` of that, which dies before call
    ``last``.

    Returns whether the fork keeps what it needs; None if the collection does not live to call ``last``, or as
    long as the fork's call.
    """
    run = saved((2, 4, 5))
    fork = run.job.replace(name="fork")
    forks.refer(run.store, Origin("run", OLD), "fork")
    deleting(run)
    store = Dying(run.store, forked, lambda: forks.begin(run.store, fork, Origin("run", OLD), {}), last)
    ended = died(lambda store: release(Run(run.job, store), run.latest_claim()), store)
    return keeps(run) if ended and run.store.exists("fork/job.json") else None


def all_collections(forked: Iterable[int]) -> set[bool | None]:
    return {collection_dies(first, last) for first in forked for last in range(first, 13)}


@pytest.mark.parametrize(
    "forked",
    [range(6, 10), pytest.param(range(14), marks=pytest.mark.full)],
    ids=("where they meet", "everywhere"),
)
def test_l7_a_collection_that_dies_loses_no_reference_of_a_fork(
    forked: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: wherever a fork begins meanwhile, and wherever the collection dies after that.  The fork has its
    reference, or the note of it.

    The controls lose it: deletions to which a note means nothing, and a collection that clears up marks
    without a look at the run.
    """
    assert all_collections(forked) == {True, None}
    with monkeypatch.context() as broken:
        broken.setattr(forks, "_marks", lambda store, name: [])
        assert False in all_collections((7, 8))
    with monkeypatch.context() as broken:
        broken.setattr(
            forks,
            "_settle",
            lambda store, name, reference, needed: store.delete(f"{name}/unused/now/{reference.name}"),
        )
        assert False in all_collections((7, 8))


def fork_dies(at: int, commands: int, last: int) -> bool | None:
    """Begins a fork: ``commands`` collect before its call ``at``, and it dies before its call ``last``.  Then
    it goes on, if it was begun.

    Returns whether it keeps what it needs; None if it was not begun, or says that its checkpoint is gone
    before it has done a step.
    """
    run = saved((2, 4, 5))
    fork = run.job.replace(name="fork")

    def collect() -> None:
        for _ in range(commands):
            deleting(run)

    with suppress(JobError):
        died(
            lambda store: forks.begin(store, fork, Origin("run", OLD), {}),
            Dying(run.store, at, collect, last),
        )
    if not run.store.exists("fork/job.json"):
        return None
    try:
        Run.open(fork).newest()
    except JobError:
        return None
    return keeps(run)


def all_forks(ats: Iterable[int], commands: Iterable[int] = (2,)) -> set[bool | None]:
    return {fork_dies(at, number, last) for number in commands for at in ats for last in range(at, 12)}


@pytest.mark.parametrize(
    ("ats", "commands"),
    [((5, 6), (2,)), pytest.param(range(12), (1, 2, 3), marks=pytest.mark.full)],
    ids=("where they meet", "everywhere"),
)
def test_l7_a_fork_that_dies_while_it_begins_has_its_reference_when_it_goes_on(
    ats: Iterable[int], commands: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: wherever it meets a collection, and wherever it dies after that.  The control does not look for its
    reference when it goes on.
    """
    assert all_forks(ats, commands) == {True, None}
    monkeypatch.setattr(forks, "make_sure", lambda store, job, origin: None)
    assert False in all_forks((5,))


def test_l7_a_listing_is_enough_to_know_all_references() -> None:
    """L7: their names say it all, also those of runs whose names look alike.  What is no reference is named."""
    run, asked = saved((2, 4, 5)), list[str]()

    class Counting(Taking):
        def _tick(self) -> None:
            asked.append("")

    runs = [f"fork-{number}-7.b" for number in range(300)]
    for name in runs:
        forks.refer(run.store, Origin("run", OLD), name)
    assert set(forks.references(Counting(run.store, 0, lambda: None), "run")[OLD]) == set(runs)
    assert len(asked) == 2
    for stray in (
        "references/notes.txt",
        "references/.nfs01",
        "unused/.DS_Store",
        "references/.ipynb_checkpoints/x-1-1.json",
    ):
        run.store.put(f"run/{stray}", b"")
    assert set(forks.references(run.store, "run")[OLD]) == set(runs), "what is no reference is passed over"
