"""Gives a short line for each of a row of seeds of the simulator; the line stays the same through moves,
renames and other wordings.

The digest of a seed covers every decision in order: when, by which event, in which state before and after,
and which actions.  Of events and actions it takes the type, as a journal names it, and who, which generation,
which step, which layout (:data:`TAKEN`).  It takes no sentences, and only the type of a state.  So it changes
when a rule, a model or a random draw does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from elastic.control import machine
from elastic.journal import codec
from elastic.sim import simulate

SEEDS = range(200)
TAKEN = frozenset(
    (
        *(
            "worker",
            "workers",
            "node",
            "keepers",
            "members",
            "buddies",
            "incarnation",
            "generation",
            "step",
            "version",
            "by",
        ),
        *(
            "copied",
            "buddied",
            "prepared",
            "held",
            "outcome",
            "outcomes",
            "slots",
            "save",
            "cause",
            "certain",
        ),
        *("plan", "tier", "layout", "dp_replicate", "dp_shard"),
    )
)
"""The fields of events, actions, and the values in them that enter the digest."""


def seen(seed: int, advance: Callable[..., Any] = machine.advance) -> str:
    """Returns how the run of ``seed`` ended where ``advance`` decides, and the digest of what happened on the
    way.
    """
    digest = hashlib.sha256()

    def watched(run: Any, event: Any, now: float, rules: Any) -> Any:
        decided = advance(run, event, now, rules)
        states = [type(each.state).__name__ for each in (run, decided.run)]
        line = [
            now.hex(),
            states,
            *([type(each).__name__, _taken(codec.encode(each))] for each in (event, *decided.actions)),
        ]
        digest.update(json.dumps(line, sort_keys=True).encode() + b"\n")
        return decided

    report = simulate(seed, advance=watched)
    return (
        f"{report.end}, {report.generations} generations, {report.events} events, {digest.hexdigest()[:16]}"
    )


def _taken(value: Any) -> Any:
    """Returns what the digest takes of ``value``, which is encoded as for the journal."""
    if isinstance(value, dict):
        return {name: _taken(each) for name, each in value.items() if name in TAKEN}
    return [_taken(each) for each in value] if isinstance(value, list) else value


def seen_by_all(seeds: Iterable[int] = SEEDS) -> dict[str, str]:
    return {str(seed): seen(seed) for seed in seeds}
