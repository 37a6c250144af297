"""The world that a worker connects beside the steps of its present one (``elastic/control/ahead.py``)."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from elastic.engine.streams import stream
from elastic.engine.world import ROOM, World
from elastic.errors import WorldBroken
from elastic.plan.copy_budget import amount
from elastic.protocol.plan import Plan

Meets = Callable[[Plan, tuple[str, int]], World]
"""``meets(plan, store)`` returns the plan's world, connected, which is not the present one yet."""


class NextWorld:
    """Connects one world after the other, each on a thread of its own, until one is taken or dropped."""

    def __init__(self, device: torch.device, meets: Meets, tell: Callable[[Plan, str], None]) -> None:
        """``tell(plan, why)`` is called on the thread once it has connected the world of ``plan``, or with the
        reason why it has not.
        """
        self.device, self.meets, self.tell = device, meets, tell
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._made: World | None = None

    def begin(self, plan: Plan, store: tuple[str, int]) -> None:
        """Begins to connect the world of ``plan`` and returns at once; an earlier world is dropped."""
        self.drop()
        self._plan = plan
        threading.Thread(target=self._connect, args=(plan, store), name="next world", daemon=True).start()

    def _connect(self, plan: Plan, store: tuple[str, int]) -> None:
        try:
            self._leave_room()
            with self._beside():
                world = self.meets(plan, store)
        except Exception as error:  # a boundary: the next world connects in its pause then
            if plan is self._plan:
                print(
                    f"generation {plan.generation} is not connected ahead:\n{traceback.format_exc()}",
                    flush=True,
                )
                self.tell(plan, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            wanted = plan is self._plan
            if wanted:
                self._made = world
        if wanted:
            self.tell(plan, "")
        else:
            _end(world)

    def _leave_room(self) -> None:
        """Raises :class:`WorldBroken` if the device has no room for the groups of two worlds."""
        if self.device.type == "cuda" and (free := torch.cuda.mem_get_info(self.device)[0]) < ROOM:
            raise WorldBroken(
                f"the device has {amount(free)} of free memory, less than the {amount(ROOM)} that are left for "
                "the groups of a second world"
            )

    def _beside(self) -> AbstractContextManager[object]:
        """Returns a context whose work on the device does not wait for that of the steps."""
        if self.device.type == "cuda":
            return torch.cuda.stream(stream("next world", self.device))
        return nullcontext()

    def take(self, plan: Plan) -> World:
        """Returns the world of ``plan``, which is the caller's from now on.  Raises :class:`WorldBroken` if it
        is not there.
        """
        with self._lock:
            there, world = self._plan, self._made
            if world is not None and there is not None and _same(there, plan):
                self._plan = self._made = None
                return world
        raise WorldBroken(f"this worker has not connected generation {plan.generation} ahead")

    def drop(self) -> None:
        """Ends what was begun and not taken.  It does not wait."""
        with self._lock:
            world, self._made, self._plan = self._made, None, None
        if world is not None:
            threading.Thread(target=_end, args=(world,), daemon=True).start()


def _same(one: Plan, other: Plan) -> bool:
    return (one.incarnation, one.generation, one.ahead) == (other.incarnation, other.generation, other.ahead)


def _end(world: World) -> None:
    world.abort()
    world.close()
