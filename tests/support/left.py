"""Finds what a run has left, for every test that ends with "nothing is left", and for the storm.

Several clusters may live on one machine, with runs of the same name; only what belongs to the cluster of this
process counts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from pathlib import PurePath

import ray
from ray._private import state

from actors import cluster
from actors.processes import log_folder
from elastic.train.gauges.counters import segment
from tests.support.processes import actors_of_ours

GONE_S = 30.0
"""Time in seconds that processes have to end after they were told to.  By themselves they leave only after
two leases.
"""
POLL_S = 0.02


def left_of(name: str, token: str = "", deadline_s: float = GONE_S) -> list[str]:
    """Returns what is left, in this cluster and on this machine, of all lives of the run ``name``, also of
    the life called ``token``.

    A run is over when its actors' names, its placement groups, segments and log folders are gone: these are
    looked for once.  Processes, and with them ports, memory of copies and of devices, have ``deadline_s`` to
    end.
    """
    once = [*_named(name), *_groups(), *_files({*_lives(name), *filter(None, [token])})]
    until = time.monotonic() + deadline_s
    while (living := actors_of_ours(os.getpid(), _session())) and time.monotonic() < until:
        time.sleep(POLL_S)
    return [*once, *(f"process {each}" for each in living)]


def _of(name: str) -> re.Pattern[str]:
    """Returns a pattern for names of the run's actors, but not of a run called ``<name>-2``.  Its group is
    the token of a life.
    """
    return re.compile(rf"({re.escape(name)}-\d{{4,}}-[0-9a-f]{{6}}|{re.escape(name)})/")


def _named(name: str) -> list[str]:
    entries = ray.util.list_named_actors(all_namespaces=True)
    return [
        f"actor {entry['name']}"
        for entry in entries
        if entry["namespace"] == cluster.NAMESPACE and _of(name).match(entry["name"])
    ]


def _lives(name: str) -> set[str]:
    """Returns the tokens under which actors of the run have lived in this cluster; Ray remembers dead ones."""
    found = (_of(name).match(each["Name"]) for each in state.actors().values())
    return {match[1] for match in found if match} - {name}


def _groups() -> list[str]:
    table = ray.util.placement_group_table()
    return [f"placement group {number}" for number, group in table.items() if group["state"] != "REMOVED"]


def _files(tokens: Iterable[str]) -> list[str]:
    found = []
    for token in sorted(tokens):
        found += [f"segment {path.name}" for path in segment(token, "").parent.glob(segment(token, "*").name)]
        found += [f"folder {log_folder(token)}"] if log_folder(token).exists() else []
    return found


def _session() -> str:
    """Returns Ray's name for this cluster, which is also the name of a folder in which all its processes have
    files open.
    """
    (session,) = {
        part
        for node in ray.nodes()
        for part in PurePath(node["ObjectStoreSocketName"]).parts
        if part.startswith("session_")
    }
    return session
