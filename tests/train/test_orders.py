"""Orders overtake each other, and come twice: a worker still comes into the next world."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress
from itertools import permutations

import pytest

from elastic.protocol.events import Event, Here
from elastic.protocol.member import Member
from elastic.train.apply_fence import ApplyFence
from elastic.train.orders import Controlled, Enter, Leave, Settled, Went
from tests.protocol.test_member import LEASE_S, ME, holding, plan
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.fast
STORE = ("127.0.0.1", 1)


class Lives(Controlled):
    """Lives through worlds as ``Trainer`` does, without training."""

    def run(self) -> None:
        with suppress(Leave):
            while True:
                self._live(self._next_plan())

    def _live(self, order: Enter) -> None:
        with self.apply_fence as member:
            if not member.enter(order.plan):
                return
        self._say(Here(self.worker, order.plan.generation))
        with self.apply_fence as member:
            if not member.barred:
                member.healed(0.0, holding(order.plan.version))
        found = self._await(order.plan.generation, Went, Settled)
        if isinstance(found, Went):
            self._await(order.plan.generation, Settled)
        with self.apply_fence as member:
            answer = member.leave()
        self._answer(answer)


ORDERS = ("fence", "settle", "form", "form")


@pytest.mark.parametrize("order", sorted(set(permutations(ORDERS))))
def test_the_next_world_is_entered_whichever_order_comes_first(order: tuple[str, ...]) -> None:
    """A plan that came before the settlement of the world before it was once thrown away; the worker waited
    for ever and was killed.
    """
    heard = queue.SimpleQueue[Event]()
    lives = Lives(ApplyFence(Member(ME, LEASE_S)), heard.put)
    thread = threading.Thread(target=lives.run)
    thread.start()
    lives.form(plan(1), STORE)
    assert heard.get(timeout=PATIENCE_S) == Here(ME, 1)
    for each in order:
        match each:
            case "fence":
                lives.fence(1)
            case "settle":
                lives.settle(1, None)
            case "form":
                lives.form(plan(2), STORE)
    while (said := heard.get(timeout=PATIENCE_S)) != Here(ME, 2):
        assert said != Here(ME, 1)
    lives.settle(2, None)
    lives.exit()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
