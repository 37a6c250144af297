"""Copies in host memory are simulated: each of their rules, if broken, is noticed; and what they are for does happen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from elastic.control.machine import advance
from elastic.ids import NodeId
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import Copies, Copy, NoRoom
from elastic.sim import Coverage, Violation, cluster, simulate
from elastic.sim.cluster import Cluster
from elastic.sim.coordinator import Advance
from elastic.sim.faults import Fault, Kind, draw
from elastic.sim.scenario import Scenario, small_rules
from tests.sim.mutants import Edit, Mutant
from tests.sim.scenarios import CALM, LayoutRule, last_minute
from tests.sim.test_mutants import first_violation, killed_by

HELD = "although every slice of it is held"


def test_what_copies_are_for_does_happen() -> None:
    """Worlds begin from what dead workers have left, from what a lost node's buddy has, and from copies alone; nothing is held for ever."""
    coverage = Coverage()
    for seed in range(60):
        coverage.add(simulate(seed))
    rare = (
        "a world starts from copies alone",
        "a copy at a buddy is used",
        "a copy is torn by death",
        "copies of the dead are released",
        "a dead worker's copy is saved",
    )
    assert [each for each in ("a world starts from tier host", *rare) if not coverage.occasions[each]] == []


def shards(seed: int, *, copy_every: int, kind: Kind, buddy_every: int = 0) -> Scenario:
    """Three workers with a third of the state each, and hardly a save; three deaths, far enough apart."""
    rules = small_rules(2, 3, LayoutRule(1, None, 2, "all"), target_step=24, save_every=50)
    faults = tuple(replace(fault, at=at) for at, fault in zip((9.0, 19.0, 29.0), draw(seed, 3, 1.0, (kind,), doubles=0.0), strict=True))
    return Scenario(rules=replace(rules, copy_every=copy_every, buddy_every=buddy_every), faults=faults, nodes=4, slots=3)


def begun_anew(scenario: Scenario, seed: int) -> int:
    """Returns how often the run gave up all that was committed and began anew."""
    report = simulate(seed, scenario)
    assert report.end == "Finished"
    return sum("(init), abandons" in reason for _, _, reason in report.lines)


@pytest.mark.parametrize(("kind", "buddy_every"), [(Kind.SIGKILL, 0), (Kind.NODE_KILL, 1)])
def test_shards_that_die_are_had_again_from_host_memory(kind: Kind, buddy_every: int) -> None:
    """A dead worker's shard comes from its own node and a dead node's from its buddy; the control without copies begins anew."""
    assert sum(begun_anew(shards(seed, copy_every=1, kind=kind, buddy_every=buddy_every), seed) for seed in range(6)) == 0
    assert sum(begun_anew(shards(seed, copy_every=0, kind=kind), seed) for seed in range(6)) >= 6


def test_where_all_are_lost_at_once_newcomers_begin_from_copies() -> None:
    """R9 in host memory: every worker dies, no keeper does."""
    deaths = tuple(Fault(12.0, Kind.SIGKILL, target) for target in range(8))
    for seed in range(6):
        report = simulate(seed, replace(shards(seed, copy_every=1, kind=Kind.SIGKILL), faults=deaths))
        assert report.end == "Finished" and not any("(init), abandons" in reason for _, _, reason in report.lines)
        assert report.occasions["a world starts from copies alone"]


def darkness(seed: int) -> Scenario:
    """Messages of the nodes are late, and then all workers die, so nobody is left who knows how far they came."""
    rng, scenario = random.Random(seed), shards(seed, copy_every=1, kind=Kind.SIGKILL)
    late = [Fault(10.0, kind, node, duration_s=2.5, amount=1.5) for node in range(3) for kind in (Kind.PARTITION_FROM, Kind.DELAY)]
    deaths = [Fault(12.0 + 0.2 * rng.random(), Kind.SIGKILL, target) for target in range(8)]
    layout = rng.choice((LayoutRule(1, None, 2, "all"), LayoutRule(None, None, 1, "all")))
    return replace(
        scenario, rules=replace(scenario.rules, layout=layout), faults=tuple(sorted((*late, *deaths), key=lambda fault: fault.at))
    )


def duel(seed: int) -> Scenario:
    """Two replicas, of which one dies again and again: perhaps with a copy of a step that the other has not seen committed."""
    rules = replace(small_rules(1, 2, LayoutRule(None, None, 1, "all"), target_step=40, save_every=50), copy_every=1)
    return Scenario(rules=rules, faults=draw(seed, 20, 60.0, (Kind.SIGKILL,), doubles=0.0), nodes=2, slots=2)


def test_in_calm_weather_nobody_is_asked() -> None:
    """A planned stop has all that it needs live: growth waits for no keeper."""
    for seed in range(10):
        report = simulate(seed, replace(CALM, rules=replace(CALM.rules, copy_every=1, buddy_every=3)))
        assert not any("Kept" in type(event).__name__ for _, event, _ in report.lines if event) and report.end == "Finished"


# ---- mutants


def first_violation_of(decide: Advance, scenario: Callable[[int], Scenario], seeds: Iterable[int] = range(60)) -> str:
    """Returns the first violation that ``decide`` causes in ``seeds``; the unbroken machine passes each of these seeds."""
    for seed in seeds:
        simulate(seed, scenario(seed))
        try:
            simulate(seed, scenario(seed), decide)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


def test_not_asking_what_keepers_hold_is_noticed() -> None:
    assert HELD in killed_by(
        "incurious", Edit("copy_inventory", "        decision.do(ListCopies(run.generation, run.cluster.keepers))\n", "")
    )


def test_not_waiting_for_the_answers_of_keepers_is_noticed() -> None:
    assert HELD in killed_by(
        "hasty_of_keepers", Edit("copy_inventory", "    return () if decision.due(copies.answers_until) else missing", "    return ()")
    )


def test_ignoring_copies_is_noticed() -> None:
    edit = Edit("seating", "host = newest_covered([*held, *kept], run.members.classes) if kept else live", "host = live")
    assert HELD in killed_by("forgetful_of_copies", edit)


def test_taking_a_copy_that_is_not_on_the_lineage_is_noticed() -> None:
    rule = "run.history.contains(version) or (version.generation == run.copies.unreported > 0 and version.step > run.step)"
    assert "which was given up" in killed_by("nostalgic_of_copies", Edit("copy_inventory", f"return {rule}", "return True"))


def test_not_believing_the_copies_of_a_silent_world_is_noticed() -> None:
    edit = Edit("copy_inventory", " or (version.generation == run.copies.unreported > 0 and version.step > run.step)", "")
    assert HELD in first_violation_of(Mutant("distrustful", (edit,)).advance(), darkness)


def test_believing_copies_of_a_step_that_was_dropped_is_noticed() -> None:
    edit = Edit("stopping", "unreported=0 if survivors else plan.generation", "unreported=plan.generation")
    assert "which was given up" in first_violation_of(Mutant("trustful", (edit,)).advance(), duel, range(36, 46))


def test_mixing_versions_is_noticed() -> None:
    edit = Edit("seating", "tuple(each for each in holders if each.version == version)", "tuple(holders)")
    assert "and its holders hold" in killed_by("mixing", edit)


def test_taking_copies_from_a_keeper_that_is_lost_is_noticed() -> None:
    """The rule is kept twice: a lost keeper's copies are forgotten, and only keepers that are there are looked at."""
    forgotten = Edit("membership", "hosts={keeper: host for keeper, host in run.copies.hosts.items() if keeper != node}", "")
    there = Edit("copy_inventory", "for node in run.cluster.keepers if node in copies.hosts and", "for node in copies.hosts if")
    assert "takes copies from" in killed_by("faithful", forgotten, there)


def test_releasing_copies_too_early_is_noticed() -> None:
    early = Edit("copy_inventory", "safe = _safe(plan, copied, buddied)", "safe = Version(outcome.step, outcome.generation)")
    assert "are freed, and" in killed_by("tidy", early)


def test_releasing_what_buddies_do_not_have_yet_is_noticed() -> None:
    edit = Edit("copy_inventory", "version = buddied if plan.buddy_every else copied", "version = copied")
    assert "and no buddy has it" in killed_by("tidy_of_buddies", edit)


def test_not_saying_what_is_to_be_protected_is_noticed() -> None:
    edit = Edit("seating", "protected=newest_covered(kept, run.members.classes) or copied", "protected=None")
    assert "protects None, and keepers have all of" in killed_by("careless_of_copies", edit)


# ---- the other side of the rules is kept by workers and keepers

GONE = "has no complete copy any more"


def test_overwriting_a_slot_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that is complete everywhere makes room for the next one."""

    def slot(copies: Copies, slots: list[Copy | None]) -> int | None:
        held = [(copy is not None and copy == copies.copied, n) for n, copy in enumerate(slots) if copy not in copies.saving]
        if not held:
            raise NoRoom
        return None if copies.begun in slots else max(held)[1]

    monkeypatch.setattr(Copies, "slot", slot)
    assert GONE in first_violation(advance, "drawn")


def test_ignoring_what_the_others_have_copied_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next copy is begun before the one before is known to be complete everywhere, and takes the place of the last that was."""
    after = Copies.after

    def at_once(copies: Copies, outcome: Outcome) -> Copies:
        new = after(replace(copies, begun=copies._of(outcome.copied_through)), outcome)
        return replace(new, copied=new.begun)

    monkeypatch.setattr(Copies, "after", at_once)
    found = first_violation(advance, "interregnum")
    assert GONE in found or "was to protect" in found


def test_members_that_skip_copies_by_themselves_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the members' newest copies may be one that some members never made."""
    rng, after = random.Random(0), Copies.after

    def alone(copies: Copies, outcome: Outcome) -> Copies:
        return after(replace(copies, begun=copies._of(outcome.copied_through) if rng.random() < 0.5 else copies.begun), outcome)

    monkeypatch.setattr(Copies, "after", alone)
    assert GONE in first_violation(advance, "drawn")


def test_overwriting_a_save_on_its_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant does not protect the slot of a save under way."""
    free = Copies.free
    monkeypatch.setattr(Copies, "free", lambda copies, slots: free(replace(copies, saving=()), slots))
    assert "was overwritten before it was in the bucket" in first_violation(advance, "drawn")


def test_not_waiting_for_the_slot_of_the_save_before_is_noticed() -> None:
    """The last save begins only once the one before is over, if nothing but saves is copied, and the end then waits for it anew."""
    decide = Mutant("slotless", (Edit("saves", "    if version != decision.run.version:", "    if False:"),)).advance()
    assert "does not wait for its last save" in first_violation_of(decide, last_minute, range(1218, 1219))


def test_counting_a_torn_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def held(sim: Cluster, node: NodeId) -> tuple[Holding, ...]:
        shelf = sim.shelf(node)
        left = [] if shelf is None else list(shelf.left.items())
        return tuple(Holding(name, *slot.copy, keeper=node) for name, slots in left for slot in slots if slot is not None)

    monkeypatch.setattr(cluster, "held_at", held)
    assert "or it is torn" in first_violation(advance, "drawn")
