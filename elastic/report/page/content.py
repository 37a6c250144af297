"""The page of a run as values: :class:`Facts`, from which it is made, and :class:`Page`, which has its
content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.ids import Version
from elastic.report.page.series import Bin, Columns
from elastic.report.timeline import Timeline


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint that is in the bucket.  ``kept`` names the rules that keep it."""

    version: Version
    size: int
    layout: str
    state: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class BranchRow:
    """A branch after the first: the step from which it goes on, and the settings that it changed, as (before,
    after) by name.
    """

    number: int
    step: int
    at: float
    changed: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Facts:
    """Everything that a page is made of."""

    name: str
    steps: int
    """The number of steps for which the run was asked."""
    global_batch: int
    """The number of samples of a step; 0 if it is not a number."""
    settings: Mapping[str, str]
    columns: Columns
    timeline: Timeline
    checkpoints: Sequence[CheckpointRow] = ()
    branches: Sequence[BranchRow] = ()
    end: str = ""
    """The way in which the run ended, by the bucket: Finished, Stopped or Failed; "" if it has not ended, or
    if nobody knows.
    """
    local: bool = False
    """True if one process trained it last, with ``--local``."""
    alone: Sequence[tuple[float, float | None]] = ()
    """The times at which each process with ``--local`` began and ended (None: not known), if there is no
    journal.
    """
    owed: str = ""
    """The exports and samples that are owed or were given up, in words; "" if there are none."""
    quarantine: int = 0
    """The number of samples that the newest checkpoint has in quarantine."""
    read_at: float = 0.0
    price: float | None = None
    """The price of a node-hour, in any currency; None if nobody has said one."""

    @property
    def reached(self) -> int:
        """The newest step that has a row; 0 without rows."""
        return int(self.columns.finite("step").max(initial=0))


class Tile(NamedTuple):
    """One number that matters, with its label and a remark."""

    label: str
    value: str
    note: str = ""


class Line(NamedTuple):
    """A line of a plot.  ``look`` is "raw", "main", "points" or "stairs"."""

    name: str
    look: str
    points: Sequence[Bin]


class Mark(NamedTuple):
    """The moments near ``x``: their number, and the texts of the first ones."""

    x: float
    number: int
    texts: tuple[str, ...]


class Lane(NamedTuple):
    """A row of marks below a plot."""

    name: str
    kind: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Chart:
    """A plot.  ``x_unit`` is "step", or "s" for seconds since the run began; ``log`` asks for a logarithmic
    axis.
    """

    key: str
    title: str
    x_unit: str
    x_range: tuple[float, float]
    lines: Sequence[Line]
    lanes: Sequence[Lane] = ()
    log: bool = False
    from_zero: bool = False
    wide: bool = True
    told: str = ""
    """The sentence that says in words what the plot shows."""


class TimeShare(NamedTuple):
    """A part of the time of a run, with its use."""

    name: str
    seconds: float
    told: str
    kind: str


@dataclass(frozen=True)
class Page:
    """The page: the facts, and what is computed from them.  The tables show the facts unchanged."""

    facts: Facts
    name: str
    lead: str
    """The sentence that says where the run stands."""
    tiles: Sequence[Tile]
    charts: Sequence[Chart]
    shares: Sequence[TimeShare]
