"""The validations of a run in its bucket: an object for each, whose name tells the result.

    <run>/validations/000000000050-000003-2.7183_3735928559.json

The name has the version, the loss, and the number that stands for the held-out samples
(:mod:`elastic.report.best`).  So one listing finds the best of a hundred thousand steps, and reads no row.
"""

from __future__ import annotations

import time
from contextlib import suppress

from elastic.ids import Version
from elastic.report.best import Loss
from elastic.report.metrics import VALIDATION, Row, json_line, numbers_of
from storage.errors import Exists
from storage.objects import ObjectStore

NAME = r"(?P<step>\d+)-(?P<generation>\d+)-(?P<mean>nan|-?inf|-?\d+([.]\d+)?(e[+-]?\d+)?)(_(?P<data>\d+))?[.]json"
"""Matches the name of an object."""
TOLD = ("step", "generation", "time", *VALIDATION)
"""Names of the numbers of a row that the object of its validation has, too."""


def store(bucket: ObjectStore, run: str, row: Row) -> None:
    """Writes the object of a validation.  ``row`` has the numbers of :data:`TOLD`, and may have others.  An
    object that is there already stays.
    """
    text = json_line({name: row[name] for name in TOLD if name in row})
    with suppress(Exists):
        bucket.put_if_absent(f"{run}/validations/{_name_of(row)}", f"{text}\n".encode())


def store_late(
    bucket: ObjectStore, run: str, version: Version, mean: float, count: int, held_out: str
) -> None:
    """Writes the object of a validation that ends after the row of its step was stored.  ``held_out``
    identifies its samples.
    """
    row: Row = {
        "step": version.step,
        "generation": version.generation,
        "time": time.time(),
        **numbers_of(mean, count, held_out),
    }
    store(bucket, run, row)


def stored(bucket: ObjectStore, run: str) -> dict[Version, tuple[str, Loss]]:
    """Returns the key of the object of each validation, and the loss that its name tells."""
    folder, known = f"{run}/validations/", dict[Version, tuple[str, Loss]]()
    for found in bucket.matching(folder, NAME):
        version = Version(int(found["step"]), int(found["generation"]))
        known[version] = f"{folder}{found[0]}", Loss(float(found["mean"]), int(found["data"] or 0))
    return known


def loss_in(row: Row) -> Loss:
    """Returns the loss of a row that has one."""
    return Loss(row["validation_loss"], int(row.get("validation_data", 0)))


def _name_of(row: Row) -> str:
    """Returns the name of the object of a validation.  The loss has the same bits when it is read."""
    loss = loss_in(row)
    over = f"_{loss.data}" if loss.data else ""
    return f"{row['step']:012d}-{row['generation']:06d}-{float(loss.mean)!r}{over}.json"
