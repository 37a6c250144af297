"""The drivers of a run: who started it, who attached later, and what becomes of the run when one of them goes.

A driver is heard while it asks how the run stands.  The one that started the run may stop it; one that attached only leaves, unless it is
the last.  With ``on_driver_exit = "detach"`` none of them matters.  Only values: the time comes in.
"""

from __future__ import annotations

from typing import Literal


class Audience:
    """``owner``: the driver that started the run, heard ``now``; ``driver_s``: who was not heard for so long has vanished."""

    def __init__(self, owner: str, on_exit: Literal["stop", "detach"], driver_s: float, now: float) -> None:
        self.owner, self.on_exit, self.driver_s = owner, on_exit, driver_s
        self._heard = {owner: now}
        self._watchers: set[str] = set()
        """Of them, those who only watch: the end is told to them too, but nothing depends on them."""

    def hear(self, driver: str, now: float, *, only: bool = False) -> None:
        """``only``: it only watches."""
        self._heard[driver] = now
        if only:
            self._watchers.add(driver)

    def leave(self, driver: str) -> None:
        """It has seen what it waited for, or was told to go."""
        self._heard.pop(driver, None)

    def present(self, now: float) -> list[str]:
        """Who waits for the run."""
        return [driver for driver, at in list(self._heard.items()) if now - at <= self.driver_s]

    def _counted(self, now: float) -> set[str]:
        return set(self.present(now)) - self._watchers

    def stops_with(self, driver: str, now: float) -> bool:
        """Must the run stop when ``driver`` is told to go?"""
        if self.on_exit == "detach":
            return False
        return driver == self.owner or not self._counted(now) - {driver}

    def left_alone(self, now: float) -> bool:
        """Must the run stop because its drivers have vanished?"""
        return self.on_exit == "stop" and not self._counted(now)
