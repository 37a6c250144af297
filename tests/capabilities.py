"""``python tests/capabilities.py [id ...]`` prints each capability, the tests that carry its id, and their
last result on this machine.

A test carries an id in its name (``test_r14_each_sample_once``) or in the docstring of itself or its class
(``R14: ...``).  A capability has failed if one of its tests has, whatever the others show.  Without a passing
test it is "skipped" or, if none was run, "not proven here": a skipped test proves nothing.  Results are those
that ``tests/conftest.py`` left in pytest's cache; ids and texts are ``tests/capabilities.tsv``.

Its third column names the tests that prove the capability by default, on a CPU.  After a run of all tests
that run by default ``--check`` fails if one of them was not run, and if any test of a capability failed: who
lets a test go, or runs it less often, names there the test that has its assertion.  ``--note`` writes the
column by the results of such a run.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TABLE = TESTS / "capabilities.tsv"
RESULTS = "elastic/results"
"""The key in pytest's cache."""


def rows() -> dict[str, str]:
    """Maps each capability id to what the platform must be able to do."""
    return {name: text for name, text, _ in _lines()}


def proofs() -> dict[str, list[str]]:
    """Maps the ids of the capabilities that the tests that run by default prove to these tests."""
    return {name: tests.split() for name, _, tests in _lines() if tests}


def _lines() -> list[list[str]]:
    return [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]


def noted(texts: Mapping[str, str], tests: Mapping[str, Sequence[str]], outcomes: Mapping[str, str]) -> str:
    """Returns the text of the table in which the tests that passed are the proofs."""
    proven = {
        name: " ".join(test for test in tests[name] if result(test, outcomes) == "passed") for name in texts
    }
    return "".join(
        "\t".join(line) + "\n"
        for line in [("id", "capability", "proven by"), *((n, t, proven[n]) for n, t in texts.items())]
    )


def carried(name: str, docstring: str, ids: Sequence[str]) -> list[str]:
    """Returns the ids that a test's name or docstring carries."""
    words = {word.upper() for word in name.split("_")} | set(re.findall(r"\b[A-Z]\d+\b", docstring))
    return [known for known in ids if known in words]


def carriers(source: str, file: str, ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields (id, node id of a test) for all tests of one file."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                yield from _tests(inner, f"{file}::{node.name}", ast.get_docstring(node) or "", ids)
        yield from _tests(node, file, "", ids)


def _tests(node: ast.stmt, prefix: str, about: str, ids: Sequence[str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
        for found in carried(node.name, f"{about}\n{ast.get_docstring(node) or ''}", ids):
            yield found, f"{prefix}::{node.name}"


def scan(folder: Path, ids: Sequence[str]) -> dict[str, list[str]]:
    """Maps each id to its tests in all files of ``folder``."""
    found: dict[str, list[str]] = {name: [] for name in ids}
    for path in sorted(folder.rglob("test_*.py")):
        for name, test in carriers(
            path.read_text(encoding="utf-8"), path.relative_to(folder.parent).as_posix(), ids
        ):
            found[name].append(test)
    return found


def result(test: str, outcomes: Mapping[str, str]) -> str:
    """Combines the outcomes of all parameters of one test: failed if any failed, else passed if any passed,
    else skipped if any was skipped, else never run."""
    seen = {outcome for node, outcome in outcomes.items() if node.partition("[")[0] == test}
    return next((outcome for outcome in ("failed", "passed", "skipped") if outcome in seen), "never run")


def verdict_of(results: Iterable[str]) -> str:
    """Returns whether a capability is proven here, by the results of its tests."""
    seen = set(results)
    return next((each for each in ("FAILED", "passed", "skipped") if each.lower() in seen), "not proven here")


def amiss(
    tests: Mapping[str, Sequence[str]], outcomes: Mapping[str, str], must: Mapping[str, Sequence[str]]
) -> list[str]:
    """Returns a sentence for each test of a capability that failed, and for each of ``must`` that was not
    run, or proves nothing here.
    """
    found = [
        f"{name}: {test} failed"
        for name, its in tests.items()
        for test in its
        if result(test, outcomes) == "failed"
    ]
    for name, its in must.items():
        results = {
            test: result(test, outcomes) if test in tests[name] else "does not carry this id" for test in its
        }
        found += [
            f"{name}: {test} {how}"
            for test, how in results.items()
            if how not in ("passed", "failed", "skipped")
        ]
        if results and set(results.values()) == {"skipped"}:
            found.append(f"{name}: all its tests were skipped")
    return found


def table(
    texts: Mapping[str, str], tests: Mapping[str, Sequence[str]], outcomes: Mapping[str, str]
) -> Iterator[str]:
    """Yields the lines to print."""
    verdicts = dict.fromkeys(("passed", "FAILED", "skipped", "not proven here"), 0)
    for name, text in texts.items():
        results = {test: result(test, outcomes) for test in tests[name]}
        verdict = verdict_of(results.values())
        verdicts[verdict] += 1
        yield f"{name:<4} {verdict:<16} {text}"
        yield from (f"     {outcome:<16} {test}" for test, outcome in results.items())
    proven = verdicts.pop("passed")
    rest = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items() if number)
    yield f"{proven} of {len(texts)} capabilities proven here{f' ({rest})' if rest else ''}"


def main() -> None:
    known = rows()
    parser = argparse.ArgumentParser(
        description="Prints each capability, the tests that carry its id, and their last result here."
    )
    parser.add_argument("id", nargs="*", help="a capability's id, such as R14; all of them without one")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print the sum alone, and fail unless the tests of the table prove what they must",
    )
    parser.add_argument(
        "--note", action="store_true", help="write the tests that passed into the table, after a whole run"
    )
    arguments = parser.parse_args()
    asked = arguments.id
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"there is no capability {', '.join(unknown)}; the ids are in tests/capabilities.tsv")
    texts = {name: text for name, text in known.items() if name in asked or not asked}
    cache = TESTS.parent / ".pytest_cache" / "v" / RESULTS
    outcomes = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    tests = scan(TESTS, list(texts))
    if arguments.note:
        TABLE.write_text(noted(known, scan(TESTS, list(known)), outcomes), encoding="utf-8")
        return
    lines = list(table(texts, tests, outcomes))
    print("\n".join(lines[-1:] if arguments.check else lines))
    if arguments.check and not outcomes:
        sys.exit("there are no results here: run `pytest` first")
    if arguments.check and (
        wrong := amiss(tests, outcomes, {name: its for name, its in proofs().items() if name in texts})
    ):
        sys.exit(
            "\n".join(
                [
                    *wrong,
                    (
                        "Where another test has the assertion of one that was not run, name it in "
                        "tests/capabilities.tsv"
                    ),
                ]
            )
        )


if __name__ == "__main__":
    main()
