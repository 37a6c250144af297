"""Finds what a run that is over has left on its cluster: processes, segments, log folders, actors, placement
groups.  :mod:`actors.processes` and ``elastic clean`` remove such things; here they are only looked for.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import ray

from actors import cluster
from actors.processes import POLL_S, life_of, log_folder, segments

GONE_S = 30.0
"""Seconds that the processes of a run may take to end after the run."""


def left_of(name: str, *, one_machine: bool, deadline_s: float = GONE_S) -> list[str]:
    """Returns what there is of the run ``name`` anywhere on the cluster of this process, and the placement groups
    there, whoever has asked for them.  ``one_machine`` means that all nodes are on this one.

    What was there before the run is not left by it: an earlier run of the same name may have been killed.
    """
    named = [
        f"actor {each['name']}"
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == cluster.NAMESPACE and _is_of(name, each["name"].partition("/")[0])
    ]
    on_nodes = left_here(name, deadline_s) if one_machine else _left_on_nodes(name, deadline_s)
    table = ray.util.placement_group_table()
    groups = sorted(str(number) for number, group in table.items() if group["state"] != "REMOVED")
    return [*named, *dict.fromkeys(on_nodes), *(f"placement group {each}" for each in groups)]


def _left_on_nodes(name: str, deadline_s: float) -> list[str]:
    look = ray.remote(num_cpus=0)(left_here)
    asked = [
        look.options(scheduling_strategy=cluster.only_on(node)).remote(name, deadline_s)
        for node in cluster.nodes()
    ]
    return [each for found in ray.get(asked) for each in found]


def left_here(name: str, deadline_s: float) -> list[str]:
    """Returns what is left of the run on this machine, once its processes have ended or ``deadline_s`` are
    over.
    """
    until = time.monotonic() + deadline_s
    while (living := _processes(name)) and time.monotonic() < until:
        time.sleep(POLL_S)
    files = [
        path.name
        for path in segments(f"{name}-*")
        if life_of(name, path.name.removeprefix("elastic-").rpartition("-")[0])
    ]
    folders = [each.name for each in log_folder("").glob(f"{name}-*") if life_of(name, each.name)]
    return [
        *living,
        *(f"segment {each}" for each in files),
        *(f"log folder {each}" for each in folders),
    ]


def _is_of(name: str, token: str) -> bool:
    return token == name or bool(life_of(name, token))


def _processes(name: str) -> list[str]:
    """Returns the living actors of the run, by the titles that their processes have (:func:`cluster.titled`)."""
    title = re.compile(rf"ray::(Coordinator|Keeper|Worker|Errand) {re.escape(name)}([./:]|$)")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
            except OSError:  # it has gone meanwhile
                continue
            if title.match(words):
                found.append(f"process {entry.name} ({words})")
    return found
