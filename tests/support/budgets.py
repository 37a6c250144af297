"""Limits what the tests of a folder may start, so that whoever adds a test pays for it with another one, or
says here why not.

Seconds differ between machines, and are never asserted.  Numbers hardly do; still a processor with other
instructions makes torch compile more, so a number above its budget is a reminder and fails nothing.  They are
counted in a run of all tests by default.  Parts of the tests raise the audit events of Python that are
counted, by ``sys.audit``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

WORLD, ACTOR = "elastic.tests.world", "elastic.tests.actor"
"""Audit events of a world of real processes that forms without Ray, and of an actor of Ray; its argument is
the actor's name.
"""
LINE = "$ "
"""The mark of a command line that was started, beside the numbers: who is above a budget is told which they
were.
"""


@dataclass(frozen=True)
class Budget:
    """The numbers of things that the tests of a folder may start by default, and why it takes that many."""

    worlds: int = 0
    """Worlds of real processes, without Ray."""
    runs: int = 0
    """Runs on Ray: coordinators of the tests' own cluster, and commands that train."""
    processes: int = 0
    """Processes that the tests start, and actors of the tests' own cluster."""
    compilations: int = 0
    """Calls of the C++ compiler by torch's, in the tests' processes and in the pools of worlds."""
    why: str = ""


BUDGETS: Mapping[str, Budget] = {
    "tests/actors": Budget(
        runs=90,
        processes=480,
        why="each recovery is of a run on Ray: its coordinator, keepers and workers, and what kills them",
    ),
    "tests/architecture": Budget(
        processes=4, why="what a package imports shows in a process that imports nothing else"
    ),
    "tests/data": Budget(
        worlds=2,
        processes=20,
        why=(
            "rows of others' datasets in a world, and readers; tokenizers and preparations that are killed, "
            "or have their own environment"
        ),
    ),
    "tests/engine": Budget(
        worlds=325,
        processes=24,
        compilations=28,
        why="the bits of worlds are those of one worker; a machine that has compiled nothing before "
        "compiles 17 times, and one with "
        "AVX-512 27 times: torch tries more sets of instructions there, each in a process of its own",
    ),
    "tests/examples": Budget(worlds=2, processes=64, why="each command of the guide"),
    "tests/golden": Budget(
        worlds=14, runs=1, processes=2, why="the bits of the golden jobs, and what makes them"
    ),
    "tests/gpu": Budget(
        worlds=200,
        runs=10,
        processes=60,
        compilations=50,
        why="only where there are GPUs; elsewhere next to nothing",
    ),
    "tests/models": Budget(worlds=20, processes=5, why="models of another library train in worlds"),
    "tests/notices": Budget(
        processes=45, why="a source is a command of the user's, and a keeper gets real signals"
    ),
    "tests/runs": Budget(processes=2, why="a process that lives or is gone holds a run"),
    "tests/sim": Budget(
        processes=4, why="two hash seeds, and the command that simulates, with one job and with two"
    ),
    "tests/state": Budget(
        worlds=38,
        processes=58,
        why="members heal from members; uploaders, keepers and readers of memory are processes",
    ),
    "tests/storage": Budget(
        runs=2, processes=19, why="writers that race or are killed, and a backend that a package brings"
    ),
    "tests/support": Budget(processes=18, why="how processes end is seen of real ones"),
    "tests/test_clusters.py": Budget(processes=5, why="the shell reads the lines of the page of clusters"),
    "tests/test_frame.py": Budget(processes=6, why="the package is built and imported elsewhere"),
    "tests/test_imports.py": Budget(processes=7, why="imports of a process that has imported nothing"),
    "tests/test_log_folder.py": Budget(processes=4, why="a folder of logs that another process writes"),
    "tests/test_objects.py": Budget(processes=2, why="fingerprints are the same in every process"),
    "tests/test_prepared.py": Budget(
        processes=3, why="what a worker still imports after each list of modules"
    ),
    "tests/test_terminal.py": Budget(runs=4, processes=5, why="real terminals, one of which goes away"),
    "tests/test_threads.py": Budget(processes=2, why="threads of a process that has started none"),
    "tests/train": Budget(
        worlds=145,
        processes=16,
        why=(
            "what is foreseen of memory, steps of worlds, and what a module may do in each layout, against "
            "real ones"
        ),
    ),
}
"""The budget of each folder of tests, and of each file beside them; what has no row may start nothing.  Of
processes those count that ``subprocess`` starts, and actors of Ray; those of ``multiprocessing``, as in the
pool of ranks, are seen by the worlds that they form.
"""

_counted = Counter[str]()
_hooked = False


def begin() -> None:
    """Counts from now on in this process."""
    global _hooked
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hear)


def taken() -> dict[str, int]:
    """Returns what was counted since the last call."""
    found = dict(_counted)
    _counted.clear()
    return found


@contextmanager
def uncounted() -> Iterator[None]:
    """Counts nothing meanwhile: what a whole run starts once belongs to no folder, but to the test that came
    first.
    """
    before = taken()
    yield
    taken()
    add(before)


def add(counted: Mapping[str, int]) -> None:
    """Adds what another process has counted."""
    _counted.update(counted)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        line = arguments[1]
        words = (
            [os.fsdecode(each) for each in line] if isinstance(line, list | tuple) else [os.fsdecode(line)]
        )
        if found := kinds(words):
            _counted.update([*found, f"{LINE}{' '.join(words)[:100]}"])
    elif event == WORLD:
        _counted["worlds"] += 1
    elif event == ACTOR:
        _counted.update(["processes", *["runs"] * str(arguments[0]).endswith("/coordinator")])


def kinds(command: Sequence[str]) -> list[str]:
    """Returns as what a command line counts."""
    if tuple(command[1:4]) == (
        "-I",
        "-S",
        "-c",
    ):  # it waits for the end of a run in its parent (``train/alone/local.py``), and computes 10 ms
        return []
    names = {word.rpartition("/")[2] for word in command}
    if command[0].endswith("++"):
        return ["compilations"] * any(name.endswith(".so") for name in names)
    return ["processes", *["runs"] * ({"elastic", "train"} <= names)]


def _split(counted: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the numbers, and those of the command lines, each in order."""
    parts: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for name, number in sorted(counted.items()):
        parts[name.startswith(LINE)][name] = number
    return parts


def lines(counted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a line for each folder that started anything, with its numbers."""
    return [
        f"{folder:20} {', '.join(f'{n} {name}' for name, n in _split(found)[0].items())}"
        for folder, found in sorted(counted.items())
        if found
    ]


def above(counted: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Budget] = BUDGETS) -> list[str]:
    """Returns a sentence for each number, by folder, that is above its budget."""
    found = []
    for folder, numbers in sorted(counted.items()):
        budget = asdict(budgets.get(folder, Budget()))
        numbers, commands = _split(numbers)
        words = " | ".join(f"{number} × {command.removeprefix(LINE)}" for command, number in commands.items())
        started = f"; started: {words}" if words else ""
        for name, number in numbers.items():
            if number > budget[name]:
                found.append(
                    f"{folder} took {number} {name}, and its budget is {budget[name]}: show the new thing "
                    "in a run that is there, let another test go, or raise the budget in "
                    f"tests/support/budgets.py with the reason{started}"
                )
    return found
