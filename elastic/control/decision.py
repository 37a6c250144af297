"""A decision: the run, the actions and the reasons while one call of ``advance`` works them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elastic.control.evolve import evolve
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.ids import NodeId, WorkerId
from elastic.protocol.actions import Action, Form, Go, Settle, StartWorkers
from elastic.protocol.events import Fact
from elastic.protocol.plan import Plan

CROWD = 12
"""Largest number of workers that a sentence names one by one; more would fill the line."""


@dataclass(frozen=True)
class Transition:
    """The result of ``advance``: the run afterwards, and the actions in their order.

    If ``durable`` is set, the actions are performed only once the record of the decision is durable.
    """

    run: RunState
    actions: tuple[Action, ...]
    reason: str
    """The sentence that says why; it is "" if there is nothing to say, and "refused: ..." if the event
    changed nothing.
    """
    durable: bool = False
    """True if the decision begins a generation or lets it step, settles the outcome of a step, names workers,
    declares a checkpoint valid, gives up a save or a checkpoint, fixes the last step, takes over from another
    coordinator, or ends the run.
    """
    taken: tuple[Fact, ...] = ()
    """The facts of the event that were not refused."""


class Decision:
    """A decision that is being worked out.  It is private to one call; only its result leaves the call."""

    def __init__(self, run: RunState, now: float, rules: Rules, heard_until: float) -> None:
        """Everything that arrived before ``heard_until`` has been handled.  ``heard_until`` is earlier than
        ``now`` while events wait.
        """
        self.before = run
        self.run, self.now, self.rules, self.heard_until = run, now, rules, min(heard_until, now)
        self.actions: list[Action] = []
        self.reasons: list[str] = []
        self.refusals: list[str] = []
        self.taken: list[Fact] = []
        """The events that were not refused."""
        self.durable = False
        """True if the new knowledge must survive this coordinator and its disk."""
        self._opened: dict[tuple[str, str], dict[Any, Any]] = {}

    @property
    def plan(self) -> Plan:
        """The plan of the present generation."""
        plan = self.run.plan
        assert plan is not None, f"{type(self.run.state).__name__} has no plan"
        return plan

    @cached_property
    def devices(self) -> dict[tuple[NodeId, str], WorkerId]:
        """The workers by node and device, as far as devices are known.  Whoever adds a worker adds it here, too;
        workers that are gone may still be here.

        It is made once in a decision, since a thousand workers may join in one.
        """
        return {(known.node, known.device): each for each, known in self.run.workers.items() if known.device}

    def know(self, part: str = "", /, **changes: Any) -> None:
        """Replaces fields of the run, or of its value ``part``: ``know("history", fruitless=0)``."""
        self.run = evolve(
            self.run, **({part: evolve(getattr(self.run, part), **changes)} if part else changes)
        )

    def amend(self, **changes: Any) -> None:
        """Replaces fields of the present state.  Only ``edges.py`` enters another state."""
        self.know("state", **changes)

    def open(self, part: str, name: str) -> dict[Any, Any]:
        """Returns the dictionary ``name`` of the run's value ``part`` as a copy that this decision may
        change.

        The copy is made once in a decision, so a hundred messages copy a dictionary of ten thousand workers
        once.
        """
        there: dict[Any, Any] = getattr(getattr(self.run, part), name)
        if self._opened.get((part, name)) is not there:
            there = self._opened[part, name] = dict(there)
        # replaces the part each time, since ``seating.py`` caches by its identity
        self.know(part, **{name: there})
        return there

    def due(self, deadline: float) -> bool:
        """Returns whether ``deadline`` is over and whatever arrived before it has been handled: an answer in
        time is never overlooked.
        """
        return self.heard_until >= deadline

    def do(self, action: Action) -> None:
        self.actions.append(action)
        self.durable |= isinstance(action, Form | Go | Settle | StartWorkers)

    def say(self, sentence: str) -> None:
        self.reasons.append(sentence)

    def refuse(self, why: str) -> None:
        """Refuses the event that is being taken, so that it changes nothing and the run does not go on
        because of it.
        """
        self.refusals.append(why)

    def done(self) -> Transition:
        reasons = self.reasons if self.taken else [f"refused: {why}" for why in self.refusals]
        return Transition(self.run, tuple(self.actions), "; ".join(reasons), self.durable, tuple(self.taken))


def names(workers: Sequence[WorkerId]) -> str:
    """Returns ``w1, w2 and w3``; of more than ``CROWD`` workers, the first few and the number of the others."""
    if len(workers) > CROWD:
        return f"{', '.join(workers[:CROWD])} and {len(workers) - CROWD} others"
    if len(workers) < 2:
        return "".join(workers) or "nobody"
    return f"{', '.join(workers[:-1])} and {workers[-1]}"


def count(number: int, thing: str) -> str:
    """Returns ``1 worker``, ``2 workers``."""
    return f"{number} {thing}{'' if number == 1 else 's'}"
