"""The best of the validations of a run.

Losses on different held-out samples say nothing about each other.  If the samples have changed in between, only losses on those of the
newest version are compared.  An older release did not note which samples it had read; such a loss counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from math import isnan
from typing import NamedTuple

from elastic.ids import Version


def number_of(held_out: str) -> int:
    """Returns the number that stands for held-out samples in a row, which has no text: 32 bits of a digest; 0 if they are not known."""
    return int.from_bytes(sha256(held_out.encode()).digest()[:4]) if held_out else 0


class Loss(NamedTuple):
    """The loss of a validation, and the number of the samples that it is over; 0 if nobody noted it."""

    mean: float
    data: int = 0


class Best(NamedTuple):
    """The version with the smallest loss, and the number of validations that do not count, since they were on other samples."""

    version: Version
    loss: float
    others: int = 0

    @property
    def left_out(self) -> str:
        """The words about the validations that do not count; "" if there are none."""
        each = "1 validation" if self.others == 1 else f"{self.others} validations"
        return f"{each} on other held-out samples not counted" if self.others else ""


def comparable(found: Mapping[Version, Loss]) -> dict[Version, Loss]:
    """Returns the losses on the samples on which the newest version was validated, and those of which nobody noted the samples."""
    newest = next((found[version].data for version in sorted(found, reverse=True) if found[version].data), 0)
    return {version: loss for version, loss in found.items() if loss.data in (0, newest)}


def best(found: Mapping[Version, Loss]) -> Best | None:
    """Returns the best of the :func:`comparable` losses, the first one of several; None if there is none.

    What is no number is never the best.
    """
    counted = comparable(found)
    losses = {version: loss.mean for version, loss in counted.items() if not isnan(loss.mean)}
    version = min(losses, key=lambda each: (losses[each], each), default=None)
    return None if version is None else Best(version, losses[version], len(found) - len(counted))
