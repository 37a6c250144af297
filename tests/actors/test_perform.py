"""The coordinator learns from Ray that an actor is gone; if Ray's answer is uncertain, the next answer decides."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import ray

from actors import perform
from actors.perform import NODE_DIED, UNREACHED, Group
from elastic.ids import WorkerId
from elastic.protocol.events import Lost

pytestmark = pytest.mark.fast
AWAY = ray.exceptions.ActorUnavailableError("the connection broke", None)
DEAD = ray.exceptions.RayActorError(error_msg="it was killed")
NODE = ray.exceptions.RayActorError(error_msg="The actor's node has died")


class Call:
    """The result of ``remote()``, whose future ends with ``error``."""

    def __init__(self, error: BaseException) -> None:
        self.end: Future[Any] = Future()
        self.end.set_exception(error)

    def future(self) -> Future[Any]:
        return self.end


class Actor:
    """Each call to ``lives`` ends with the next of ``errors``, the last of them again and again."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.lives = list(errors), self

    def remote(self) -> Call:
        return Call(self.errors.pop(0) if len(self.errors) > 1 else self.errors[0])


@pytest.mark.parametrize(
    ("errors", "reason", "certain"),
    [
        ((DEAD,), "its process died", True),
        ((AWAY, AWAY, DEAD), "its process died", True),
        ((AWAY, NODE), NODE_DIED, False),
        ((AWAY,), UNREACHED, False),
    ],
)
def test_an_actor_out_of_reach_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, errors: tuple[BaseException, ...], reason: str, certain: bool
) -> None:
    """Only what is dead for certain need not be waited for: behind a cut it may live on, and commit."""
    told: Future[Lost] = Future()
    monkeypatch.setattr(perform, "REACH_S", 0.001)
    these = Group.__new__(Group)
    these._lives, these._closing, these.post = [], False, told.set_result  # type: ignore[assignment]
    actor = Actor(*errors)
    these._when_done(actor.remote(), actor, lambda error: these._ended(WorkerId("w1"), error))
    assert told.result(10) == Lost(WorkerId("w1"), reason, certain)
