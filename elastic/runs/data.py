"""Binds a run to the samples that it was begun on, wherever they are stored.

Their fingerprint and their number are in ``<run>/data.json``.  A fork that has not trained has no such file,
and is bound to the samples of the run from which it was forked.
"""

from __future__ import annotations

from elastic.config.values import without_secrets
from elastic.errors import JobError
from elastic.runs.branches import Branches
from elastic.runs.run import Run
from storage.documents import seal, unseal
from storage.errors import Damaged, Exists, Missing

OF_ROWS = "rows-"
"""Beginning of the fingerprint of a dataset that names none itself: a digest of some of its rows."""


def bind(run: Run, fingerprint: str, samples: int) -> None:
    """Binds the run to its samples.  Raises as :func:`check` does."""
    if check(run, fingerprint, samples):
        return
    about = {"format": 1, "fingerprint": fingerprint, "samples": samples, "args": run.job.data.args}
    try:
        run.store.put_if_absent(f"{run.job.name}/data.json", seal(about))
    except Exists:  # another command was faster, or the file is damaged
        if not check(run, fingerprint, samples):
            run.store.put(f"{run.job.name}/data.json", seal(about))


def check(run: Run, fingerprint: str, samples: int) -> bool:
    """Returns whether the run itself is bound to its samples; False if only its origin is, or no run is.

    Raises :class:`JobError` if the run, or its origin, was begun on other samples.
    """
    name, found = run.job.name, None
    while found is None:
        key = f"{name}/data.json"
        try:
            found = unseal(run.store.get(key), run.store.full_name(key), 1)
        except (Missing, Damaged):
            there = run.branches if name == run.job.name else Branches(run.store, name)
            if (origin := there.origin()) is None:
                return False
            name = origin.run
    here = without_secrets("data.args", run.job.data.args)
    if found["fingerprint"] != fingerprint:
        same = "make fingerprint() return the same in every process"
        if fingerprint.startswith(OF_ROWS) and found["fingerprint"].startswith(OF_ROWS):
            same = (
                "if the samples are the same, and only computed numbers in their rows differ on this "
                f"kind of CPU, give the dataset a fingerprint() that returns {found['fingerprint']!r}"
            )
        there = without_secrets("data.args", found["args"])
        other, data = (
            (f" now and {there} in the run", "its data.args") if there != here else ("", "that data")
        )
        raise JobError(
            f"data.args = {here}{other}: the dataset has the fingerprint {fingerprint}, but the run "
            f"{run.job.name!r} in bucket = {run.job.bucket!r} was begun on data with the fingerprint "
            f"{found['fingerprint']}; choose another name, or use {data} again; {same}"
        )
    if (begun_on := found.get("samples", samples)) != samples:  # runs of earlier versions did not note it
        raise JobError(
            f"data.args = {here}: the dataset has {samples} samples, but the run {run.job.name!r} in "
            f"bucket = {run.job.bucket!r} was begun on {begun_on} samples with the same fingerprint, "
            "and the order of samples depends on their number; choose another name, or use that data "
            "again; a fingerprint() must change with the samples"
        )
    return name == run.job.name
