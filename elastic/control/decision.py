"""One call of ``advance`` while it is being worked out: the run as it becomes, what is to be done, what is to be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic.control.rules import Rules
from elastic.control.states import ALLOWED, RunState, State
from elastic.ids import WorkerId
from elastic.protocol.actions import Action, Form, Go, Settle, StartWorkers
from elastic.protocol.plan import Plan

T = TypeVar("T")
CROWD = 12
"""So many are named one by one."""


@dataclass(frozen=True)
class Transition:
    """The decision: ``actions`` are performed in order, after the record is durable where ``durable`` says so.

    ``reason`` is the sentence that goes with it, "" when there is nothing to say; "refused: ..." when the event changed nothing.
    """

    run: RunState
    actions: tuple[Action, ...]
    reason: str
    durable: bool = False
    """It begins a generation or lets it step, settles the outcome of a step, names workers, says that a checkpoint counts, takes over from
    another coordinator, or ends the run."""


class Decision:
    """Private to one call; only ``run``, a value, gets out."""

    def __init__(self, run: RunState, now: float, rules: Rules) -> None:
        self.run, self.now, self.rules = run, now, rules
        self.actions: list[Action] = []
        self.reasons: list[str] = []
        self.refused = False
        self.durable = False
        """What becomes known may not be forgotten: neither by this coordinator's disk nor by the next one."""

    @property
    def plan(self) -> Plan:
        """Of the present generation."""
        plan = self.run.plan
        assert plan is not None, f"{type(self.run.state).__name__} has no plan"
        return plan

    def know(self, **changes: Any) -> None:
        """Replace fields of the run."""
        self.run = evolved(self.run, changes)

    def to(self, state: State) -> None:
        """Move along an edge of the table: the only line by which the run changes state."""
        before = type(self.run.state)
        assert type(state) in ALLOWED[before], f"no edge from {before.__name__} to {type(state).__name__}"
        self.run = evolved(self.run, {"state": state})

    def amend(self, **changes: Any) -> None:
        """Replace fields of the state, which stays what it is."""
        self.run = evolved(self.run, {"state": evolved(self.run.state, changes)})

    def do(self, action: Action) -> None:
        self.actions.append(action)
        self.durable |= isinstance(action, Form | Go | Settle | StartWorkers)

    def say(self, sentence: str) -> None:
        self.reasons.append(sentence)

    def refuse(self, why: str) -> None:
        """The event changes nothing; not even time goes on."""
        self.refused = True
        self.reasons.append(f"refused: {why}")

    def done(self) -> Transition:
        return Transition(self.run, tuple(self.actions), "; ".join(self.reasons), self.durable)


def evolved(value: T, changes: dict[str, Any]) -> T:
    """``dataclasses.replace``, for a value of many fields five times as fast: most of a decision's time was that."""
    assert changes.keys() <= value.__dict__.keys(), f"{type(value).__name__} has no {', '.join(changes.keys() - value.__dict__.keys())}"
    new: T = object.__new__(type(value))
    new.__dict__.update(value.__dict__, **changes)
    return new


def names(workers: Sequence[WorkerId]) -> str:
    """``w1, w2 and w3``; of a crowd the first few and their number."""
    if len(workers) > CROWD:
        return f"{', '.join(workers[:CROWD])} and {len(workers) - CROWD} others"
    if len(workers) < 2:
        return "".join(workers) or "nobody"
    return f"{', '.join(workers[:-1])} and {workers[-1]}"


def count(number: int, thing: str) -> str:
    """``1 worker``, ``2 workers``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
