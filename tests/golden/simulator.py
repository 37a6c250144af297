"""What the simulator saw for a row of seeds, as a short line each: it holds through moves, renames and other wordings.

The digest of a seed covers every decision in order: when, by which event, in which state before and after, and which actions.  Of events
and actions it takes the type, as a journal names it, and all values but the sentences that people read.  So it changes when a rule, a
model or a random draw does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from elastic.control import codec, machine
from elastic.control.states import RunState
from elastic.sim import simulate

SEEDS = range(200)
SENTENCES = frozenset({"reason", "why", "detail", "signature", "operation", "what"})
"""Fields that hold words for people."""


def seen(seed: int) -> str:
    """Returns how the run of ``seed`` ended, and the digest of what happened on the way."""
    digest = hashlib.sha256()

    def watched(run: RunState, event: Any, now: float, rules: Any) -> Any:
        decided = machine.advance(run, event, now, rules)
        states = [type(each.state).__name__ for each in (run, decided.run)]
        line = [now.hex(), _numbers(codec.encode(event)), states, [_numbers(codec.encode(each)) for each in decided.actions]]
        digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
        return decided

    report = simulate(seed, advance=watched)
    return f"{report.end}, {report.generations} generations, {report.events} events, {digest.hexdigest()[:16]}"


def _numbers(value: Any) -> Any:
    """Returns ``value``, as the journal would hold it, without its sentences."""
    if isinstance(value, dict):
        return {name: _numbers(each) for name, each in value.items() if name not in SENTENCES}
    return [_numbers(each) for each in value] if isinstance(value, list) else value


def seen_by_all(seeds: Iterable[int] = SEEDS) -> dict[str, str]:
    return {str(seed): seen(seed) for seed in seeds}
