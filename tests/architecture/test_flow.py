"""A recovery passes few files, and the recorder that counts them sees what it should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.architecture.flow import WORKERS, Strike, flow_of, measure, passed
from tests.support.patience import PATIENCE_S
from tests.support.recorder import Call, recorded, seam

SOURCE = '''
from dataclasses import dataclass
from functools import partial
LATE = lambda: 1

@dataclass(frozen=True)
class Value:
    """Taught."""
    number: int = 0
    def twice(self):
        """Taught too."""
        return 2 * self.number

def never(): raise AssertionError
def inner():
    def within(): return LATE()
    return within()
'''
RUN = """
import _thread, os, pickle, signal, time
from storage.things import Value, inner
value = pickle.loads(pickle.dumps(Value(3)))
assert (inner(), value.twice(), Value.__doc__, Value.twice.__doc__, repr(value)) == (1, 6, "Taught.", "Taught too.", "Value(number=3)")
_thread.start_new_thread(value.twice, ())
time.sleep(0.2)
if os.fork() == 0:
    inner()
    os._exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def recorded_run(folder: Path, *, with_seam: bool) -> Mapping[int, list[Call]]:
    """Runs a package called ``storage`` until it is killed, and returns what was recorded."""
    (folder / "storage").mkdir()
    (folder / "storage" / "__init__.py").touch()
    (folder / "storage" / "things.py").write_text(SOURCE)
    site = seam(folder / "notes", folder)
    path = os.pathsep.join([*([str(site)] if with_seam else []), str(folder)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done
    assert list((folder / "storage").rglob("*.pyc")) == [] or not with_seam, (
        "what is compiled with notes is not kept"
    )
    return recorded(folder / "notes")


def test_each_function_is_recorded_where_it_runs(tmp_path: Path) -> None:
    """The recorder also sees a lambda, a nested function, a function in a thread that ``threading`` does not
    know, and the making of an instance."""
    (calls,) = recorded_run(tmp_path, with_seam=True).values()
    assert {call.file for call in calls} == {"storage/things.py"}
    main = calls[0].thread
    assert [call.function for call in calls if call.thread == main] == [
        "Value made",
        "inner",
        "inner.within",
        "<lambda>",
        "Value.twice",
    ]
    assert [call.function for call in calls if call.thread != main] == ["Value.twice"], (
        "a thread of its own; not the child that was forked"
    )
    assert [call.at for call in calls] == sorted(call.at for call in calls)


def test_without_the_seam_nothing_is_recorded(tmp_path: Path) -> None:
    assert recorded_run(tmp_path, with_seam=False) == {}


def test_what_counts_as_passed() -> None:
    """Only what runs in the window counts; a file is own if the steady state lacks one of its functions, and
    new if it lacks all.
    """
    strike = Strike(quiet_at=10, sent_at=20, dead_at=20, committed_at=30)
    script = [
        (1, "actors/keeper.py", "Keeper.__init__"),
        *((at, "elastic/both.py", "often") for at in (11, 22)),
        *(
            (at, "elastic/more.py", function)
            for at, function in ((5, "seldom"), (12, "often"), (23, "often"), (24, "seldom"))
        ),
        (21, "elastic/new.py", "Value made"),
        (13, "elastic/before.py", "often"),
        (31, "elastic/after.py", "seldom"),
    ]
    calls = [Call(at, file, function, 7) for at, file, function in sorted(script)]
    files = passed(calls, strike)
    assert [(each.file, each.own, each.steady, each.types) for each in files] == [
        ("elastic/new.py", ("Value made",), False, True),
        ("elastic/both.py", (), True, False),
        ("elastic/more.py", ("seldom",), True, False),
    ]
    flow = flow_of(strike, {1: calls}, {})
    assert list(flow.processes) == ["keeper"]
    assert [len(each()) for each in (flow.all, flow.own, flow.new, flow.types)] == [3, 2, 1, 1]
    assert flow.only() == {"elastic/new.py"}, "what is seldom had run before"


MOST_ONLY = 37
"""Limit on the files with a function that had never run before the kill: what a recovery of replicas adds to
a start.

There were 34 when they were first counted: of the coordinator's decisions, of the keeper, and of the fence,
the blame and the moves in the members.  Three more may be among them, since a member that becomes the first
one reports what another did before.  The files with a function that steps do not run (``own``) are no measure
of a recovery: 93, and more on a loaded machine, where fewer functions run in the quiet seconds.  Of those, 53
have formed the first world, too, and each policy of the engine adds one."""


@pytest.mark.full
def test_a_recovery_passes_few_files() -> None:
    """The program kills for real, and must have seen the steps that every recovery takes, each in its process
    and thread.
    """
    flow = measure()
    assert len(flow.strike.survivors) == WORKERS - 1
    assert set(flow.processes) == {"coordinator", "keeper", *flow.strike.survivors}
    for name in flow.strike.survivors:
        threads = {
            function: thread for each in flow.processes[name] for function, thread in each.threads.items()
        }
        orders = ("Controlled.fence", "Controlled.settle", "Controlled.form", "Controlled.go", "Worker.obey")
        assert {threads[order] for order in orders} == {"control"}, (
            "Ray starts this thread: whoever cannot see it misses half"
        )
        assert threads["Trainer._form"] == threads["Step.commit"] == "training"
    decided = {function for each in flow.processes["coordinator"] for function in each.threads}
    assert {"ActorGroup._ended", "Coordinator._advance", "advance", "ActorGroup._form"} <= decided
    assert flow.strike.sent_at < flow.strike.dead_at < flow.strike.committed_at
    assert len(flow.only()) <= MOST_ONLY, sorted(flow.only())
    assert {
        f"elastic/{name}.py" for name in ("control/stopping", "train/blame", "train/heal")
    } <= flow.only(), "no start has run these"
    assert "elastic/engine/parallelize.py" in flow.own() - flow.only(), "the first world was formed by it"
