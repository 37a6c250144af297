"""The prose of the repository as data: every docstring begins and ends like a whole sentence.

A docstring is the text below a module, class, function, constant or field.  The check reads form, not
meaning: a capital letter or a code word first, a full stop last, and no opening that only continues a
sentence which the name began ("Of one copy.").
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.checks import statements

FRAGMENTS = frozenset(
    {
        *(
            "Of",
            "By",
            "From",
            "With",
            "Without",
            "Until",
            "Since",
            "In",
            "On",
            "At",
            "To",
            "For",
            "Into",
            "Between",
            "Among",
            "Beside",
        ),
        *(
            "Who",
            "Whoever",
            "Whose",
            "What",
            "Whatever",
            "Where",
            "Wherever",
            "When",
            "Which",
            "How",
            "Whether",
            "As",
            "Like",
            "Than",
        ),
        *(
            "Has",
            "Is",
            "Are",
            "Was",
            "Does",
            "Do",
            "May",
            "Can",
            "And",
            "But",
            "Or",
            "So",
            "Because",
            "Also",
            "Not",
            "Those",
            "That",
        ),
    }
)
"""First words that make a reader look for the beginning of the sentence elsewhere."""
FRAGMENT_PAIRS = ("The same", "All that", "The one", "The ones")
BEGINS = re.compile(r"[A-Z]|``|:[a-z]+:`")
ENDS = re.compile(r"[.:!?…][)\"'”]?$")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every docstring in ``source``."""
    for node in statements(source):
        body = getattr(node, "body", None)
        owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for number, each in enumerate(body if isinstance(body, list) else ()):
            if (owner and number == 0) or (
                number and isinstance(body[number - 1], ast.Assign | ast.AnnAssign)
            ):
                match each:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield each.lineno, text


def fault_of(text: str) -> str:
    """Returns what is wrong with the form of a docstring, or an empty text."""
    text = text.strip()
    words = text.split()
    if not BEGINS.match(text):
        return "begins with neither a capital letter nor a code word"
    if (first := words[0].rstrip(",:;.")) in FRAGMENTS:
        return f"begins with {first!r}, which continues a sentence that is not there"
    if (pair := " ".join(words[:2])) in FRAGMENT_PAIRS:
        return f"begins with {pair!r}, which continues a sentence that is not there"
    last = text.splitlines()[-1]
    if not ENDS.search(last) and not last.startswith(" "):  # an indented last line shows code or a table
        return "does not end with a full stop"
    return ""


def faults(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, sentence) of every docstring in ``source`` whose form is wrong, in order."""
    found = ((line, text, fault_of(text)) for line, text in docstrings(source))
    yield from sorted(
        (line, f"{text.split()[0] if text.split() else ''} …: {wrong}")
        for line, text, wrong in found
        if wrong
    )
