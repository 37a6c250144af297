"""The claims on a run are create-only documents: ``<run>/owner/000003.json`` has what the claimant of
incarnation 3 says of itself.

Each coordinator claims the next incarnation, and so does each process that trains the run by itself or
changes it.
"""

from __future__ import annotations

from storage.errors import Exists
from storage.journal.stored_segment import Json
from storage.numbered import Numbered
from storage.objects import ObjectStore


def claim_owner(store: ObjectStore, run: str, information: Json, after: int | None = None) -> int:
    """Claims the next free incarnation by a create-only write, and returns it.

    With ``after`` it claims the incarnation ``after`` + 1.  Raises :class:`Exists` if somebody else has
    claimed it.
    """
    number = (latest_claim(store, run) if after is None else after) + 1
    while True:
        try:
            _claims(store, run).add(number, {"format": 1, "incarnation": number, **information})
        except Exists:
            if after is not None:
                raise
            number += 1
        else:
            return number


def owners(store: ObjectStore, run: str, after: int = 0) -> dict[int, Json]:
    """Returns the information that each claimant of the run wrote, by incarnation, for the incarnations later
    than ``after``.
    """
    found = (
        (number, owner_of(store, run, number)) for number in range(after + 1, latest_claim(store, run) + 1)
    )
    return {number: owner for number, owner in found if owner is not None}


def newest_owner(store: ObjectStore, run: str) -> Json | None:
    """Returns the information that the newest claimant of the run wrote, or None if there is none, or if it
    is gone or damaged.
    """
    latest = latest_claim(store, run)
    return owner_of(store, run, latest) if latest else None


def owner_of(store: ObjectStore, run: str, number: int) -> Json | None:
    """Returns the information that the claimant of incarnation ``number`` wrote, or None if its claim is gone
    or damaged.
    """
    return _claims(store, run).find(number)


def latest_claim(store: ObjectStore, run: str) -> int:
    """Returns the highest incarnation that was claimed, or 0."""
    return _claims(store, run).newest()


def _claims(store: ObjectStore, run: str) -> Numbered[Json]:
    return Numbered(store, f"{run}/owner", 1)
