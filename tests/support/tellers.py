"""Processes that tell steps to a function, each killed by SIGKILL at another moment: ``python -m
tests.support.tellers FOLDER``.

After each kill another process goes on from a state that fell back by two steps.  Prints two lists with an
object for each moment, the second of which is that of the control: ``noted`` is the step in the note at the
kill (None: there is none), ``before`` the steps that had begun to be told, and ``told`` and ``finished`` are
the steps that began to be told, and that were told, over both processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from elastic.train.effects import Effects
from storage.objects import Data, ObjectStore
from tests.support.patience import PATIENCE_S
from tests.support.stores import Forwarding

STEPS = 5
"""Number of steps that a process tells, unless it is killed."""


class Moments:
    """Counts what happens in this process, and kills it at one of the moments."""

    def __init__(self, kills_at: int) -> None:
        self.kills_at, self.seen, self.lock = kills_at, 0, threading.Lock()

    def passes(self) -> None:
        with self.lock:
            self.seen += 1
            if self.seen == self.kills_at:
                os.kill(os.getpid(), signal.SIGKILL)


class Watched(Forwarding):
    """A folder whose writes have a moment before and one after them, and which says when one has ended."""

    def __init__(self, store: ObjectStore, moments: Moments) -> None:
        super().__init__(store)
        self.moments, self.written = moments, threading.Semaphore(0)

    def put(self, key: str, data: Data) -> None:
        self.moments.passes()
        super().put(key, data)
        self.moments.passes()
        self.written.release()


def line(path: Path, step: int) -> None:
    with path.open("a") as file:
        file.write(f"{step}\n")


def steps_in(path: Path) -> list[int]:
    return [int(each) for each in path.read_text().split()] if path.exists() else []


def tell(folder: Path, begun: int, last: int, moments: Moments, *, early: bool, waits: bool = False) -> None:
    """Tells the steps after ``begun`` up to ``last``.  With ``waits`` each step has its note before the next
    is told.
    """
    store = Watched(ObjectStore.open(str(folder)), moments)

    def function(step: int) -> None:
        line(folder / "told", step)
        moments.passes()
        line(folder / "finished", step)
        moments.passes()

    effects = (Early if early else Effects)(store, "toy", tells=True)
    effects.add(function)
    effects.begin(begun)
    if waits:
        assert store.written.acquire(timeout=PATIENCE_S)
    for step in range(begun + 1, last + 1):
        moments.passes()
        effects.committed(step)
        if waits:
            assert store.written.acquire(timeout=PATIENCE_S)
    effects.close(broken=False)


class Early(Effects):
    """The control: it has a step noted before it is told."""

    def committed(self, step: int) -> None:
        for number in range((self._note.told or 0) + 1, step + 1):
            self._note.told = number
            self._note.write()
            for function in self._functions:
                function(number)


def killed(work: Callable[[], None]) -> bool:
    """Runs ``work`` in a process of its own, and returns whether that was killed."""
    if not (pid := os.fork()):
        work()
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def after_kills(root: Path, *, early: bool) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()
    for waits in (True, False):
        moment, dies = 0, True
        while dies:
            moment += 1
            folder = root / f"{'waits' if waits else 'runs on'} {moment:03}"
            folder.mkdir(parents=True)
            moments = Moments(moment)
            dies = killed(partial(tell, folder, 0, STEPS, moments, early=early, waits=waits))
            noted = [json.loads(note.read_text())["step"] for note in (folder / "toy").rglob("*.json")]
            found.append(
                {"waits": waits, "noted": max(noted, default=None), "before": steps_in(folder / "told")}
            )
            finished = len(steps_in(folder / "finished"))
            killed(partial(tell, folder, max(finished - 2, 0), STEPS + 1, Moments(0), early=early))
            found[-1]["told"], found[-1]["finished"] = (
                steps_in(folder / "told"),
                steps_in(folder / "finished"),
            )
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps([after_kills(root / "late", early=False), after_kills(root / "early", early=True)]))
