"""The product's coordinator and keeper, except that they let py-spy find out where a worker stands for as
long as a busy machine needs.

They have the names of the product's classes, since Ray names processes after them, and tests find by these
names what is left.
"""

from __future__ import annotations

from typing import Any

from actors import coordinator, keeper, logs, perform
from tests.support.patience import PATIENCE_S


class Keeper(keeper.Keeper):
    """Gives py-spy the time."""

    def __init__(self, *made_for: Any) -> None:
        logs.EXAMINE_S = PATIENCE_S
        super().__init__(*made_for)


class Coordinator(coordinator.Coordinator):
    """Starts such keepers, and does not kill the worker before they have looked at it."""

    def __init__(self, *made_for: Any) -> None:
        perform.EXAMINE_S, perform.Keeper = PATIENCE_S, Keeper  # type: ignore[misc]
        super().__init__(*made_for)
