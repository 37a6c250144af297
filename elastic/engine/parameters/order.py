"""Checks that all members gather and sum the blocks of a split model in the same order.

A collective knows nothing of blocks: the n-th collective of one member meets the n-th of every other member.
So if members run blocks in different orders, as they may if samples decide which blocks run, weights are made
of parts of two blocks, and gradients are sums of two blocks' gradients: they have the right shapes, and
nobody notices.  If members run different numbers of blocks, they wait for ever.

Each member notes each collective that it begins; a fast step pays for nothing else.  The commit compares a
digest of the notes (``Head.order``), before anything is applied.  A world that stands still comes to no
commit: then each member puts its notes into the world's store, and world rank 0 compares them, digests first.
If a step takes longer than the interval of this check, members do it once a step.

Known gap: where a collective of one block meets that of a larger one, gloo ends the process (SIGABRT), and
nobody can compare notes any more.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest

import torch.distributed as dist

from elastic.engine.world import World
from elastic.errors import WorldBroken
from elastic.plan.placement import data_groups

DIGEST = 6
"""Bytes of a digest: a commit record has float64, which are exact for integers of 6 bytes."""
WAIT_S = 10.0
"""Seconds in which all members put their notes into the store once a commit has found that notes differ, and
as many in which world rank 0 tells the difference.  Both take milliseconds.  If notes come too late, the
sentence for the user says less.
"""
SHOWN = 8
"""Largest number of world ranks that a sentence lists for one note."""
COMPARED = 16
"""Largest number of unlike lists of notes that are compared."""
STANDING, COMMITTING, SAID = "order/standing", "order/committing", "order/said"
"""Keys of the store.  The world rank of a member that stands still, or has found a difference in a commit,
follows the first two; the third has the sentence for the user.
"""
UNLIKE = (
    "with parallel.zero = 3 the weights of a block are gathered from all members when the block runs, "
    "so all members must run the same blocks in the same order; {}; set parallel.zero = 2, which has "
    "no such rule, or let the choice of blocks depend neither on samples nor on random numbers"
)
ROUND, COMMIT = 0, 1
"""The notes that a microbatch begins, and that this member has come to the commit."""


class Order:
    """The notes of one member: the collectives that it has begun since the last commit, for the modules with
    these ``names``, in order.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self.world = world
        self.words = ["a microbatch began", "the commit came"]
        """The meaning of each note."""
        for name in names:
            self.words += [
                f"{name or 'the rest of the model'} was gathered",
                f"{name or 'the rest of the model'} was summed",
            ]
        self._notes = 0, array("I")
        """The number of commits, and what has begun since.  They are replaced together, since another thread
        reads them.
        """

    def begins_round(self) -> None:
        self._notes[1].append(ROUND)

    def gathers(self, module: int) -> None:
        """Notes that the module with this place in the names is gathered."""
        self._notes[1].append(COMMIT + 1 + 2 * module)

    def sums(self, module: int) -> None:
        self._notes[1].append(COMMIT + 2 + 2 * module)

    def digest(self) -> float:
        """Returns a number that all members share if they have begun the same.  The commit comes next."""
        _, begun = self._notes
        begun.append(COMMIT)
        return float(_digest(begun))

    def committed(self) -> None:
        """Begins a new list of notes: all members have had the same ones."""
        self._notes = self._notes[0] + 1, array("I")

    def differs(self) -> str:
        """Returns a sentence for the user.  All members have found in a commit that their notes differ, and
        call this.
        """
        found, store, most = "", self.world.store, datetime.timedelta(seconds=WAIT_S)
        with suppress(dist.DistError, RuntimeError):  # errors of the store
            self._tell(COMMITTING)
            if self.world.rank == 0:
                with suppress(dist.DistError, RuntimeError):  # somebody is late
                    store.wait([f"{COMMITTING}/{rank}" for rank in range(self.world.size)], most)
                found = self._difference(COMMITTING)
                store.set(SAID, found)
            else:
                store.wait([SAID], 2 * most)
                found = store.get(SAID).decode()
        return UNLIKE.format(found or "in this step they did not")

    @contextmanager
    def watched(self, every_s: float, tell: Callable[[str], None]) -> Iterator[None]:
        """Checks every ``every_s`` seconds, in a thread of its own, whether this member stands still, and if
        so, whether different orders are the reason.

        Every member must do so.  On world rank 0 ``tell`` gets the sentence for the user.
        """
        over = threading.Event()
        threading.Thread(target=self._watch, args=(over, every_s, tell), name="order", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _watch(self, over: threading.Event, every_s: float, tell: Callable[[str], None]) -> None:
        before, told = (0, 0), (0, 0)
        with suppress(dist.DistError, RuntimeError, WorldBroken):  # errors of the store
            while not over.wait(every_s):
                commits, begun = self._notes
                now = commits, len(begun)
                if now == before and now != told:
                    self._tell(STANDING)
                    told = now
                if now == before and self.world.rank == 0 and (found := self._difference(STANDING)):
                    tell(UNLIKE.format(found))
                    return
                before = now

    def _tell(self, where: str) -> None:
        """Puts this member's notes into the store of the world, and then their number of commits and their
        digest.
        """
        commits, begun = self._notes
        begun = begun[:]  # another thread adds to it
        self.world.store.set(f"{where}/{self.world.rank}/notes", f"{commits} {begun.tolist()}")
        self.world.store.set(f"{where}/{self.world.rank}", f"{commits} {_digest(begun)}")

    def _difference(self, where: str) -> str:
        """Returns the first difference of the notes that the members of a data group have in the store; "" if
        there is none.
        """
        groups = (self._difference_in(where, ranks) for ranks in data_groups(self.world.layout))
        return next(filter(None, groups), "")

    def _difference_in(self, where: str, ranks: Sequence[int]) -> str:
        store, commits, alike = self.world.store, self._notes[0], dict[str, list[int]]()
        there = [rank for rank in ranks if store.check([f"{where}/{rank}"])]
        for rank, said in zip(
            there, store.multi_get([f"{where}/{rank}" for rank in there]) if there else (), strict=True
        ):
            told, digest = said.decode().split()
            if int(told) == commits:
                alike.setdefault(digest, []).append(rank)
        if len(alike) < 2:
            return ""
        notes = dict[int, Sequence[int]]()
        for rank, *_ in [*alike.values()][:COMPARED]:
            told, _, listed = store.get(f"{where}/{rank}/notes").decode().partition(" ")
            if int(told) == commits:  # it may have gone on
                notes[rank] = json.loads(listed)
        return difference(notes, self.words, {ranks[0]: ranks for ranks in alike.values()})


def _digest(begun: array[int]) -> int:
    return int.from_bytes(hashlib.blake2b(begun.tobytes(), digest_size=DIGEST).digest(), "little")


def difference(
    notes: Mapping[int, Sequence[int]], words: Sequence[str], alike: Mapping[int, Sequence[int]] | None = None
) -> str:
    """Returns words about the first place at which the ``notes`` of members, by world rank, differ; "" if
    there is none.

    Missing notes are no difference: such a member has not come as far.  ``alike`` maps each rank in ``notes``
    to all ranks with the same notes.
    """
    alike = alike or {}
    begun = 0
    for place, found in enumerate(zip_longest(*notes.values())):
        did = dict[int, list[int]]()
        for rank, note in zip(notes, found, strict=True):
            if note is not None:
                did.setdefault(note, []).append(rank)
        if len(did) > 1:
            (one, *_), *_ = did.values()
            before = notes[one][place - 1] if place else ROUND
            after = f", after {words[before]}" if before > COMMIT else ""
            each = " and ".join(
                (
                    f"on {_ranks(sorted(other for rank in ranks for other in alike.get(rank, (rank,))))} "
                    f"{words[note]}"
                )
                for note, ranks in did.items()
            )
            where = (
                f"in microbatch {begun} of each member since the last commit"
                if begun
                else "before the first microbatch of a step"
            )
            return f"{where}{after}, {each}"
        begun += ROUND in did
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"world rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
