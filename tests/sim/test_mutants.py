"""A green simulator proves nothing until mutants go red: each rule of the machine and of the member, broken, must be noticed.

Each test breaks one rule in a copy of ``elastic.control``, or of the modules ``authority``, ``member`` or ``uploads`` of
``elastic.protocol``, runs seeds until a promise is broken, and says which.  Unbroken copies of all four pass the seeds that were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.protocol import authority, uploads
from elastic.protocol.authority import Authority, Replica
from elastic.sim import Violation, simulate
from elastic.sim.coordinator import Advance
from elastic.sim.simulation import Simulation
from elastic.sim.worker import Worker
from tests.sim.mutants import Edit, Mutant, broken, mutant_member
from tests.sim.scenarios import ALL, flapping, seeds_of

TAKEN: dict[str, set[int]] = {}
"""Seeds of each scenario that the mutants of this session needed, up to the one that broke a promise."""
UNTAKEN = 8
"""Number of seeds of a scenario in which no mutant of this session was noticed."""


def first_violation(decide: Advance, scenario: str, *, copies: bool = True, seeds: Sequence[int] = ()) -> str:
    """Returns what is said of the first of ``seeds`` that breaks a promise, or "" if none does.

    ``seeds`` are those of the control unless given; they are given if the control's meet the broken rule too late, or break another promise
    first.  Without ``copies`` in host memory, worlds begin from the bucket.
    """
    for seed in seeds or seeds_of(scenario):
        drawn = ALL[scenario](seed)
        if not seeds:
            TAKEN.setdefault(scenario, set()).add(seed)
        try:
            simulate(seed, drawn if copies else replace(drawn, rules=replace(drawn.rules, copy_every=0)), decide)
        except Violation as violation:
            return str(violation).splitlines()[0]
    return ""


def killed_by(name: str, *edits: Edit, scenario: str = "drawn", copies: bool = True, seeds: Sequence[int] = ()) -> str:
    return first_violation(Mutant(name, edits).advance(), scenario, copies=copies, seeds=seeds)


def test_not_waiting_for_the_answers_to_the_fence_is_noticed() -> None:
    edit = Edit("stopping", "if state.pending or not _certain(decision, state)", "if not _certain(decision, state)")
    assert "has neither answered its fence nor been expelled" in killed_by("hasty", edit)


def test_dropping_a_step_in_spite_of_evidence_is_noticed() -> None:
    edit = Edit("stopping", "newest((run.history.last,), plan.generation)", "None")
    assert "is dropped in spite of evidence" in killed_by("forgetful", edit)


def test_applying_a_step_without_evidence_is_noticed() -> None:
    """The mutant takes the commit of the step before for that of the prepared step."""
    old = "settle(plan, answers, newest((run.history.last,), plan.generation))"
    new = "settle(plan, answers, run.history.last and __import__('dataclasses').replace(run.history.last, step=run.history.last.step + 1))"
    assert "evidence" in killed_by("credulous", Edit("stopping", old, new))


def test_hearing_older_generations_is_noticed() -> None:
    """The mutants take an answer to an older fence for one of the present generation."""
    edit = Edit("admission", "if event.generation != run.generation:", "if event.generation > run.generation:")
    another = Edit("stopping", "if event.generation < state.plan.generation:", "if False:")
    assert "has neither answered its fence nor been expelled" in killed_by("nostalgic", edit, another)


def test_ignoring_which_generation_committed_is_noticed() -> None:
    """A member remembers commits of the world before, and says so in its answer to the fence."""
    edit = Edit("commits", "    if outcome.generation != plan.generation:\n        return\n", "")
    assert "is not what happened" in killed_by("indiscriminate", edit)


def test_ignoring_coverage_is_noticed() -> None:
    edit = Edit("seating", "live = newest_covered(held, run.members.classes)", "live = max((each.version for each in held), default=None)")
    assert "which nobody holds whole" in killed_by("careless", edit)


def test_giving_up_what_is_still_held_is_noticed() -> None:
    edit = Edit("seating", "live = newest_covered(held, run.members.classes)", "live = None")
    assert "although every slice of it is held" in killed_by("wasteful", edit)


def test_forgetting_the_leases_of_a_silent_world_is_noticed() -> None:
    edit = Edit("stopping", "bool(state.answers or state.lost) or decision.due(run.watch.lease_until)", "True")
    assert "nobody is out and a lease runs" in killed_by("impatient", edit, scenario="isolation")


def test_counting_a_zombies_manifest_is_noticed() -> None:
    """The rule is kept twice: by the lineage, and by what was asked for."""
    lineage = Edit("saves", "if not run.history.contains(version):", "if False:")
    asked = Edit("saves", "if known is None or not known.asked:", "if False:")
    assert "given up" in killed_by("haunted", lineage, asked, scenario="drawn", seeds=range(2070, 2074))


def test_a_lineage_that_is_not_cut_is_noticed() -> None:
    edit = Edit("edges", "lineage=plan.lineage,\n", "lineage=line,\n")
    assert "is not what happened" in killed_by("boastful", edit)


def test_leaving_a_world_unsettled_is_noticed() -> None:
    edit = Edit("stopping", "        decision.do(Settle(plan.generation, survivors, settlement.outcome))", "        pass")
    assert "was not settled" in killed_by("silent", edit)


def test_failing_with_the_budget_unspent_is_noticed() -> None:
    edit = Edit("commits", "furthest=version, fruitless=0", "furthest=version")
    assert "budget unspent" in killed_by("gloomy", edit, scenario="poor")


def test_never_expelling_the_silent_is_noticed() -> None:
    edit = Edit("stopping", "if state.pending and decision.due(state.deadline):", "if False:")
    assert "no end after" in killed_by("patient", edit)


def test_an_edit_that_no_longer_applies_fails() -> None:
    with pytest.raises(LookupError, match="is 0 times in stopping"):
        killed_by("stale", Edit("stopping", "text that is not there", ""))


def test_aborting_before_the_fence_is_noticed() -> None:
    old = '    if pending:\n        decision.do(Fence(plan.generation, pending))\n    decision.say(f"{cause}: stop'
    settle = "__import__('elastic.protocol.actions', fromlist=['Settle']).Settle(plan.generation, pending, None)"
    new = old.replace("decision.do(Fence", f"decision.do({settle})\n        decision.do(Fence")
    assert "has neither answered its fence nor been expelled" in killed_by("abrupt", Edit("edges", old, new))


def test_taking_a_node_that_is_cut_off_for_a_dead_one_is_noticed() -> None:
    """The rule is kept in two places: for the first loss that is heard of, and for later ones."""
    first = Edit("stopping", "expelled=() if certain else members", "expelled=()")
    second = Edit("stopping", "        if certain:\n", "        if True:\n")
    assert "nobody is out and a lease runs" in killed_by("credulous_of_nodes", first, second, scenario="isolation")


def test_counting_leases_by_one_clock_is_noticed() -> None:
    """A member's clock may be slower than the coordinator's."""
    edit = Edit("machine", "decision.now + decision.rules.lease_over_s", "decision.now + decision.rules.lease_s")
    assert "nobody is out and a lease runs" in killed_by("punctual", edit, scenario="skewed")


def test_a_lease_that_is_too_short_is_noticed() -> None:
    edit = Edit("machine", "decision.now + decision.rules.lease_over_s", "decision.now + 0.5 * decision.rules.lease_s")
    assert "nobody is out and a lease runs" in killed_by("short", edit, scenario="isolation")


def test_forgetting_the_leases_that_a_dead_coordinator_granted_is_noticed() -> None:
    edit = Edit(
        "takeover",
        "lease_until = now + rules.coordinator_lease_over_s + rules.lease_over_s if run.plan is not None else run.watch.lease_until",
        "lease_until = 0.0",
    )
    assert "nobody is out and a lease runs" in killed_by("usurping", edit, scenario="isolated_interregnum")


def test_dropping_here_is_noticed() -> None:
    """Members that said Here are blamed for those that did not."""
    edit = Edit("forming", "        _note(decision, state, event.worker, ready=False)", "        pass")
    assert "said Here and is expelled" in killed_by("deaf", edit)


def test_an_outcome_that_is_not_in_the_journal_is_noticed() -> None:
    edit = Edit("decision", "Form | Go | Settle | StartWorkers", "Form | Go | StartWorkers")
    assert f"{FOLLOWED} Settle(" in killed_by("forgetful_of_outcomes", edit, scenario="interregnum")


def test_a_generation_that_is_not_in_the_journal_is_noticed() -> None:
    edit = Edit("decision", "Form | Go | Settle | StartWorkers", "Go | Settle | StartWorkers")
    assert f"{FOLLOWED} Form(" in killed_by("forgetful_of_generations", edit, scenario="interregnum")


def test_giving_a_name_twice_is_noticed() -> None:
    """The rule is kept twice: names are durable before there are processes of that name, and a stranger's name is passed over."""
    journal = Edit("decision", "Form | Go | Settle | StartWorkers", "Form | Go | Settle")
    known = '        decision.know("members", next_worker=membership.number_of(event.worker) + 1)\n'
    assert "is given twice" in killed_by("forgetful_of_names", journal, Edit("admission", known, ""), scenario="usurpers")


def test_a_checkpoint_that_counts_and_is_not_in_the_journal_is_noticed() -> None:
    then = "    if decision.rules.keep.last:\n        retain(decision)\n"
    edit = Edit("saves", f"    decision.durable = True\n{then}", then)
    rare = range(6163, 6165)
    assert "although every slice of it is held" in killed_by("forgetful_of_checkpoints", edit, scenario="interregnum", seeds=rare)
    assert first_violation(advance, "interregnum", seeds=rare) == ""


def test_beginning_anew_after_a_coordinators_death_is_noticed() -> None:
    """The mutant throws away the history that it folded from the journal."""
    edit = Edit("takeover", "    _say_again(decision)\n", '    decision.know("history", lineage=())\n    _say_again(decision)\n')
    assert "is not what happened" in killed_by("amnesiac", edit, scenario="interregnum")


def test_guessing_what_was_committed_before_a_plan_that_nobody_read_of_is_noticed() -> None:
    """The mutant takes all steps since the journal's end for those of the generation that committed the plan's version."""
    guess = "lineage.extended(run.history.lineage, plan.version) if plan.version > run.version else plan.lineage"
    edit = Edit("edges", "lineage=plan.lineage, saved=saved", f"lineage={guess}, saved=saved")
    assert "is not what happened" in killed_by("guessing", edit, scenario="unshipped")


# ---- the other side of each rule is kept by workers and keepers: here the model of them is broken


FOLLOWED, UNREAD_ACTS = "that was followed by another performs", "has not read all that coordinator"
MEMBER = "elastic.sim.worker.Member"


def test_acting_on_what_nobody_else_knows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant acts on records that only its own disk holds, and neither a majority of the keepers nor the bucket."""
    monkeypatch.setattr(Authority, "secured", lambda *_: True)
    assert UNREAD_ACTS in first_violation(advance, "severed", seeds=range(17, 18))


def test_workers_that_obey_an_older_incarnation_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers refuse to record most such orders, so the test removes this guard as well; then there are two deciders."""
    monkeypatch.setattr(MEMBER, mutant_member(("        if incarnation < self.incarnation:\n            return False\n", "")))
    monkeypatch.setattr(Replica, "heed", lambda *_: True)
    assert FOLLOWED in first_violation(advance, "interregnum")


def test_a_coordinator_lease_that_never_ends_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that is cut off with all its keepers goes on for ever."""
    monkeypatch.setattr(Rules, "coordinator_lease_s", property(lambda _: float("inf")))
    monkeypatch.setattr(Rules, "coordinator_lease_over_s", property(lambda rules: 0.5 * rules.lease_s))
    assert FOLLOWED in first_violation(advance, "severed")


def test_a_number_that_may_be_taken_is_noticed() -> None:
    assert "is begun twice" in killed_by(
        "thrifty", Edit("takeover", "UNREAD = 100\n", "UNREAD = 0\n"), scenario="severed", seeds=range(18, 24)
    )


def test_not_waiting_for_the_leases_of_an_unknown_world_is_noticed() -> None:
    edit = Edit("takeover", "skipped = decision.now + decision.rules.lease_over_s, UNREAD", "skipped = 0.0, UNREAD")
    assert "nobody is out and a lease runs" in killed_by("blind", edit, scenario="abandoned")


# ---- the worker's side of the protocol


@dataclass(frozen=True)
class Breach:
    """One rule of ``Member`` broken.  ``notices``: what the simulator says in ``scenario``."""

    name: str
    old: str
    new: str
    notices: str
    scenario: str = "drawn"


DEFERRED = "or self.applying or self.leaving or older"
MEMBERS = (
    Breach("a fence in the midst of an update is answered at once", DEFERRED, "or self.leaving or older", "in the midst of an update"),
    Breach(
        "a fence is answered although the world before is still to be settled",
        DEFERRED,
        "or self.applying",
        "after it has answered its fence",
        "relapsing",
    ),
    Breach(
        "a fenced member prepares",
        '        if self.barred:\n            raise FencedOff(f"step',
        '        if False:\n            raise FencedOff(f"step',
        "after it has answered its fence",
    ),
    Breach("a fenced member applies", "if not settled and self.barred:", "if False:", "after it has answered its fence"),
    Breach("a fenced member believes what it was sent", '        self.go_on("healed")\n', "", "steps on garbage"),
    Breach("a fence bars nothing", "        self._bar(generation)\n        self._owed", "        self._owed", "may still commit"),
    Breach("a lease is honoured too long", "now > self.lease_until:", "now > self.lease_until + 5.0:", "its lease ran out", "isolation"),
    Breach("a lease has no end", "self.ready_at + self.lease_s\n", "float('inf')\n", "its lease ran out", "isolation"),
    Breach("the newest commit is forgotten", "while len(self.outcomes) > 1 and", "while self.outcomes and", "the last it has applied"),
    Breach(
        "an acknowledgement of another generation forgets",
        " and self.outcomes[0].generation <= generation:",
        ":",
        "which no coordinator was told of",
        "laggard",
    ),
    Breach("a commit is not kept at all", "        self.outcomes.append(outcome)\n", "", "nobody told what step"),
    Breach("an outcome is applied though not prepared", "and outcome.step == self.prepared and self.held", "and self.held", "applies step"),
    Breach("a settlement is dropped", "return outcome if outcome is not None and", "return outcome if False and", "is said to hold"),
    Breach(
        "what a failed update has harmed is held",
        "        self.held, self.applying, self.prepared, self._updated = {}, False, None, None\n",
        "        self.held = dict([self._updated]) if self._updated else {}\n        self.applying, self.prepared = False, None\n",
        "answers that it holds",
    ),
    Breach("older layouts are held after go", "        self.held = {newest: memory}\n", "", "answers that it holds"),
    Breach("a plan is entered in the midst of another", "if plan is not self.waiting or self.inside:", "if False:", "has not left"),
)


@pytest.mark.parametrize("breach", MEMBERS, ids=lambda each: each.name.replace(" ", "-"))
def test_a_member_that_breaks_a_rule_is_noticed(monkeypatch: pytest.MonkeyPatch, breach: Breach) -> None:
    monkeypatch.setattr(MEMBER, mutant_member((breach.old, breach.new)))
    found = first_violation(advance, breach.scenario)
    assert found and breach.notices in found


def test_a_lease_that_counts_from_the_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer may be long under way, or wait in a process that stood still."""
    renewed = Worker.renewed
    monkeypatch.setattr(Worker, "renewed", lambda worker, generation, _, *rest: renewed(worker, generation, worker.now, *rest))
    assert "its lease ran out" in first_violation(advance, "isolation")


# ---- the authority: who may act for the run


AUTHORITY = {
    "half of the keepers are a majority": ("divided", UNREAD_ACTS, ("ends[len(ends) // 2]", "ends[(len(ends) - 1) // 2]")),
    "only the newest list of keepers counts": (
        "divided",
        UNREAD_ACTS,
        ("for _, keepers in self._lists if keepers", "for _, keepers in self._lists[-1:] if keepers"),
    ),
    "the lease is honoured for five more seconds": ("severed", FOLLOWED, ("return self._until - now", "return self._until + 5.0 - now")),
    "the lease does not matter": ("severed", FOLLOWED, ("end <= self._safe_end and self.holds(now)", "end <= self._safe_end")),
    "the bucket counts, and prolongs the lease, although somebody has claimed the run": (
        "severed",
        FOLLOWED,
        ("if latest > self.incarnation:", "if False:"),
    ),
    "nobody heeds that it was deposed": (
        "unshipped",
        FOLLOWED,
        ("if held == DEPOSED:", "if False:"),
        ("if latest > self.incarnation:", "if False:"),
    ),
    "a keeper accepts an older coordinator": (
        "interregnum",
        FOLLOWED,
        ("if incarnation < self.heeds:\n            return False", "if incarnation < self.heeds:\n            return True"),
    ),
    "a third of a list is enough for a follower": ("divided", FOLLOWED, ("and 2 * there >= len(keepers)", "and 3 * there >= len(keepers)")),
    "whatever could be read is all there is": ("severed", UNREAD_ACTS, ("return there > 0 and 2 * there >= len(keepers)", "return True")),
    "a keeper that was made anew proves something": ("divided", UNREAD_ACTS, ("attached.get(node, 0) > 0", "attached.get(node, -1) >= 0")),
    "a follower does not wait for the lease before it": ("divided", FOLLOWED, ("return 0.0 if read_all else", "return 0.0 if True else")),
    "a follower acts before the bucket knows of it": ("interregnum", "is given twice", ("self.begun = not follows", "self.begun = True")),
    "an earlier writer's copy is gone on with": ("relapsed", "which was given up", ("each.by >= by and each.first", "each.first")),
}
"""Each broken rule has a scenario, the text of the violation, and the edits."""
RARE = {
    "a third of a list is enough for a follower": range(698, 702),
    "a follower does not wait for the lease before it": range(698, 702),
}
"""Seeds that meet the broken rule if those of the control do not: about one in 400 does."""


@pytest.mark.parametrize("name", list(AUTHORITY))
def test_an_authority_that_is_broken_is_noticed(name: str) -> None:
    scenario, noticed, *edits = AUTHORITY[name]
    with broken(authority, *edits):
        violation = first_violation(advance, scenario, seeds=RARE.get(name, ()))
    assert noticed in violation
    if name in RARE:
        assert first_violation(advance, scenario, seeds=RARE[name]) == ""


def test_a_copy_of_the_authority_is_really_used() -> None:
    with broken(authority):
        assert Simulation(0, None, advance).coordinators.present.journal.authority.__class__ is not Authority
    assert Simulation(0, None, advance).coordinators.present.journal.authority.__class__ is Authority
    with pytest.raises(LookupError, match=r"is 0 times in elastic\.protocol\.authority"), broken(authority, ("text that is not there", "")):
        pass


# ---- the keepers' uploads

UNDER_WAY = "if any(age(save.version) <= age(version) and"
KNOWN = "return version.step <= self.version.step"
UPLOADS = {
    "a part that was refused once never counts again": ("last_minute", "which is being written", ("REFUSALS = 5", "REFUSALS = 0")),
    "a save is over although it is under way": ("drawn", "was overwritten before it was in the bucket", (UNDER_WAY, "if any(False and")),
    "a save is over although its commit is not known": ("isolation", "was overwritten before it was in the bucket", (KNOWN, "return True")),
}
"""Each broken rule has a scenario, the text of the violation, and the edit."""


@pytest.mark.parametrize("name", list(UPLOADS))
def test_a_rule_of_uploads_that_is_broken_is_noticed(name: str) -> None:
    scenario, noticed, edit = UPLOADS[name]
    with broken(uploads, edit):
        assert noticed in first_violation(advance, scenario)


def test_giving_up_a_save_before_that_is_durable_is_noticed() -> None:
    """A coordinator that is cut off gives it up, its copies are overwritten, and the next coordinator waits for them."""
    said = '    decision.say(f"the checkpoint of {version} failed'
    edit, seeds = Edit("saves", f"        decision.durable = True\n{said}", said), range(115, 119)
    assert "was overwritten before it was in the bucket" in killed_by("rash", edit, scenario="interregnum", seeds=seeds)
    assert first_violation(advance, "interregnum", seeds=seeds) == ""


PATIENCE = {
    "a part that is being written does not count": (
        "widowed",
        "does not wait for its last save",
        Edit("saves", "return max(deadline, run.watch.uploaded_at + rules.stop_s, *until)", "return max(deadline, deadline, *until)"),
    ),
    "a bucket that is down at the end is not waited for": (
        "outage",
        "does not wait for the bucket",
        Edit("saves", "until = refused_until(rules, run.saves.pending) + manifests_until", "until = manifests_until"),
    ),
    "parts that nobody can report any more are waited for": (
        "widowed",
        "has been on its way for",
        Edit("takeover", "    saves.without_keepers(decision, [node for node in writers if node not in nodes])\n", ""),
    ),
    "a manifest that nobody can write any more is waited for": (
        "widowed",
        "has been on its way for",
        Edit("saves", "if each.complete or (each.asked and", "if each.complete or (False and"),
    ),
    "a manifest that can never be written is asked for again": (
        "widowed",
        "has been on its way for",
        Edit("saves", "if event.again or (event.again is None and of_manifest):", "if event.again is not False or of_manifest:"),
    ),
}
"""Each broken rule about saves has a scenario, the text of the violation, and the edit."""


@pytest.mark.parametrize("name", list(PATIENCE))
def test_a_broken_rule_about_saves_is_noticed(name: str) -> None:
    scenario, noticed, edit = PATIENCE[name]
    assert noticed in killed_by(name.replace(" ", "_"), edit, scenario=scenario)


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("crowded", Edit("seating", "at_least(max(least_shard(members, there), copied))", "at_least(least_shard(members, there))")),
        ("rounded", Edit("seating", "ceil(number / room[node])", "int(number / room[node])")),
    ],
)
def test_a_node_with_more_copies_than_it_has_room_for_is_noticed(name: str, edit: Edit) -> None:
    assert "gets more of the state than it has room for" in killed_by(name, edit)


EAGER = Edit("growth", "pays = brings_s >= costs_s", "pays = True")


def worlds(decide: Advance, stay_s: float) -> tuple[int, float]:
    """Returns the number of worlds and the virtual seconds that the runs took."""
    reports = [simulate(seed, flapping(seed, stay_s), decide) for seed in range(2)]
    assert {report.end for report in reports} == {"Finished"}
    return sum(report.generations for report in reports), sum(report.virtual_s for report in reports)


def test_taking_in_a_machine_that_comes_and_goes_each_time_is_noticed() -> None:
    """R4: each stay costs two worlds and does not pay, so the runs take longer.  The control: stays that do pay are not declined."""
    eager = Mutant("eager", (EAGER,)).advance()
    (many, slow_s), (few, quick_s) = worlds(eager, 6.0), worlds(advance, 6.0)
    assert many > 2 * few and slow_s > 1.1 * quick_s
    assert worlds(eager, 30.0) == worlds(advance, 30.0)


# ---- the control of all the others: it is the edit that kills, not the copying


def violation_of_unbroken_copies(monkeypatch: pytest.MonkeyPatch, scenario: str, seeds: Sequence[int]) -> str:
    """Runs copies without an edit of the machine, of the member, of the authority and of the uploads, all at once."""
    monkeypatch.setattr(MEMBER, mutant_member())
    with broken(authority), broken(uploads):
        return first_violation(Mutant("none", ()).advance(), scenario, seeds=seeds)


@pytest.mark.parametrize("scenario", ALL)
def test_unbroken_copies_pass_the_same_seeds(monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """The tests above have run by now, so the seeds of each scenario are those that a mutant was given."""
    assert violation_of_unbroken_copies(monkeypatch, scenario, sorted(TAKEN.get(scenario, range(UNTAKEN)))) == ""


@pytest.mark.full
@pytest.mark.parametrize("scenario", ALL)
def test_unbroken_copies_pass_all_seeds(monkeypatch: pytest.MonkeyPatch, scenario: str) -> None:
    """No mutant may take a seed at which the unbroken rules fail."""
    assert violation_of_unbroken_copies(monkeypatch, scenario, seeds_of(scenario)) == ""
