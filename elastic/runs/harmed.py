"""Says which small documents of a run are damaged, as after a power cut, and what the run has lost
with them.
"""

from __future__ import annotations

from contextlib import suppress
from sys import maxsize
from typing import Any

from elastic.runs.metrics import last_row, places
from elastic.runs.run import Run
from storage.documents import unseal
from storage.errors import Damaged, Missing
from storage.numbered import Numbered

LOST = {
    "code": "it said which code the run used from some step on, and this is lost",
    "owner": (
        "it said where the run was started, and this is lost; if the run still lives on some cluster, "
        "end it there"
    ),
    "ends": "it said how the run ended, and this is lost",
    "asked": (
        "it said which exports and samples were wanted from some step on, and this is lost, so some "
        "may be missing"
    ),
}
"""The folders of documents without which a run can go on, and what is lost with a damaged document."""


def notes(run: Run) -> list[str]:
    """Returns a sentence for each kind of document whose newest document is damaged."""
    store, name, found = run.store, run.job.name, list[str]()
    newest = {folder: Numbered[Any](store, f"{name}/{folder}", maxsize).newest() for folder in LOST}
    keys = {f"{name}/{folder}/{number:06d}.json": LOST[folder] for folder, number in newest.items() if number}
    keys[f"{name}/data.json"] = (
        "it is written again, and it cannot be checked whether the run began on the same samples"
    )
    for key, lost in keys.items():
        with suppress(Missing):
            try:
                unseal(store.get(key), store.full_name(key), maxsize)
            except Damaged as error:
                found.append(f"{error.object} is damaged: {lost}")
    if (there := places(store, name)) and last_row(store, name) is None:
        found.append(f"{store.full_name(f'{name}/metrics/{max(there).name}')} is damaged: its rows are lost")
    return found
