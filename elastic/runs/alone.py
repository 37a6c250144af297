"""The processes that train a run by themselves, with ``--local``: the claims that they make, and the ends
that they leave in the bucket.

Such a process writes no journal.  So it says how it ended in an object of its own,
``ends/<incarnation>.json``.  A process of another machine cannot be seen: if its claim has no such object,
the process may have died or may still train.  If the run was claimed since, it ends at its next save.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from elastic.control.run import TERMINAL, Ended, Failed, Stopped
from elastic.errors import JobError
from storage.errors import StorageError
from storage.journal import owner_of, owners
from storage.numbered import Numbered
from storage.objects import ObjectStore

ADDRESS = "local"
"""Address in the claim of a run that one process trains by itself (``--local``)."""


def ends(store: ObjectStore, name: str) -> Numbered[Ended]:
    """Returns the ends of the processes that trained the run ``name`` by themselves, numbered by their
    incarnations.
    """
    return Numbered(store, f"{name}/ends", 1, of=_how)


def spans(store: ObjectStore, name: str) -> list[tuple[float, float | None]]:
    """Returns the times at which each process that trained the run ``name`` by itself began and ended, oldest
    first.  The end is None if the process has not said that it ended.
    """
    said = Numbered[Mapping[str, Any]](store, f"{name}/ends", 1)
    alone = (
        (number, owner)
        for number, owner in owners(store, name).items()
        if owner["address"] == ADDRESS and owner.get("trains", True) and "at" in owner
    )
    return [(owner["at"], (said.find(number) or {}).get("at")) for number, owner in alone]


def _how(about: Mapping[str, Any]) -> Ended:
    kind = next((each for each in TERMINAL if each.__name__ == about["state"]), Stopped)
    return kind(**{each.name: about[each.name] for each in fields(kind) if each.name in about})


def claim(trains: bool) -> dict[str, Any]:
    """Returns the entries of a claim of this process.  Without ``trains`` the process only changes the run,
    as a roll-back does.
    """
    return {"life": life_of(os.getpid()), "at": round(time.time(), 3), "trains": trains}


def process(owner: Mapping[str, Any]) -> int:
    """Returns the id of the process of this machine that made a claim, if it lives and is not this one;
    otherwise 0.
    """
    if (owner["address"], owner["host"]) != (ADDRESS, platform.node()):
        return 0
    pid = int(owner.get("life", "").partition(" ")[0] or 0)
    return pid if pid and pid != os.getpid() and life_of(pid) == owner["life"] else 0


def is_ours(owner: Mapping[str, Any] | None) -> bool:
    """Returns whether this process made a claim.  None stands for a claim that is gone with the run's
    folder.
    """
    return owner is not None and owner.get("life") == life_of(os.getpid())


def elsewhere(store: ObjectStore, name: str, incarnation: int, owner: Mapping[str, Any]) -> bool:
    """Returns whether the process that claimed the run as ``incarnation`` is one of another machine that may
    still train it.
    """
    ours = owner["address"] != ADDRESS or owner["host"] == platform.node() or not owner.get("trains", True)
    return not ours and ended(store, name, incarnation) is None


def unseen(store: ObjectStore, name: str, incarnation: int, recorded: int) -> bool:
    """Returns whether a process of another machine may still train the run in a generation of which the
    bucket knows nothing.

    Only claims before ``incarnation`` count.  ``recorded`` is the last incarnation that recorded a state, or
    0.  It has skipped the generations of the claims before it, so those claims are not read.  The claims
    after it are read newest first, without those that have an end.
    """
    ended_ones = {*ends(store, name).numbers()}
    without = [number for number in range(incarnation - 1, recorded, -1) if number not in ended_ones]
    found = ((number, owner_of(store, name, number)) for number in without)
    return any(owner is None or elsewhere(store, name, number, owner) for number, owner in found)


def begun_at(owner: Mapping[str, Any]) -> str:
    """Returns where and when a claim was made, in words, in the time zone of this machine."""
    at = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(owner["at"])) if "at" in owner else ""
    return f"on host {owner['host']}{at}"


@dataclass
class EndWriter:
    """Writes how the process that claimed the run ends: by the error that leaves the ``with`` statement, or
    else as ``how`` says then.
    """

    store: ObjectStore
    name: str
    claim: int = 0
    """The incarnation that the process claimed; 0 before its claim."""
    how: Ended | None = None
    """The way in which it ended; None while it goes on."""

    def __enter__(self) -> EndWriter:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.how = self.how if error is None else _failed(error)
        self.write()

    def write(self) -> None:
        """Writes how the process ends, if it is known by now, unless its claim is gone with the run's folder.

        Raises nothing if the bucket fails: the process then counts as one that died.
        """
        with suppress(StorageError, OSError):
            if (how := self.how) and self.claim and is_ours(owner_of(self.store, self.name, self.claim)):
                about = {"format": 1, "state": type(how).__name__, "at": round(time.time(), 3), **vars(how)}
                ends(self.store, self.name).add(self.claim, about)


def _failed(error: BaseException) -> Ended:
    if isinstance(error, KeyboardInterrupt):
        return Stopped(f"{str(error) or 'Ctrl-C'}; a later start goes on from the last save")
    return Failed(str(error) or type(error).__name__, str(error) if isinstance(error, JobError) else "")


def ended(store: ObjectStore, name: str, incarnation: int) -> Ended | None:
    """Returns how the process that claimed the run as ``incarnation`` ended, or None if it has not
    said so.
    """
    return ends(store, name).find(incarnation)


def life_of(pid: int) -> str:
    """Returns a text that tells a process from a later one with the same id: the id, and its start in ticks
    since the boot; "" if the process is gone.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{pid} {fields[18]}"
