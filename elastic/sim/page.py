"""``elastic simulate --trace F --costs C``: replays a trace and prints a page of what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic.control.rules import Rules
from elastic.sim.costs import Costs
from elastic.sim.policy import Policy
from elastic.sim.replay import PROTOCOL, Interruption, Protocol, Replayed, most_machines
from elastic.sim.trace import Row

KINDS = {
    "loss": "lost without notice",
    "leave": "left after a notice",
    "growth": "newcomers taken in",
}
WORST = 5
"""Number of incidents that are shown one by one: those that cost most."""


def replay(
    rows: Sequence[Row], costs: Costs, lead_s: float, seconds: float, rules: Rules | None = None
) -> Replayed:
    """Replays the first ``seconds`` of a trace: with the whole protocol up to :data:`PROTOCOL` machines, and
    with the decisions alone if there are more.  Each removal is announced ``lead_s`` before; 0 means that
    none is.  ``rules`` are those of a run, if it has others than a replay of any run.
    """
    way = Protocol if most_machines(rows) <= PROTOCOL else Policy
    return way(rows, costs, lead_s, seconds, rules).replayed()


def numbers(found: Replayed, lead_s: float) -> dict[str, Any]:
    """Returns everything that the page says, as JSON has it."""
    return {
        "machines": found.machines,
        "hours": found.seconds / 3600,
        "lead_s": lead_s,
        "whole_protocol": found.machines <= PROTOCOL,
        "goodput": found.goodput,
        "goodput_paid": found.goodput_paid,
        "steps": found.steps,
        "ideal_steps": found.ideal,
        "start_s": found.start_s,
        "boot_share": found.boot_s / found.up_s if found.up_s else 0.0,
        "lost_steps": found.lost_steps,
        "idle_steps": found.idle,
        "tiers": dict(found.tiers),
        "accounted": found.accounted,
        "incidents": [asdict(each) for each in found.incidents],
        "costs": asdict(found.costs),
    }


def page(found: Replayed, lead_s: float) -> str:
    """Returns the page."""
    costs = found.costs
    notice = f"each removal announced {lead_s:g} s before" if lead_s else "no removal announced"
    way = "the whole protocol" if found.machines <= PROTOCOL else "the decisions, without the protocol"
    tiers = ", ".join(f"{tier} {number}" for tier, number in found.tiers.most_common()) or "nowhere"
    broken = sum(max(each.broken, 0.0) for each in found.incidents)
    lines = [
        f"{found.seconds / 3600:.1f} hours, at most {found.machines} machines, {notice}; replayed by {way}",
        f"M = {costs.microbatches} microbatches a step, {costs.round_s:g} s a round{_about(costs)}",
        "",
        f"goodput of the present    {found.goodput:8.2%}   {found.steps:,} of {found.ideal:,.0f} steps, "
        "from the first commit on",
        f"goodput of the paid       {found.goodput_paid:8.2%}   start-up is {_boot(found):.1%} of the time paid",
        f"first commit              after {found.start_s:,.0f} s",
        f"lost steps                {found.lost_steps:,} commits given up, {broken:,.1f} steps broken under way",
        f"state came from           {tiers}",
        "",
        f"{'incidents':<24}{'number':>8}{'pause, s':>10}{'worst':>8}{'steps':>10}{'of ideal':>10}",
        *(_row(found, kind) for kind in KINDS),
        f"{'workers outside':<24}{'':>8}{'':>10}{'':>8}{found.idle:>10,.1f}{_of(found, found.idle):>10.2%}",
        f"{'together':<24}{len(found.incidents):>8}{'':>10}{'':>8}"
        f"{found.ideal - found.steps:>10,.1f}{_of(found, found.ideal - found.steps):>10.2%}   "
        f"{found.accounted:.1%} of it in the rows above",
    ]
    worst = sorted(found.incidents, key=lambda each: -each.cost)[:WORST]
    if worst:
        lines += ["", "the most expensive"]
    lines += [
        f"  at {each.at / 3600:8.2f} h   {KINDS[each.kind]:<22} {each.pause_s:8.1f} s, {each.cost:8.1f} steps; "
        f"state from {each.tier or '(it has not ended)'}"
        for each in worst
    ]
    lines += [
        "",
        f"costs, s: detect {costs.detect_s:g}, decide {costs.decide_s:g}, form {costs.reform_s:g}, "
        f"heal {costs.heal_s:g}, join {costs.join_s:g}, from the bucket {costs.bucket_s:g}, "
        f"start {costs.start_s:g}",
    ]
    return "\n".join(lines)


def _about(costs: Costs) -> str:
    return f"; {costs.about}" if costs.about else ""


def _boot(found: Replayed) -> float:
    return found.boot_s / found.up_s if found.up_s else 0.0


def _of(found: Replayed, steps: float) -> float:
    return steps / found.ideal if found.ideal else 0.0


def _row(found: Replayed, kind: str) -> str:
    those: list[Interruption] = [each for each in found.incidents if each.kind == kind]
    pauses = [each.pause_s for each in those]
    mean_s, cost = sum(pauses) / max(len(pauses), 1), sum(each.cost for each in those)
    return (
        f"{KINDS[kind]:<24}{len(those):>8}{mean_s:>10.1f}{max(pauses, default=0.0):>8.1f}"
        f"{cost:>10,.1f}{_of(found, cost):>10.2%}"
    )


def json_page(found: Replayed, lead_s: float) -> str:
    return json.dumps(numbers(found, lead_s))
