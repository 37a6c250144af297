"""The README's table of states is the one that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from elastic.control.edges import ALLOWED

README = Path(__file__).resolve().parents[2] / "README.md"
ROW = re.compile(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$")


def test_the_table_of_states_has_every_edge() -> None:
    rows = [found.groups() for line in README.read_text(encoding="utf-8").splitlines() if (found := ROW.match(line))]
    told = {state: set(re.findall(r"`(\w+)`", following)) for state, following in rows}
    assert told == {state.__name__: {each.__name__ for each in following} for state, following in ALLOWED.items() if following}
    assert len(told) == len(rows), "a state has one row"
