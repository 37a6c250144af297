"""Limits what the tests of a folder may start, so that whoever adds a test pays for it with another one, or says here why not.

Seconds differ between machines, and are never asserted; numbers do not.  They are counted in a run of all tests by default, and the run
fails above a budget.  Parts of the tests raise the audit events of Python that are counted, by ``sys.audit``.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WORLD, ACTOR = "elastic.tests.world", "elastic.tests.actor"
"""Audit events of a world of real processes that forms without Ray, and of an actor of Ray; its argument is the actor's name."""


@dataclass(frozen=True)
class Budget:
    """What the tests of a folder may start by default, and why it takes that many."""

    worlds: int = 0
    """Worlds of real processes, without Ray."""
    runs: int = 0
    """Runs on Ray: coordinators of the tests' own cluster, and commands that train."""
    processes: int = 0
    """Processes that the tests start, and actors of the tests' own cluster."""
    compilations: int = 0
    """Calls of the C++ compiler by torch's, in the tests' processes and in the pools of worlds."""
    why: str = ""


BUDGETS: Mapping[str, Budget] = {}
"""By folder of tests; what has no row may start nothing."""

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


def add(counted: Mapping[str, int]) -> None:
    """Adds what another process has counted."""
    _counted.update(counted)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        line = arguments[1]
        _counted.update(kinds([os.fsdecode(each) for each in line] if isinstance(line, list | tuple) else [os.fsdecode(line)]))
    elif event == WORLD:
        _counted["worlds"] += 1
    elif event == ACTOR:
        _counted.update(["processes", *["runs"] * str(arguments[0]).endswith("/coordinator")])


def kinds(command: Sequence[str]) -> list[str]:
    """Returns as what a command line counts."""
    names = {word.rpartition("/")[2] for word in command}
    if command[0].endswith("++"):
        return ["compilations"] * any(name.endswith(".so") for name in names)
    return ["processes", *["runs"] * ({"elastic", "train"} <= names)]


def lines(counted: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns a line for each folder that started anything, with its numbers."""
    return [
        f"{folder:20} {', '.join(f'{n} {name}' for name, n in sorted(found.items()))}" for folder, found in sorted(counted.items()) if found
    ]


def above(counted: Mapping[str, Mapping[str, int]], budgets: Mapping[str, Budget] = BUDGETS) -> list[str]:
    """Returns a sentence for each number, by folder, that is above its budget."""
    found = []
    for folder, numbers in sorted(counted.items()):
        budget = asdict(budgets.get(folder, Budget()))
        for name, number in sorted(numbers.items()):
            if number > budget[name]:
                found.append(
                    f"{folder} took {number} {name}, and its budget is {budget[name]}: show the new thing in a run that is there, let "
                    f"another test go, or raise the budget in tests/support/budgets.py with the reason"
                )
    return found
