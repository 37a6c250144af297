"""Judges a run under faults by the undisturbed run of the same job, and says which fault cost what.

A run under faults must end as if nothing had happened: same end, same bits, same samples in each step.  That
alone does not prove much: a run that starts again at step 0 ends with the same bits, too.  So the work that
was done, the processes that lived on and the sources of the state are judged as well, by what the operating
system and the counters of the workers say, and the faults must have happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from elastic.protocol.commit_record import Outcome
from elastic.report.recoveries import Recovery
from elastic.report.timeline import WorldSpan

HAPPENED = "faults happened"
"""The name of the assertion that faults have struck: without it, the others show nothing."""
SHOWN = 3
"""Number of examples that a sentence lists."""


@dataclass(frozen=True)
class Finding:
    """One assertion about a run under faults.  ``holds`` is None if it could not be looked at."""

    name: str
    holds: bool | None
    said: str


@dataclass(frozen=True)
class Evidence:
    """The facts about a run that has ended, with or without faults."""

    end: str
    """The state in which it ended, and the step: "Finished at step 60"."""
    digest: str
    """The sha256 of the content of its last checkpoint; "" without one."""
    steps: Mapping[int, Outcome]
    """The outcome of each step of the surviving lineage."""
    microbatches_run: int | None = None
    """Number of microbatches that all workers have computed; None if nobody counted."""


@dataclass(frozen=True)
class Blow:
    """A fault that struck: what it was, at which wall-clock time and step, and whom it struck.  A machine that
    was taken with notice struck at the time of the notice.
    """

    at: float
    step: int
    said: str
    victims: tuple[str, ...]
    """Names that a reason in the journal may have: workers, or the beginning of a node's id."""


@dataclass(frozen=True)
class RecoveryRow:
    """A change of worlds, with the faults before it; or a fault after which no world changed."""

    step: int
    fault: str
    tier: str
    seconds: float | None
    """Time from the fault, or else from the request for the change, until the next commit."""
    redone: int | None
    """Number of committed steps that were done again."""
    reason: str


# ---- what must be the same


def same_end(calm: Evidence, struck: Evidence) -> Finding:
    held = calm.end == struck.end
    return Finding("same end", held, struck.end if held else f"{struck.end}, undisturbed {calm.end}")


def same_bits(calm: Evidence, struck: Evidence, apart: str) -> Finding:
    """``apart`` says in words by what the two checkpoints differ; "" if nobody has compared them."""
    if not (calm.digest and struck.digest):
        return Finding("same bits", False, "a run has no checkpoint at its end")
    held = calm.digest == struck.digest
    said = f"sha256 {struck.digest[:16]}… of the last checkpoint's content"
    return Finding("same bits", held, said if held else f"{said}, undisturbed {calm.digest[:16]}…{apart}")


def same_samples(calm: Evidence, struck: Evidence) -> Finding:
    """Judges that each step used its samples once: those of the undisturbed run, step by step."""
    steps = sorted(calm.steps.keys() | struck.steps.keys())
    wrong = [step for step in steps if _samples(calm, step) != _samples(struck, step)]
    missing = sorted({*range(1, max(steps, default=0) + 1)} - struck.steps.keys())
    if missing or wrong or not steps:
        what = f"missing steps: {_some(missing)}; " if missing else ""
        return Finding("same samples", False, f"{what}steps with other samples: {_some(wrong)}")
    return Finding("same samples", True, f"those of each of {len(steps)} steps, once")


def same_losses(calm: Evidence, struck: Evidence) -> Finding:
    both = sorted(calm.steps.keys() & struck.steps.keys())
    # a loss that is not a number equals itself here
    wrong = [step for step in both if repr(calm.steps[step].loss) != repr(struck.steps[step].loss)]
    said = f"other losses from step {wrong[0]} on, in {len(wrong)} steps" if wrong else "to the bit"
    return Finding("same losses", bool(both) and not wrong, said)


def _samples(run: Evidence, step: int) -> object:
    return run.steps[step].samples if step in run.steps else None


def _some(steps: Sequence[int]) -> str:
    listed = ", ".join(map(str, steps[:SHOWN]))
    return f"{listed} and {len(steps) - SHOWN} more" if len(steps) > SHOWN else listed or "none"


# ---- what must have been so


def faults_struck(
    planned: int, blows: Sequence[Blow], deaths: Mapping[str, str | None], last: int
) -> Finding:
    """Judges that faults struck inside the run.  ``deaths`` has the processes that faults must have ended, and
    in words how the kernel says that they ended; None if they live.
    """
    inside = [each for each in blows if 0 < each.step < last]
    lives = sorted(name for name, how in deaths.items() if how is None)
    counts = Counter(how for how in deaths.values() if how is not None)
    ends = "; ".join(f"{number} × {how}" for how, number in counts.most_common())
    said = f"{len(blows)} of {planned} performed, {len(inside)} of them between the first step and the last"
    said += f"; ended by the kernel's word: {ends}" if ends else ""
    said += f"; not ended by their fault: {', '.join(lives)}" if lives else ""
    return Finding(HAPPENED, bool(inside) and not lives, said)


def work_done(
    calm: Evidence, struck: Evidence, worlds: Sequence[WorldSpan], microbatches: int, blows: int
) -> Finding:
    """Judges that no more was computed than the undisturbed run did, the steps that were given up, and a step
    under way for each fault and each change of worlds.
    """
    name = "bounded work"
    if struck.microbatches_run is None:
        return Finding(name, None, "its workers were on other machines, and nobody counted")
    least = len(calm.steps) * microbatches
    undisturbed = least if calm.microbatches_run is None else calm.microbatches_run
    again, broken = sum(each.again for each in worlds), max(len(worlds) - 1, 0) + blows
    most = undisturbed + (again + broken) * microbatches
    return Finding(
        name,
        least <= struck.microbatches_run <= most,
        f"{struck.microbatches_run:,} microbatches computed, undisturbed {undisturbed:,}; at most {most:,} with "
        f"{again} steps done again and {broken} under way",
    )


def lived_on(changed: Collection[str], members: Sequence[Collection[str]], seen: Collection[str]) -> Finding:
    """Judges that whoever lived on did so in the same process.  ``changed`` are workers whose process has
    changed, ``members`` those of each world, and ``seen`` the workers whose process was seen.
    """
    name = "same processes"
    unseen = {worker for world in members for worker in world} - {*seen}
    if unseen:
        return Finding(name, None, f"{len(unseen)} workers were not seen: on other machines, or for a moment")
    stayed = [len({*before} & {*after}) for before, after in pairwise(members)]
    said = f"{len(members)} worlds; {sum(stayed)} times a member went on in its process"
    wrong = f"; other processes now: {', '.join(sorted(changed))}" if changed else ""
    return Finding(name, not changed, said + wrong)


def sources_of(healed: Mapping[str, int] | None, worlds: Sequence[WorldSpan]) -> Finding:
    """Judges that state came from where the plans say.  ``healed`` has the bytes that workers have received, by
    tier.
    """
    name = "state from the nearest tier"
    if healed is None:
        return Finding(name, None, "its workers were on other machines, and nobody counted")
    tiers = Counter(each.tier for each in worlds if each.tier != "init")
    wrong = [tier for tier in ("host", "bucket") if healed.get(tier) and not tiers[tier]]
    began = ", ".join(f"{number} × {tier}" for tier, number in tiers.most_common()) or "no second world"
    came = ", ".join(f"{size:,} bytes {tier}" for tier, size in healed.items() if size) or "nothing was moved"
    more = f"; no world began from {' or '.join(wrong)}" if wrong else ""
    return Finding(name, not wrong, f"{began}; received: {came}{more}")


def nothing_left(left: Sequence[str]) -> Finding:
    said = "no process, segment, log folder, actor or placement group"
    return Finding("nothing left", not left, f"{', '.join(left[:SHOWN])}" if left else said)


def agrees(findings: Sequence[Finding]) -> bool:
    """Returns whether nothing differs.  What nobody could look at does not count."""
    return all(each.holds is not False for each in findings)


# ---- what the faults cost


def rows_of(
    blows: Sequence[Blow], recoveries: Sequence[Recovery], worlds: Mapping[int, WorldSpan]
) -> list[RecoveryRow]:
    """Returns a row for each change of worlds and for each fault that changed none, in the order of time."""
    caused: dict[int, list[Blow]] = {}
    rows: list[tuple[float, RecoveryRow]] = []
    blows = sorted(blows, key=lambda each: each.at)
    for number, blow in enumerate(blows):
        next_at = blows[number + 1].at if number + 1 < len(blows) else float("inf")
        found = next((each for each in recoveries if each.committed_at > blow.at), None)
        if found is not None and _follows(found, blow, next_at):
            caused.setdefault(found.generation, []).append(blow)
        else:
            rows.append((blow.at, RecoveryRow(blow.step, blow.said, "", None, None, "no world changed")))
    for each in recoveries:
        before = caused.get(each.generation, [])
        if each.generation in worlds and worlds[each.generation].first and not before:
            continue  # the run begins
        # the steps between a notice and the pause for it count: they were paid for, and made
        since = each.known_at if each.planned else min([each.known_at, *(blow.at for blow in before)])
        world = worlds.get(each.generation)
        step = before[0].step if before else (world.step if world else 0)
        said = " and ".join(blow.said for blow in before) or ("" if not each.planned else "(no fault)")
        tier, again = (world.tier, world.again) if world else ("", None)
        rows.append((since, RecoveryRow(step, said, tier, each.committed_at - since, again, each.reason)))
    return [row for _, row in sorted(rows, key=lambda each: each[0])]


def _follows(recovery: Recovery, blow: Blow, next_at: float) -> bool:
    """Returns whether a fault is a cause of the first change of worlds after it: it struck while the worlds
    were changing, or the journal names a victim, or no other fault was before the change, which is no growth.
    """
    if blow.at > recovery.known_at or any(victim in recovery.reason for victim in blow.victims):
        return True
    return not recovery.planned and next_at > recovery.known_at
