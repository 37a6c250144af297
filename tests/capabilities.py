"""``python tests/capabilities.py [id ...]`` prints each capability, the tests that carry its id, and their last result on this machine.

A test carries an id in its name (``test_r14_each_sample_once``) or in the docstring of itself or its class (``R14: ...``).  A
capability has failed if one of its tests has, whatever the others show.  Without a passing test it is "skipped" or, if none was run, "not
proven here": a skipped test proves nothing.  Results are those that
``tests/conftest.py`` left in pytest's cache; ids and texts are ``tests/capabilities.tsv``.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parent
RESULTS = "elastic/results"
"""The key in pytest's cache."""


def rows(path: Path = TESTS / "capabilities.tsv") -> dict[str, str]:
    """Maps each capability id to what the platform must be able to do."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return {name: text for name, text in (line.split("\t") for line in lines)}


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
        for name, test in carriers(path.read_text(encoding="utf-8"), path.relative_to(folder.parent).as_posix(), ids):
            found[name].append(test)
    return found


def result(test: str, outcomes: Mapping[str, str]) -> str:
    """Combines the outcomes of all parameters of one test: failed if any failed, else passed if any passed, else skipped if any was
    skipped, else never run."""
    seen = {outcome for node, outcome in outcomes.items() if node.partition("[")[0] == test}
    return next((outcome for outcome in ("failed", "passed", "skipped") if outcome in seen), "never run")


def table(texts: Mapping[str, str], tests: Mapping[str, Sequence[str]], outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines to print."""
    verdicts = dict.fromkeys(("passed", "FAILED", "skipped", "not proven here"), 0)
    for name, text in texts.items():
        results = {test: result(test, outcomes) for test in tests[name]}
        seen = set(results.values())
        verdict = next((each for each in ("FAILED", "passed", "skipped") if each.lower() in seen), "not proven here")
        verdicts[verdict] += 1
        yield f"{name:<4} {verdict:<16} {text}"
        yield from (f"     {outcome:<16} {test}" for test, outcome in results.items())
    proven = verdicts.pop("passed")
    rest = ", ".join(f"{number} {verdict}" for verdict, number in verdicts.items() if number)
    yield f"{proven} of {len(texts)} capabilities proven here{f' ({rest})' if rest else ''}"


def main() -> None:
    known = rows()
    parser = argparse.ArgumentParser(description="Prints each capability, the tests that carry its id, and their last result here.")
    parser.add_argument("id", nargs="*", help="a capability's id, such as R14; all of them without one")
    asked = parser.parse_args().id
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"there is no capability {', '.join(unknown)}; the ids are in tests/capabilities.tsv")
    texts = {name: text for name, text in known.items() if name in asked or not asked}
    cache = TESTS.parent / ".pytest_cache" / "v" / RESULTS
    outcomes = json.loads(cache.read_text(encoding="utf-8")) if cache.exists() else {}
    print("\n".join(table(texts, scan(TESTS, list(texts)), outcomes)))


if __name__ == "__main__":
    main()
