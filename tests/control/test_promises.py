"""Some promises hold after any event: random senders say random things, sensible or not, and each promise is
checked after each event.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from elastic.control.edges import ALLOWED
from elastic.control.machine import Transition, advance
from elastic.control.run import RunState, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.journal.codec import decode_event, decode_run
from elastic.plan.layout import LayoutRule
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol import lineage
from elastic.protocol.actions import CommitManifest, Form, Go, Settle, StartWorkers
from tests.control.play import CLASSES, but, outcome, rules
from tests.support.cells import cell

pytestmark = pytest.mark.fast

RULES = rules(
    min_workers=1,
    max_workers=3,
    layout=LayoutRule(None, None, 1, "all"),
    target_step=4,
    save_every=2,
    max_fruitless=20,
    wait_s=900.0,
)
Word = tuple[RunState, ev.Event, float, Transition]


def any_fact(rng: Random, run: RunState) -> ev.Fact:
    """Returns a fact: mostly one that could be told now, sometimes nonsense, often from a sender that should
    be silent.
    """
    plan = run.plan
    names = [*run.workers, *run.members.starting, WorkerId("w99")]
    worker = rng.choice(names)
    member = rng.choice(plan.members) if plan and rng.random() < 0.9 else worker
    generation = run.generation - (rng.random() < 0.1)
    step = run.step + rng.choice((1, 1, 1, 0, 2))
    version = Version(step - 1, rng.choice((generation, max(run.version.generation, 0))))
    shards = plan.layout.dp_shard if plan else 1
    held = (
        ()
        if rng.random() < 0.1
        else (Holding(member, rng.choice((run.version, version)), cell(shards, rng.randrange(shards))),)
    )
    seen = (outcome(step, generation),) if rng.random() < 0.3 else ()
    node = NodeId(f"n{rng.randint(1, 3)}")
    cause = rng.choice(("peer", "job", "device", "setup", "damaged", "lease"))
    progress = (ev.Progress(member, generation, step, rng.randint(0, 2), rng.randint(0, 2)),)
    return rng.choice(
        (
            ev.Joined(rng.choice([*run.members.starting, worker]), node, "cpu", CLASSES),
            ev.Joined(rng.choice([*run.members.starting, worker]), node, "cpu", CLASSES),
            ev.Here(member, generation),
            ev.Ready(member, generation),
            ev.Ready(member, generation),
            ev.StepDone(member, generation, outcome(step, generation, rng.choice((0, 0, 1, 2)))),
            ev.StepDone(member, generation, replace(outcome(step, generation), saves=step % 2 == 0)),
            ev.Fenced(member, generation, held, rng.choice((None, step)), seen),
            ev.Fenced(member, generation, held, rng.choice((None, step)), seen),
            ev.Lost(worker, "died") if rng.random() < 0.3 else ev.Tick(),
            ev.StartFailed(worker, "no room"),
            ev.Starting(worker, "compiles"),
            ev.KeeperUp(node),
            ev.KeeperLost(node, "died") if rng.random() < 0.2 else ev.KeeperUp(node),
            ev.Capacity(rng.randint(0, 3)),
            ev.Renewed(member, generation),
            ev.Beat(node, progress),
            ev.Broken(member, generation, step, cause, "why", f"Error{rng.randint(0, 9)}", version)
            if rng.random() < 0.3
            else ev.Tick(),
            ev.ShardSaved(member, run.version if rng.random() < 0.7 else version),
            ev.ShardSaved(
                member,
                rng.choice([each.version for each in run.saves.pending]) if run.saves.pending else version,
            ),
            ev.Saved(
                rng.choice([each.version for each in run.saves.pending]) if run.saves.pending else version,
                "digest",
            ),
            ev.SaveFailed(version, "store unavailable", again=True, manifest=True),
            *(
                [
                    ev.ConnectedAhead(
                        rng.choice(ahead.members), ahead.generation, ahead.ahead, ahead.incarnation
                    )
                ]
                * 4
                if (ahead := getattr(run.state, "ahead", None)) is not None
                else ()
            ),
            ev.StopRequested("Ctrl-C") if rng.random() < 0.02 else ev.Tick(),
            ev.Tick(),
        )
    )


def any_event(rng: Random, run: RunState) -> ev.Event:
    """Returns a random event; one in ten is several messages of workers that are decided together."""
    if rng.random() < 0.9:
        return any_fact(rng, run)
    several = [any_fact(rng, run) for _ in range(40)]
    return ev.Together(tuple(each for each in several if isinstance(each, ev.Said)))


def told(seed: int, words: int = 150) -> list[Word]:
    """Returns the story of a run that is told ``words`` random events."""
    rng, run, now, story = Random(seed), RunState.begin(1, 0.0), 0.0, []
    for _ in range(words):
        now += rng.choice((0.0, 0.1, 0.1, 1.0, 6.0))
        event = any_event(rng, run)
        transition = advance(run, event, now, RULES)
        story.append((run, event, now, transition))
        run = transition.run
    return story


@pytest.fixture(scope="module")
def stories() -> list[list[Word]]:
    return [told(seed) for seed in range(40)]


def test_the_stories_are_worth_something(stories: list[list[Word]]) -> None:
    """They form many worlds, settle them in different ways, and take most edges of the table."""
    actions = [action for story in stories for *_, transition in story for action in transition.actions]
    assert sum(isinstance(action, Form) for action in actions) > 100
    assert sum(isinstance(action, Go) for action in actions) > 20
    assert len({action.outcome is None for action in actions if isinstance(action, Settle)}) == 2
    edges = {(type(run.state), type(after.run.state)) for story in stories for run, _, _, after in story}
    assert len({edge for edge in edges if edge[1] in ALLOWED[edge[0]]}) >= 10


def test_the_same_facts_give_the_same_decision_and_change_nothing_else(stories: list[list[Word]]) -> None:
    for story in stories[:10]:
        for run, event, now, transition in story[::5]:
            as_it_was = decode_run(codec.encode(run))
            assert advance(run, event, now, RULES) == transition
            assert run == as_it_was, "advance changed what it was given"


def test_refused_means_unchanged(stories: list[list[Word]]) -> None:
    refused = 0
    for story in stories:
        for run, event, _, transition in story:
            if transition.reason.startswith("refused: "):
                refused += 1
                assert transition.run == run, (event, transition.reason)
    assert refused > 300


def test_whoever_should_be_silent_is_refused(stories: list[list[Word]]) -> None:
    generations = ev.Here | ev.Ready | ev.StepDone | ev.Renewed | ev.Broken | ev.Fenced
    for story in stories:
        for run, event, _, transition in story:
            for each in ev.parts(event):
                if isinstance(each, generations) and (
                    each.generation != run.generation or each.worker == "w99"
                ):
                    assert each not in transition.taken
                    assert isinstance(event, ev.Together) or transition.reason.startswith("refused: "), (
                        event,
                        transition.reason,
                    )


def test_generations_grow_by_one_and_ids_are_new(stories: list[list[Word]]) -> None:
    for story in stories:
        actions = [action for *_, transition in story for action in transition.actions]
        assert [each.plan.generation for each in actions if isinstance(each, Form)] == list(
            range(1, 1 + sum(isinstance(each, Form) for each in actions))
        )
        started = [worker for each in actions if isinstance(each, StartWorkers) for worker in each.workers]
        assert len(started) == len(set(started))
        assert all(len(run.workers) + len(run.members.starting) <= RULES.max_workers for run, *_ in story)


def test_nothing_is_settled_while_a_member_is_neither_fenced_nor_out(stories: list[list[Word]]) -> None:
    settled = 0
    for story in stories:
        answered: set[tuple[int, WorkerId]] = set()
        for run, event, _, transition in story:
            answered |= {
                (each.generation, each.worker) for each in transition.taken if isinstance(each, ev.Fenced)
            }
            for action in transition.actions:
                if isinstance(action, Settle):
                    settled += 1
                    assert run.plan is not None
                    standing = [each for each in run.plan.members if each in transition.run.workers]
                    assert all((action.generation, each) in answered for each in standing), (run.state, event)
    assert settled > 30


def test_an_outcome_is_applied_only_if_somebody_saw_it(stories: list[list[Word]]) -> None:
    for story in stories:
        seen = set()
        for _, event, _, transition in story:
            for each in ev.parts(event):
                seen |= {each.outcome} if isinstance(each, ev.StepDone) else set()
                seen |= set(each.outcomes) if isinstance(each, ev.Fenced) else set()
            outcomes = {
                action.outcome
                for action in transition.actions
                if isinstance(action, Settle) and action.outcome
            }
            assert outcomes <= seen


def test_the_line_only_grows_unless_a_world_begins_further_back_and_says_so(
    stories: list[list[Word]],
) -> None:
    for story in stories:
        for run, _, _, transition in story:
            before, after = run.history.lineage, transition.run.history.lineage
            assert all(a < b for a, b in pairwise(after))
            if lineage.tip(before) != lineage.tip(after) and not lineage.contains(after, lineage.tip(before)):
                assert "abandons step" in transition.reason
            assert all(lineage.contains(after, version) for version in transition.run.history.saved)


def test_only_what_is_on_the_line_gets_a_manifest(stories: list[list[Word]]) -> None:
    for story in stories:
        for *_, transition in story:
            for action in transition.actions:
                if isinstance(action, CommitManifest):
                    assert (
                        lineage.contains(action.lineage, action.version)
                        and lineage.tip(action.lineage) == action.version
                    )


def test_states_follow_the_table_also_within_one_event(stories: list[list[Word]]) -> None:
    """``edges.enter`` asserts each edge; from outside, one event takes at most three in a row."""

    def reachable(start: type, hops: int) -> set[type]:
        return {start} if not hops else {start}.union(*(reachable(each, hops - 1) for each in ALLOWED[start]))

    for story in stories:
        for run, _, _, transition in story:
            assert type(transition.run.state) in reachable(type(run.state), 3)


def test_what_must_be_durable_begins_starts_or_settles_a_generation_names_workers_ends_a_save_or_ends(
    stories: list[list[Word]],
) -> None:
    for story in stories:
        for run, _, _, transition in story:
            begins = transition.run.generation > run.generation or any(
                isinstance(action, Go) for action in transition.actions
            )
            left = (
                isinstance(run.state, Stopping)
                and transition.run.plan is None
                and any(answer.worker in transition.run.workers for answer in run.state.answers)
            )
            names = any(isinstance(action, StartWorkers) for action in transition.actions)
            counts = (
                names
                or bool(set(transition.run.history.saved) - set(run.history.saved))
                or (transition.run.over and not run.over)
            )
            pending = {save.version for save in transition.run.saves.pending if save.nodes}
            gives_up = "is not saved" in transition.reason or any(
                s.nodes and s.version not in pending for s in run.saves.pending
            )
            assert transition.durable or not (begins or left or counts or gives_up)
            assert (
                not transition.durable
                or begins
                or counts
                or gives_up
                or isinstance(run.state, Stopping)
                or transition.run.plan is None
            )


def unheard(run: RunState) -> RunState:
    """Returns the run without what was heard of each member and keeper."""
    return but(run, "watch", counters={}, beats={})


def test_any_story_survives_the_journal(stories: list[list[Word]]) -> None:
    """Deciding again from the recorded events alone gives the same records, and folding these gives the same
    run.

    The record of a commit that only continues the world forgets who was heard when; nothing else is
    forgotten.
    """
    for story in stories[:6]:
        start, recorded, records = codec.snapshot(story[0][0]), story[0][0], []
        for number, (run, event, now, transition) in enumerate(story):
            records.append(
                json.loads(json.dumps(codec.record(number, now, event, run, transition, recorded)))
            )
            recorded = codec.known_after(event, run, transition.run)
        assert codec.fold(start, records) == recorded and unheard(recorded) == unheard(story[-1][3].run)
        run = decode_run(start["run"])
        for record in records:
            told = codec.written_out(record, start["run"])
            again = advance(run, decode_event(told["event"]), told["at"], RULES)
            assert (again.reason, codec.encode(again.actions)) == (told["reason"], told["actions"])
            run, start = again.run, codec.after(start, record)
            assert unheard(run) == unheard(decode_run(start["run"]))
