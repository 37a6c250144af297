"""Finds the job of a run for a command that does not train it, from a job file that need not be in order.

Such a command must work when it is needed most: a run misbehaves, its user has just edited the job file, and
types `elastic stop`.  So it reads only the name, the bucket and the few settings that it needs.  If the file
cannot be used as a whole, everything else is taken from the job that the run has stored.  Options of the
command line always count, because the user has just typed them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from elastic.config.settings import merge, nearest, read_toml, section_of, source_of
from elastic.errors import JobError
from elastic.job import BEFORE, Job
from elastic.runs.branches import Branches, no_run
from storage.objects import ObjectStore

PLACE = ("name", "bucket")
"""The settings that say which run is meant, and in which bucket it is."""


def job_of_run(path: Path, options: Mapping[str, Any], reads: Collection[str] = ()) -> tuple[Job, list[str]]:
    """Returns the job of the file ``path`` with ``options`` over it.  If that is not valid, returns the job
    that the run has stored, and the sentences that say why.

    ``reads`` are the settings, by their full names, that the command takes from the file even if the rest of
    the file is not valid.  Raises :class:`JobError` for a file that is not TOML, and for a mistake in the
    name, the bucket, ``reads`` or ``options``, or if there is no such run.
    """
    values = read_toml(path)
    try:
        return Job.load(path, options), []
    except JobError as error:
        problems = str(error).splitlines()
    place = merge(_those(values, PLACE), _those(options, PLACE), path.name)
    job: Callable[..., Job] = Job
    checked = partial(job, source_of(path.name, options))
    named = checked(**place)
    own = _own(values, reads)
    *others, last = (
        merge(_over(stored, own, reads) | place, options, path.name) for stored in _stored(named)
    )
    for settings in others:
        with suppress(JobError):
            return checked(**settings), problems
    try:
        return checked(**last), problems
    except JobError:
        if others:
            raise
    checked(**merge(place, options, path.name))  # a mistake in an option is told first
    # there is no run, and what the command reads does not fit the defaults
    store = ObjectStore.open(named.bucket)
    Branches(store, named.name).check_lost()
    raise no_run(named)


def _those(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _own(values: Mapping[str, Any], reads: Collection[str]) -> dict[str, Any]:
    """Returns the part of the file that the command reads.

    A name that is no setting stays if it may be a misspelt setting that the command reads: a command that
    deletes by rules must not overlook one.
    """
    own = dict[str, Any]()
    for section, names in _by_section(reads).items():
        part, given = section_of(Job.model_fields[section].annotation), values.get(section, {})
        assert part is not None, f"{section} is no section"
        known = part.model_fields
        own[section] = (
            {name: each for name, each in given.items() if name in names or name not in known}
            if _table(given)
            else given
        )
    misspelt = [
        name for name in values if name not in Job.model_fields and {*nearest(name, [*own])} & own.keys()
    ]
    return own | _those(values, misspelt)


def _over(stored: Mapping[str, Any], own: Mapping[str, Any], reads: Collection[str]) -> dict[str, Any]:
    """Returns the stored settings.  Settings that the command reads are taken from ``own`` instead, or else
    have their defaults.
    """
    settings = {**stored}
    for name, each in own.items():
        left = {
            key: value
            for key, value in stored.get(name, {}).items()
            if key not in _by_section(reads).get(name, ())
        }
        settings[name] = left | each if _table(each) else each
    return settings


def _by_section(reads: Collection[str]) -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for each in reads:
        section, _, name = each.partition(".")
        found.setdefault(section, []).append(name)
    return found


def _table(value: object) -> bool:
    return isinstance(value, Mapping)


def _stored(named: Job) -> list[dict[str, Any]]:
    """Returns the settings that the run has stored, and after them the same without settings that may be
    invalid by now; no settings if there is no run.
    """
    there = Branches(ObjectStore.open(named.bucket), named.name).job()
    return [BEFORE | there, named.begun_as(there).model_dump(mode="json")] if there else [{}]
