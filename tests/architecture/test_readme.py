"""The README and the guide are right about the code: the states and their edges, the rooms, and every file
that they name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elastic.control.edges import ALLOWED

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
GUIDE = ROOT / "examples" / "guide"
PAGES = (README, *sorted(GUIDE.glob("*.md")))
STATE = re.compile(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$")
ROOM = re.compile(r"^(\w+(?:/\w+)?)/ {2,}\S")
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
FILE = re.compile(r"\b((?:elastic|actors|storage|tests|examples)/[a-z0-9_/]+\.(?:py|md|toml|yaml|tsv))\b")
TEST = re.compile(r"(?:(\w+)/)?(test_\w+\.py)")


def test_the_table_of_states_has_every_edge() -> None:
    lines = (GUIDE / "concepts.md").read_text(encoding="utf-8").splitlines()
    rows = [found.groups() for line in lines if (found := STATE.match(line))]
    told = {state: set(re.findall(r"`(\w+)`", following)) for state, following in rows}
    assert told == {
        state.__name__: {each.__name__ for each in following}
        for state, following in ALLOWED.items()
        if following
    }
    assert len(told) == len(rows), "a state has one row"


def rooms(text: str) -> list[str]:
    return [found[1] for line in text.splitlines() if (found := ROOM.match(line))]


def test_the_readme_has_every_room_and_no_other() -> None:
    """A room is a package of ours, or of elastic."""
    packages = {file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "elastic").glob("*/__init__.py")}
    told = rooms(README.read_text(encoding="utf-8"))
    assert sorted(told) == sorted({*packages, "actors", "storage", "examples", "tests"})
    assert rooms("elastic/nowhere/   a room\nsomewhere/  another\nno room: x/ y") == [
        "elastic/nowhere",
        "somewhere",
    ], "the control"


def missing(text: str, folder: Path) -> list[str]:
    """Return what a page in ``folder`` names and the repository lacks: targets of links, headings that they
    lead to, files, and tests.

    Tests are named as ``folder/test_x.py``, or as ``test_x.py`` in the folder of the test before, or in any
    if there was none on the line.
    """
    found: list[str] = []
    for line in text.splitlines():
        links = [(file, heading) for file, heading in LINK.findall(line) if "://" not in file]
        found += [f"{file}{heading}" for file, heading in links if not _leads(file, heading, text, folder)]
        found += [file for file in FILE.findall(line) if "/test_" not in file and not (ROOT / file).exists()]
        room = "**"
        for named, file in TEST.findall(line):
            room = named or room
            found += [] if any((ROOT / "tests").glob(f"{room}/{file}")) else [f"{room}/{file}"]
    return found


def _leads(file: str, heading: str, text: str, folder: Path) -> bool:
    target = folder / file
    if not target.exists():
        return False
    if not heading:
        return True
    lines = (target.read_text(encoding="utf-8") if file else text).splitlines()
    return heading in {
        "#" + re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in lines
        if line.startswith("#")
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert missing(page.read_text(encoding="utf-8"), page.parent) == []


def test_what_is_not_there_is_found() -> None:
    """The control."""
    wrong = (
        "[a](nowhere.md), [b](examples/guide/faults.md#no-such), elastic/nowhere.py, "
        "actors/test_nowhere.py, test_s3.py, [c](#none)"
    )
    right = (
        "[a](examples/guide/faults.md), [b](examples/guide/faults.md#the-promise), elastic/job.py, "
        "storage/test_s3.py, test_urls.py"
    )
    assert missing(right, ROOT) == []
    assert missing(wrong, ROOT) == [
        *("nowhere.md", "examples/guide/faults.md#no-such", "#none"),
        *("elastic/nowhere.py", "actors/test_nowhere.py", "actors/test_s3.py"),
    ]
