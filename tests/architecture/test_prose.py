"""Docstrings of the product begin and end like whole sentences, and the list of exceptions only becomes shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import prose

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    file.relative_to(ROOT).as_posix() for package in ("elastic", "actors", "storage") for file in sorted((ROOT / package).rglob("*.py"))
]

pytestmark = pytest.mark.fast


def too_many(file: str, source: str, allowed: int) -> list[str]:
    """Return the faults of a file that has more than it is allowed, each as a line."""
    found = [f"{file}:{line}: {wrong}" for line, wrong in prose.faults(source)]
    return found if len(found) > allowed else []


def test_docstrings_are_whole_sentences() -> None:
    wrong = [line for file in FILES for line in too_many(file, (ROOT / file).read_text(encoding="utf-8"), prose.EXCEPTIONS.get(file, 0))]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_exception_names_a_file() -> None:
    assert [file for file in prose.EXCEPTIONS if file not in FILES] == []
    assert all(count > 0 for count in prose.EXCEPTIONS.values())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Of one copy.", "begins with 'Of'"),
        ("Who attached only leaves.", "begins with 'Who'"),
        ("What was said to a coordinator.", "begins with 'What'"),
        ("As :meth:`recover`, and nothing is begun.", "begins with 'As'"),
        ("The same for a node.", "begins with 'The same'"),
        ("Is the run over?", "begins with 'Is'"),
        ("a broken promise.", "begins with neither"),
        ("(kind, state): how often.", "begins with neither"),
        ("Returns the newest version", "does not end"),
        ("", "begins with neither"),
    ],
)
def test_a_fragment_is_found(text: str, wrong: str) -> None:
    """The control."""
    assert wrong in prose.fault_of(text)


@pytest.mark.parametrize(
    "text",
    [
        "Returns the newest version that every keeper holds.",
        "``cut(tensor)`` returns what a member keeps.",
        ":class:`World` has the groups.",
        "Runs many seeds (see ``coverage.py``).",
        "Prints a table:\n\n    a row",
        'Returns a size as text, or "".',
        "Number of overdue copies after which the run is reported as unprotected.",
        "Asks: does it live?",
    ],
)
def test_a_whole_sentence_is_left_alone(text: str) -> None:
    assert prose.fault_of(text) == ""


def test_docstrings_are_found_wherever_they_may_stand() -> None:
    """Below a module, class, function, constant, field and attribute; a string elsewhere is none."""
    source = '"""M"""\nA = 1\n"""c"""\nclass K:\n    """K"""\n    f: int = 0\n    """f"""\n    def g(self):\n        """g"""\n'
    source += '        self.a = 1\n        """a"""\n        return "r"\nfor x in ():\n    print("p")\n    "s"\n'
    assert sorted(text for _, text in prose.docstrings(source)) == ["K", "M", "a", "c", "f", "g"]


def test_an_exception_counts() -> None:
    source = 'A = 1\n"""Of one copy."""\nB = 1\n"""Of two."""\n'
    assert too_many("a.py", source, 2) == []
    assert [line.partition(" ")[0] for line in too_many("a.py", source, 1)] == ["a.py:2:", "a.py:4:"]
