"""Worlds, runs, processes and compilations are counted by folder of tests, and more than a folder's budget is
named at the end of a run.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.budgets import ACTOR, WORLD, Budget, above, add, begin, kinds, taken, uncounted


def test_a_folder_above_its_budget_is_named_with_the_number() -> None:
    budgets = {"tests/a": Budget(worlds=3, processes=1)}
    assert above({"tests/a": {"worlds": 3, "processes": 1}}, budgets) == []
    (sentence,) = above({"tests/a": {"worlds": 4}}, budgets)
    assert sentence.startswith("tests/a took 4 worlds, and its budget is 3: ")
    assert [each.split(",")[0] for each in above({"tests/b": {"runs": 1, "processes": 2}}, budgets)] == [
        "tests/b took 2 processes",
        "tests/b took 1 runs",
    ]
    (sentence,) = above({"tests/b": {"processes": 2, "$ sleep 1": 2}}, budgets)
    assert sentence.endswith("; started: 2 × sleep 1")


def test_what_is_started_is_counted_once() -> None:
    """The numbers of other processes are added, and each number is told once."""
    begin()
    before = taken()
    try:
        subprocess.run(["true"], check=True)
        for event, *arguments in ((WORLD,), (ACTOR, "toy/coordinator"), (ACTOR, "toy/w1")):
            sys.audit(event, *arguments)
        add({"worlds": 2, "compilations": 1})
        with uncounted():
            sys.audit(WORLD)
        assert taken() == {"worlds": 3, "runs": 1, "processes": 3, "compilations": 1, "$ true": 1}
        assert taken() == {}
    finally:
        add(before)


def test_a_command_line_counts_as_what_it_does() -> None:
    assert kinds(["python", "-m", "elastic", "train", "job.toml"]) == ["processes", "runs"]
    assert kinds(["bash", "-c", "true"]) == kinds(["python", "-m", "elastic", "history"]) == ["processes"]
    assert kinds(["g++", "a.cpp", "-o", "/tmp/a.so"]) == ["compilations"]
    assert kinds(["/usr/bin/g++", "--version"]) == []
