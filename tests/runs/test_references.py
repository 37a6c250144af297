"""L7: a run keeps a checkpoint for a fork, until the fork is gone or turns out never to have begun."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from actors import checkpoint_commands
from elastic.errors import JobError
from elastic.ids import Version
from elastic.runs import forks
from elastic.runs.forks import Origin
from elastic.runs.retention import release
from elastic.runs.run import Run
from storage.checkpoints import Checkpoints
from storage.objects import ObjectStore
from tests.runs.test_forks import OLD, Taking, rounds, saved


def gc(run: Run) -> list[int]:
    """Deletes by command, without a rule that keeps an old checkpoint, and returns the steps that are left."""
    assert checkpoint_commands.gc(run.job.replace(checkpoint={"keep_last": 2}), dry=False, force=True) == 0
    return [each.version.step for each in run.checkpoints.versions()]


@pytest.mark.parametrize("ended", ["it died before it began", "its folder was removed", "its name was used for another run"])
def test_l7_a_reference_that_nobody_needs_is_collected(ended: str, capsys: pytest.CaptureFixture[str]) -> None:
    """L7: in two phases, and what it has kept goes after that.  The controls stay: a fork that lives, and a run with the weights of it."""
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
    assert checkpoint_commands.gc(run.job.replace(checkpoint={"keep_last": 2}), dry=True, force=True) == 0
    assert not run.store.list("run/unused/") and "step 3 of generation 1 is kept for the run 'lost'" in capsys.readouterr().out
    assert [gc(run), len(run.store.list("run/references/")), len(run.store.list("run/unused/"))] == [[1, 2, 3, 5, 6], 3, 1]
    assert [gc(run), len(run.store.list("run/references/")), len(run.store.list("run/unused/"))] == [[1, 2, 3, 5, 6], 2, 0]
    assert [gc(run) for _ in range(3)] == [[1, 2, 5, 6]] * 3
    assert set(forks.references(run.store, "run")) == {Version(1, 1), OLD}


def test_l7_a_fork_that_begins_again_is_marked_again(capsys: pytest.CaptureFixture[str]) -> None:
    """L7: the mark of an earlier attempt does not count for the next one, which may take long before it begins."""
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
    """Lets a fork make ``at`` calls, and collects by ``commands``, in which ``during`` calls are made before the fork goes on to its end.

    Returns whether the fork began, and whether it has its reference and its checkpoint.
    """
    run, began, paused, go, over = saved((2, 4, 5)), list[bool](), threading.Event(), threading.Event(), threading.Event()

    def pause() -> None:
        paused.set()
        assert go.wait(30)

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
        assert over.wait(30)

    thread = threading.Thread(target=fork)
    thread.start()
    assert paused.wait(30)
    collecting = Run(run.job, Taking(run.store, during, goes_on))
    for _ in range(commands):
        rounds(collecting)
        release(collecting, run.latest_claim())
    go.set()
    thread.join(30)
    assert not thread.is_alive() and run.store.exists("fork/job.json") is began[0], "a fork that was refused leaves nothing"
    return began[0], OLD in forks.references(run.store, "run") and Checkpoints(run.store, "run").verify(OLD).good


@pytest.mark.parametrize(
    ("ats", "durings"),
    [((5, 6), range(78, 90)), pytest.param((5, 6, 7), range(72, 92), marks=pytest.mark.full)],
    ids=("some", "everywhere"),
)
def test_l7_a_fork_and_the_collection_of_its_reference_at_the_same_time(
    ats: Iterable[int], durings: Iterable[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: wherever a fork that is about to begin meets commands that collect and delete, it has its checkpoint if it begins.

    After two commands it does, after three it is refused.  The controls lose them: a fork that does not look whether its reference is
    there, and a collection that does not look for the run once more.
    """
    assert [meets(5, commands) for commands in (1, 2, 3)] == [(True, True), (True, True), (False, False)]
    assert {meets(at, 2, during) for at in ats for during in durings} == {(True, True)}
    assert meets(5, 2, kind=Trusting) == (True, False)

    def rash(store: ObjectStore, name: str, reference: forks.Reference) -> bool:
        if marked := store.exists(f"{name}/unused/{reference.name}"):
            store.delete(f"{name}/references/{reference.name}")
        else:
            store.put_if_absent(f"{name}/unused/{reference.name}", reference.to_bytes())
        return marked

    monkeypatch.setattr(forks, "collect", rash)
    assert (True, False) in {meets(at, 2, during) for at in ats for during in durings}
