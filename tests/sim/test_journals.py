"""Simulated coordinators write journals as production does, and this version decides every record of them
again, with the same result.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from elastic.control import machine
from elastic.control.machine import Transition
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.journal import codec
from elastic.journal.deltas import Misfit
from elastic.protocol.events import Event
from elastic.report.replay import Mismatch, differences
from elastic.sim.simulation import simulate
from tests.sim.scenarios import ALL

CODE = "this version"


class Scribe:
    """An ``advance`` that keeps the journal of each coordinator, which it knows by the run that its last
    decision left.
    """

    def __init__(self, *, meanwhile: bool = True) -> None:
        self.meanwhile = meanwhile
        self.journals: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        self._open: dict[int, tuple[RunState, RunState, int]] = {}
        """Each entry, by the identity of a run, is (the run, what is recorded of it, number of its journal).
        """

    def __call__(self, run: RunState, event: Event, now: float, rules: Rules) -> Transition:
        transition = machine.advance(run, event, now, rules)
        _, recorded, number = self._open.pop(id(run), (run, run, len(self.journals)))
        if number == len(self.journals):
            self.journals.append((codec.snapshot(run, CODE, rules), []))
        if codec.worth_recording(event, run, transition):
            records = self.journals[number][1]
            records.append(
                codec.record(len(records), now, event, run, transition, recorded if self.meanwhile else None)
            )
            recorded = codec.known_after(event, run, transition.run)
        self._open[id(transition.run)] = (transition.run, recorded, number)
        return transition

    def differences(self) -> list[Mismatch]:
        found = list[Mismatch]()
        # what was left out may be what a delta changes
        with contextlib.suppress(*(() if self.meanwhile else (Misfit,))):
            found.extend(differences(json.loads(json.dumps(self.journals)), CODE))
        return found


def journals_of(scenario: str, seeds: range, *, meanwhile: bool = True) -> list[Mismatch]:
    found = []
    for seed in seeds:
        scribe = Scribe(meanwhile=meanwhile)
        simulate(seed, ALL[scenario](seed), scribe)
        assert sum(len(records) for _, records in scribe.journals) > 5
        found += scribe.differences()
    return found


@pytest.mark.parametrize(("scenario", "seeds"), [("drawn", range(3)), ("interregnum", range(4))])
def test_every_decision_was_made_from_what_is_in_the_journal(scenario: str, seeds: range) -> None:
    """Journals of coordinators that took over count too; states, actions and sentences are compared."""
    assert journals_of(scenario, seeds) == []


def test_what_unrecorded_events_changed_is_needed() -> None:
    """The control: an unrecorded event told of room, for which workers are started later.

    Seed 2 is not among these: without what changed in between, its journal cannot be read at all.
    """
    found = journals_of("drawn", range(2), meanwhile=False)
    assert any(each.what == "actions" and "StartWorkers" in each.recorded for each in found)


@pytest.mark.full
@pytest.mark.parametrize("scenario", list(ALL))
def test_every_decision_of_many_journals_was_made_from_what_is_in_them(scenario: str) -> None:
    assert journals_of(scenario, range(60)) == []
