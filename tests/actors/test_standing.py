"""A decision is performed once its record is safe; how long that took is told before anything else is heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator import Coordinator
from elastic.control.decision import Transition
from elastic.control.run import RunState
from elastic.control.takeover import STOOD_S
from elastic.protocol import events as ev
from elastic.protocol.actions import StartWorkers
from tests.control.play import rules

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("record_s", [0.5 * STOOD_S, 4.0 * STOOD_S])
def test_who_stood_still_says_so_after_it_acted(record_s: float) -> None:
    """One call of the loop is made, with only the clock, the journal and Ray replaced.  The first case is the control of the second."""
    told: list[Any] = []
    coordinator = object.__new__(Coordinator)
    now = [100.0]

    def record(at: float, event: ev.Event, before: RunState, transition: Transition) -> None:
        told.append(event)
        now[0] += record_s if isinstance(event, ev.Capacity) else 0.0

    values = {
        "clock": lambda: now[0],
        "state": RunState.begin(1, 100.0),
        "rules": rules(),
        "group": SimpleNamespace(perform=told.append),
        "_record": record,
        "_tell": lambda *_: None,
    }
    for name, value in values.items():
        setattr(coordinator, name, value)
    coordinator._advance(ev.Capacity(2))
    asked_for, (acted,) = told[0], [each for each in told if isinstance(each, StartWorkers)]
    assert isinstance(asked_for, ev.Capacity) and told.index(acted) == 1
    started = dict.fromkeys(acted.workers, 100.0 + (record_s if record_s > STOOD_S else 0.0))
    assert coordinator.state.members.starting == started, "from when they were really asked for"
