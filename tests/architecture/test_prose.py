"""The check of docstrings finds fragments, wherever they stand.  ``test_architecture.py`` reads all files
with it.
"""

from __future__ import annotations

import pytest

from tests.architecture import prose

pytestmark = pytest.mark.fast


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
    source = (
        '"""M"""\nA = 1\n"""c"""\nclass K:\n    """K"""\n    f: int = 0\n    """f"""\n    def '
        'g(self):\n        """g"""\n'
    )
    source += (
        '        self.a = 1\n        """a"""\n        return "r"\nfor x in ():\n    print("p")\n    "s"\n'
    )
    assert sorted(text for _, text in prose.docstrings(source)) == ["K", "M", "a", "c", "f", "g"]


def test_each_fault_has_its_line() -> None:
    """The control of the check over all files."""
    source = 'A = 1\n"""Of one copy."""\nB = 1\n"""Returns two."""\nC = 1\n"""Of two."""\n'
    assert [line for line, _ in prose.faults(source)] == [2, 6]
