"""Writes the missing documents of a living run anew, if somebody has deleted its folder.

Such a run trains on, and its next save makes the folder again.  But without ``job.json`` nobody could go on
from what it saves, and without its claim no command would find it.  So its coordinator looks for both before
it writes a manifest.

If nothing is missing, this takes three requests, and none of them can replace another.  The list of the
claims shows a newer one.  The claim itself shows whose it is: a run that was begun anew in the same place has
claims of the same numbers.  And ``job.json`` may be missing alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from elastic.runs.branches import document
from elastic.runs.run import Run
from storage.errors import Deposed, Exists


def put_back(run: Run, incarnation: int, life: str, claim: Callable[[], object]) -> str:
    """Writes what is missing of ``job.json`` and of the claim of ``incarnation``; ``claim`` writes the claim.

    Returns the sentence that says so, "" if nothing was missing.  ``job.json`` stays missing if there are
    later branches: the job that it held is not known any more.  Raises :class:`Deposed` if the newest claim
    is that of another ``life``: of a new run of the same name, or of a command that has taken this run over.
    """
    store, name, lacks = run.store, run.job.name, list[str]()
    owner = run.owner()
    if owner is not None and owner.get("life") != life:
        raise Deposed(store.full_name(f"{name}/owner/{owner['incarnation']:06d}.json"))
    with suppress(Exists):
        if not store.exists(f"{name}/job.json") and not run.branches.newest():
            store.put_if_absent(f"{name}/job.json", document(run.job, run.origin))
            lacks.append("job.json")
    with suppress(Exists):
        if owner is None or owner["incarnation"] < incarnation:
            claim()
            lacks.append("the claim")
    if not lacks:
        return ""
    return (
        f"somebody has deleted {store.full_name(name)}, or a part of it: {' and '.join(lacks)} of the "
        "run are written again, so the run can go on from its next save.  All other deleted files are "
        "lost, such as checkpoints and metrics; a later start does not notice if the data or the code "
        "have changed"
    )
