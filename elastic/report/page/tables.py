"""The tables of a page: incidents, checkpoints, branches and settings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from elastic.report.page.model import Branch, Facts, Table
from elastic.report.page.spent import PHASES, phases_of
from elastic.report.timeline import Timeline
from elastic.report.words import clipped, size_text, when

ROWS = 200
"""Largest number of rows of a table, the newest or the most important."""


def tables_of(facts: Facts) -> list[Table]:
    """Returns the tables, from top to bottom; some may have no rows."""
    return [_incidents(facts.timeline), _checkpoints(facts), *_branches(facts.branches), _settings(facts)]


TIERS = {"init": "new", "live": "a living worker", "host": "memory of a node", "bucket": "the bucket"}


def _incidents(told: Timeline) -> Table:
    rows = []
    for each in told.recoveries[-ROWS:][::-1]:
        world = told.worlds.get(each.generation)
        size, state, again = "", "", ""
        if world is not None:
            size = f"{world.before} → {world.members}" if world.before and not world.first else str(world.members)
            healed = f", {size_text(world.heal_bytes)} moved" if world.heal_bytes else ""
            state, again = TIERS.get(world.tier, world.tier) + healed, str(world.again)
        kind = "start" if world is not None and world.first else "change" if each.planned else "incident"
        phases = [f"{value:.2f}" for value in phases_of(each)]
        total = f"{each.committed_at - each.known_at:.2f}"
        rows.append([when(each.known_at), kind, clipped(each.reason), size, state, again, *phases, total])
    more = len(told.recoveries) - len(rows)
    cut = f" The newest {len(rows)} of {len(told.recoveries):,} are shown." if more else ""
    told_of = (
        "Each change of worlds, newest first, in seconds: decide (all members are fenced), abort (they have left their groups), form "
        "(process groups exist), heal (the state is there), go (all are told to step), step (the first commit).  The time until a fault "
        f"is noticed is not in the journal.{cut}"
    )
    head = ("Time (UTC)", "Kind", "Why", "Workers", "State from", "Steps again", *(name.capitalize() for name in PHASES), "Sum")
    return Table("incidents", "Incidents and changes of worlds", told_of, head, rows, frozenset(range(5, 13)))


KEPT = {
    "newest": "newest",
    "last": "one of the last",
    "every": "at a multiple",
    "best": "best validation",
    "younger": "written not long ago",
    "branch": "a branch or a fork begins here",
    "owed": "an export, samples or a validation is owed",
    "all": "all are kept",
}
"""The rules that keep a checkpoint (``plan/retention.py``), in words."""


def _checkpoints(facts: Facts) -> Table:
    rows = []
    ordered = sorted(facts.checkpoints, key=lambda each: each.version, reverse=True)
    for each in ordered[:ROWS]:
        save = facts.timeline.saves.get(each.version)
        took = f"{save.took_s:.2f}" if save is not None and save.took_s is not None else ""
        who = (
            clipped(", ".join(save.workers[:8]) + (f" and {len(save.workers) - 8} more" if len(save.workers) > 8 else ""), 80)
            if save
            else ""
        )
        about = [
            size_text(each.size),
            took,
            each.layout,
            who,
            each.state,
            ", ".join(KEPT[name] for name in each.kept if name != "newest" or len(each.kept) == 1),
        ]
        rows.append([f"{each.version.step:,}", str(each.version.generation), *about])
    saved, deleted = len(facts.timeline.saves), len(facts.timeline.saves.keys() - {each.version for each in facts.checkpoints})
    gone = f"  Saves that reached the bucket: {saved:,}.  Deleted since: {deleted:,}." if deleted else ""
    cut = f" The newest {ROWS} of {len(ordered):,} are shown." if len(ordered) > ROWS else ""
    told = f"The checkpoints in the bucket, newest first.  A save took the time from the commit of its step to its manifest.{gone}{cut}"
    head = ("Step", "Generation", "Size", "Took (s)", "Layout", "Written by", "State", "Kept because")
    return Table("checkpoints", "Checkpoints", told, head, rows, frozenset(range(4)))


def _branches(branches: Sequence[Branch]) -> list[Table]:
    changes = ((each, name, pair) for each in reversed(branches) for name, pair in each.changed.items())
    rows = [
        [str(each.number), f"{each.step:,}", when(each.at), clipped(name), clipped(before), clipped(after)]
        for each, name, (before, after) in islice(changes, ROWS)
    ]
    head = ("Branch", "From step", "Time (UTC)", "Setting", "Before", "After")
    told = "From some step on the run has other settings: what each branch changed, newest first."
    return [Table("branches", "Branches", told, head, rows, frozenset({0, 1}))]


def _settings(facts: Facts) -> Table:
    rows = [[clipped(name), clipped(value)] for name, value in list(facts.settings.items())[: 3 * ROWS]]
    return Table(
        "settings", "Settings", "The settings of the newest branch, as they were when it began.", ("Setting", "Value"), rows, folded=True
    )
