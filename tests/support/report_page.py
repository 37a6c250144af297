"""Reads a report page back with the standard library alone: what a browser would show, as texts and numbers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "img", "link", "input", "hr"}


@dataclass
class Read:
    """``tables`` has the cells of each table by its id, ``tiles`` the value by its label, ``texts`` the text
    of each element by its tag.
    """

    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    tiles: dict[str, str] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)
    tags: Counter[str] = field(default_factory=Counter)
    attributes: set[str] = field(default_factory=set)
    data: dict[str, Any] = field(default_factory=dict)

    def points(self, chart: str, line: int) -> list[list[float]]:
        """Returns the points of a line of a plot: x, least, greatest, mean, number."""
        found: list[list[float]] = self.data[chart]["lines"][line]["points"]
        return found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found, self._open, self._table, self._label = (
            Read(),
            list[tuple[str, dict[str, str | None], list[str]]](),
            "",
            "",
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.tags[tag] += 1
        self.found.attributes |= {name for name, _ in attrs}
        if tag in VOID:
            return
        self._open.append((tag, dict(attrs), []))
        if tag == "table":
            self._table = dict(attrs).get("id") or ""
            self.found.tables[self._table] = []
        if tag == "tr" and self._table:
            self.found.tables[self._table].append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.tags[tag] += 1
        self.found.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        opened, attributes, texts = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        said = "".join(texts)
        self.found.texts.setdefault(tag, []).append(said)
        if tag in ("td", "th") and self._table:
            self.found.tables[self._table][-1].append(said)
        elif tag == "table":
            self._table = ""
        elif tag == "dt":
            self._label = said
        elif tag == "dd" and attributes.get("class") == "v":
            self.found.tiles[self._label] = said
        elif tag == "script" and attributes.get("id") == "data":
            self.found.data = json.loads(
                said, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name))
            )


def read_page(html: str) -> Read:
    """Returns what the page says.  Fails if its elements are not closed in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert not reader._open, f"{reader._open[0][0]} is never closed"
    return reader.found
