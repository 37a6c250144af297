"""The side effects of committed steps: the user's functions that are called for each step, and a note in the
bucket of the last step for which they were called.

To "tell" a step is to call these functions for it.  A thread of its own writes the note, because a bucket may
take seconds, and no step waits for a bucket.  More steps may be told while one note is written; the next note
then has the newest of them.  So the note lacks at most the steps that were told during one write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.runs import branches
from elastic.threads import keep_going
from storage.documents import seal, unseal
from storage.errors import Damaged, Missing, StorageError
from storage.objects import ObjectStore

FORMAT = 1
BROKEN_S = 2.0
"""Seconds that a world that broke waits for the last note.  All other members wait for this member meanwhile,
and a step without a note is only told again.
"""
ENDS_S = 20.0
"""Seconds that a world that ends without a failure waits for the last note.  The next world forms meanwhile;
the wait ends because a bucket may be down.
"""


class Effects:
    """Calls the user's functions for each committed step, on world rank 0, and notes in the bucket for which
    steps they were called.

    Each committed step is told, in order, even if processes are killed or steps are done again.  A step that
    the note in the bucket covers is never told again.  The last steps, which the note does not cover yet, are
    told once more if the process dies, or if the world ends and the note takes longer than :data:`ENDS_S`
    (:data:`BROKEN_S` if the world broke); the functions can see that by the step number.  A branch tells its
    own steps.
    """

    def __init__(self, store: ObjectStore, run: str, *, tells: bool) -> None:
        """``tells`` is true on world rank 0."""
        self._note, self._tells = _ToldStep(store, run), tells
        self._functions: list[Callable[[int], object]] = []
        self._reached = 0

    def add(self, function: Callable[[int], object]) -> None:
        self._functions.append(function)

    def begin(self, step: int) -> None:
        """Tells the steps up to ``step``, at which the world stands, that were committed and not told.

        It waits for one attempt to find or write the note: without a first note, a later process could not
        know from which step on to tell.
        """
        if self._functions and self._tells:
            self._note.begin(step)
        self.committed(step)

    def committed(self, step: int) -> None:
        """Tells the steps up to ``step`` that were not told yet.  If it is not known yet which were told, the
        next call does it.
        """
        self._reached = step
        if not self._functions or not self._tells or (told := self._note.told) is None:
            return self._note.stir()
        for number in range(told + 1, step + 1):
            for function in self._functions:
                function(number)
            self._note.told = number
            self._note.stir()

    def close(self, *, broken: bool) -> None:
        """Waits for the last note, so that its step is not told again: at most :data:`ENDS_S`, or
        :data:`BROKEN_S` if the world broke.
        """
        if self._note.close(BROKEN_S if broken else ENDS_S) and not broken:
            self.committed(self._reached)  # steps that waited until it was known which were told
            self._note.write()


class _ToldStep:
    """The number of the last step that was told, and what the bucket has of it."""

    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run
        self.told: int | None = None
        """The last step that was told; None if that is not known yet."""
        self._noted, self._key, self._begun = -1, "", 0
        self._stirred, self._asked, self._closing = threading.Event(), threading.Event(), False
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Finds out which steps were told before; if the bucket has no note, notes that telling begins after
        ``step``.  Returns after one attempt.
        """
        self._begun = step
        self._thread = keep_going(
            self._work, "the note of the told steps", lambda text: print(text, flush=True)
        )
        self.stir()
        self._asked.wait()

    def stir(self) -> None:
        """Wakes the thread, which writes the note, or finds out which steps were told.  It does not wait."""
        self._stirred.set()

    def close(self, patience_s: float) -> bool:
        """Lets the thread do what is left to do, once, and waits at most ``patience_s`` seconds for its end.
        Returns whether the thread has ended.
        """
        self._closing = True
        self.stir()
        if self._thread is None:
            return True
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def write(self) -> None:
        """Writes the note, if the bucket does not have it."""
        if self._key and self.told is not None and self.told > self._noted:
            told = self.told
            try:
                self._store.put(self._key, seal({"format": FORMAT, "step": told}))
                self._noted = told
            except StorageError as error:
                print(
                    (
                        f"the functions of ctx.on_committed() were called for step {told}, but this "
                        "could not be recorded in the bucket, so a restart may call them again for "
                        f"this step: {error}"
                    ),
                    flush=True,
                )

    def _work(self) -> None:
        while True:
            self._stirred.wait()
            self._stirred.clear()
            last = self._closing
            try:
                if self._key:
                    self.write()
                else:
                    self._ask()
            finally:
                self._asked.set()
            if last:
                return

    def _ask(self) -> None:
        try:
            key = f"{self._run}/effects/{max(branches.Branches(self._store, self._run).newest(), 1):06d}.json"
            try:
                self._noted = told = int(
                    unseal(self._store.get(key), self._store.full_name(key), FORMAT)["step"]
                )
            except (Missing, Damaged):
                told = self._begun
            self._key, self.told = key, told
            self.write()
        except StorageError as error:
            print(
                "the bucket does not say yet for which steps the functions of ctx.on_committed() "
                f"were called, so they wait: {error}",
                flush=True,
            )
