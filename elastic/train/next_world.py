"""The world that a worker connects beside the steps of its present one (``elastic/control/ahead.py``)."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from elastic.engine.streams import stream
from elastic.engine.world import ROOM, World
from elastic.errors import WorldBroken
from elastic.plan.copy_budget import amount
from elastic.protocol.plan import Plan

ENDS_S = 5.0
"""Longest time in seconds for which a worker that ends waits until the worlds that it dropped have ended, too.  An
abort takes one or two on a busy device.
"""
Forms = Callable[[Plan, tuple[str, int]], World]
"""``forms(plan, store)`` returns the plan's world, which is neither connected nor the present one yet."""


class NextWorld:
    """Connects one world after the other, each on a thread of its own, until one is taken or dropped."""

    def __init__(
        self,
        device: torch.device,
        forms: Forms,
        connects: Callable[[World], None],
        tell: Callable[[Plan, str], None],
    ) -> None:
        """``tell(plan, why)`` is called on the thread once it has connected the world of ``plan``, or with the
        reason why it has not.
        """
        self.device, self.forms, self.connects, self.tell = device, forms, connects, tell
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._made: World | None = None
        """The world of ``_plan``, once it is formed."""
        self._connected = False
        self._ending: threading.Thread | None = None
        """The thread that ends the world that was dropped last, and then waits for the one before it."""

    def begin(self, plan: Plan, store: tuple[str, int]) -> None:
        """Begins to connect the world of ``plan`` and returns at once; an earlier world is dropped."""
        self._replace(plan)
        threading.Thread(target=self._connect, args=(plan, store), name="next world", daemon=True).start()

    def _connect(self, plan: Plan, store: tuple[str, int]) -> None:
        world, why = None, ""
        try:
            self._leave_room()
            with self._beside(plan):
                world = self.forms(plan, store)
                with self._lock:
                    if plan is not self._plan:
                        raise WorldBroken("another world is wanted now")
                    self._made = world
                self.connects(world)
        except Exception as error:  # a boundary: the next world connects in its pause then
            why, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
        with self._lock:
            wanted = plan is self._plan
            if wanted:
                self._made, self._connected = None if why else world, not why
        if world is not None and (why or not wanted):
            self._end(world)
        if wanted and why:
            print(f"generation {plan.generation} is not connected ahead:\n{trace}", flush=True)
        if wanted:
            self.tell(plan, why)

    def _leave_room(self) -> None:
        """Raises :class:`WorldBroken` if the device has no room for the groups of two worlds."""
        if self.device.type == "cuda" and (free := torch.cuda.mem_get_info(self.device)[0]) < ROOM:
            raise WorldBroken(
                f"the device has {amount(free)} of free memory, less than the {amount(ROOM)} that are left for "
                "the groups of a second world"
            )

    def _beside(self, plan: Plan) -> AbstractContextManager[object]:
        """Returns a context whose work on the device waits neither for that of the steps nor for that of another
        attempt, whose members may be lost.
        """
        if self.device.type == "cuda":
            return torch.cuda.stream(stream(f"next world {plan.ahead}", self.device))
        return nullcontext()

    def take(self, plan: Plan) -> World:
        """Returns the world of ``plan``, which is the caller's from now on.  Raises :class:`WorldBroken` if it
        is not there.
        """
        with self._lock:
            there, world = self._plan, self._made
            if world is not None and self._connected and there is not None and _same(there, plan):
                self._plan = self._made = None
                return world
        raise WorldBroken(f"this worker has not connected generation {plan.generation} ahead")

    def drop(self) -> None:
        """Ends what was begun and not taken.  It does not wait."""
        self._replace(None)

    def close(self) -> None:
        """Drops, and returns once all that was dropped has ended, or after ``ENDS_S``."""
        self.drop()
        if (ending := self._ending) is not None:
            ending.join(ENDS_S)
            if ending.is_alive():
                print(f"a world that was connected ahead has not ended within {ENDS_S:g} s", flush=True)

    def _replace(self, plan: Plan | None) -> None:
        with self._lock:
            world, connected = self._made, self._connected
            self._plan, self._made, self._connected = plan, None, False
            if world is not None:
                # its own thread ends a world that still connects, as soon as it comes free
                ends = self._end if connected else self._free
                self._ending = threading.Thread(
                    target=self._drops, args=(partial(ends, world), self._ending), daemon=True
                )
                self._ending.start()

    def _drops(self, end: Callable[[], None], before: threading.Thread | None) -> None:
        # at the same time as the thread before: the abort of one world waits for the kernels of the other one
        end()
        if before is not None:
            before.join(ENDS_S)

    def _end(self, world: World) -> None:
        self._free(world)
        world.close()

    def _free(self, world: World) -> None:
        """Aborts the world on an accelerator, where the abort of another world waits for its kernels.

        With gloo nothing waits for it, and it is never aborted: its ports were found while other threads of this
        process opened sockets too, so its abort could end connections of the present world.
        """
        if self.device.type == "cuda":
            world.abort()


def _same(one: Plan, other: Plan) -> bool:
    return (one.incarnation, one.generation, one.ahead) == (other.incarnation, other.generation, other.ahead)
