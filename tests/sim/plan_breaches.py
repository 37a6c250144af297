"""The broken rules about members that divide the model, by families.

One rule of this kind is broken in ``tests/support/test_mutate.py``, because the simulator cannot see it: two
members of one replica hold equal cells only along an axis that cuts nothing.  No axis of the table is like this,
and ``tests/plan/test_seats.py`` has a toy.
"""

from __future__ import annotations

import pytest

from elastic.ids import Cell
from elastic.plan import placement
from elastic.plan.layout import Layout
from elastic.protocol import copy_schedule
from tests.sim.mutants import Breach, Edit

LEFT_OVER = "and is left over, and a worker of"
STRANGERS = "goes to ranks"
OTHERS = "and hold another"
SMALL = "have room for"
ROOM = "gets more of the state than it has room for"
ANOTHER = "and copies"
FREE = "free = {number: iter(places) for"


def copies_of_the_first_tensor_rank(patch: pytest.MonkeyPatch) -> None:
    """Members that compute one microbatch together copy the cell of the first of them."""

    def first(layout: Layout, rank: int) -> Cell:
        return placement.cell_of(layout, placement.model_group(layout, placement.data_rank(layout, rank))[0])

    patch.setattr(copy_schedule, "cell_of", first)


PLAN: dict[str, tuple[Breach, ...]] = {
    # A survivor keeps its cell, or gives it up to another survivor.
    "seats of equal cells": (
        Breach(
            "a spare gets the seat of an equal cell",
            LEFT_OVER,
            ("spared", 0),
            Edit("seats", FREE, FREE.replace("places", "places[:1]", 1)),
        ),
    ),
    # Members that compute the same part of the model sum their gradients, and replicas hold the same part of
    # the state.
    "the routes of a sum": (
        Breach(
            "a gradient goes the way of another data group",
            STRANGERS,
            ("together", 0),
            Edit("routes", "self.group = layout.data_group(rank)", "self.group = layout.data_group(0)"),
        ),
        Breach(
            "members with other columns are replicas",
            OTHERS,
            ("together", 0),
            Edit(
                "routes",
                "self.layout.replica_ranks(self.rank)",
                'self.layout.along(("dp_replicate", "tp"), self.rank)',
            ),
        ),
    ),
    # A copy is of its member's cell, and there is room for it.
    "the size of copies": (
        Breach(
            "copies have the size of the first cell",
            SMALL,
            ("together", 0),
            Edit(
                "placement",
                "return {cell_of(layout, rank) for rank in model_group(layout, 0)}",
                "return {cell_of(layout, 0)}",
            ),
        ),
        Breach(
            "a copy has the size of a share of a cell",
            ROOM,
            ("together", 32),
            Edit(
                "seating",
                "copied = min(_least_copied(members, there, nodes),",
                "copied = min(_least_copied(members, there, nodes) // rules.layout.group,",
            ),
        ),
        Breach(
            "members copy the cell of another tensor rank",
            ANOTHER,
            ("together", 0),
            copies_of_the_first_tensor_rank,
        ),
    ),
}
"""Maps the name of a family to its broken rules."""
