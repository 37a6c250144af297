"""Spot traces at measured costs: by hand, both ways to decide, and beside the simulator; the goodput of each
trace at the costs of 8 B parameters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from actors.cli import main
from elastic.plan.layout import LayoutRule
from elastic.protocol.events import StepDone
from elastic.sim import simulate
from elastic.sim.costs import Costs
from elastic.sim.page import json_page, page
from elastic.sim.policy import POLICIES, Policy
from elastic.sim.replay import Protocol, Replay, Replayed, removals
from elastic.sim.trace import DAY_S, Row, drawn, repeated, rows_of, scenario_of

TRACES = Path(__file__).parent / "traces"
COSTS = Path(__file__).parent / "costs" / "8b.json"
BY_HAND = Costs(
    microbatches=4,
    round_s=1.0,
    reform_s=3.0,
    heal_s=5.0,
    join_s=7.0,
    bucket_s=20.0,
    detect_s=0.5,
    decide_s=0.25,
    start_s=10.0,
)
TWO = (Row(0.0, True, "a"), Row(0.0, True, "b"), Row(100.25, False, "b"))
SHARDED = LayoutRule(dp_replicate=1)
WAYS: tuple[type[Protocol], ...] = (Protocol, Policy)


def costs_8b(**changes: object) -> Costs:
    return replace(Costs.from_json(COSTS.read_text(encoding="utf-8")), **changes)  # type: ignore[arg-type]


def rows(name: str, seconds: float) -> tuple[Row, ...]:
    return repeated(rows_of((TRACES / f"{name}.csv").read_text(encoding="utf-8")), seconds)


# ---- by hand


@pytest.mark.parametrize("way", WAYS)
def test_two_machines_and_one_loss_by_hand(way: type[Protocol]) -> None:
    """Both workers join at 10 and step from 13, 2 s a step.  The loss at 100.25 finds 43 steps done and five
    eighths of another.  It is known at 100.75 and answered at 101, and one worker steps from 104, 4 s a step.
    """
    found = way(TWO, BY_HAND, 0.0, 202.0).replayed()
    assert (found.start_s, found.steps, found.lost_steps, found.idle) == (15.0, 43 + 24 - 1, 0, 0.0)
    assert found.ideal == pytest.approx((100.25 - 15) / 2 + (202 - 100.25) / 4)
    (loss,) = found.incidents
    assert (loss.kind, loss.tier, loss.at, loss.pause_s) == ("loss", "live", 100.25, 3.75)
    assert (loss.broken, loss.cost) == pytest.approx((0.625, 0.625 + 3.75 / 4))
    # what is left is the half step under way at the end
    assert found.ideal - found.steps == pytest.approx(loss.cost + 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_each_machine_takes_its_own_time_to_start(way: type[Protocol]) -> None:
    """One worker joins at 10 and waits 2 s for the other; it steps from 15, 4 s a step.  The other one joins at
    30; its world steps from the next boundary, at 31, and 7 s more.  The third machine starts as the first did.
    """
    costs = replace(BY_HAND, starts_s=(10.0, 30.0))
    found = way((*TWO[:2], Row(190.0, True, "c")), costs, 0.0, 202.0).replayed()
    assert (found.start_s, found.boot_s) == pytest.approx((19.0, 50.0), abs=1e-5)
    (growth,) = found.incidents[:1]
    assert growth.kind == "growth"
    assert (growth.at, growth.pause_s) == pytest.approx((31.0, 7.0), abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_else_has_a_part_it_comes_from_the_buddy(way: type[Protocol]) -> None:
    found = way(TWO, replace(BY_HAND, layout=SHARDED), 0.0, 202.0).replayed()
    (loss,) = found.incidents
    assert (loss.tier, loss.pause_s, loss.lost_steps) == ("host", 0.75 + 3.0 + 5.0, 0)
    # the copy of step 43, of 99, is complete a second later than the loss
    late = way(TWO, replace(BY_HAND, layout=SHARDED, copy_s=2.0), 0.0, 202.0).replayed()
    assert late.lost_steps == 1


@pytest.mark.parametrize("way", WAYS)
def test_with_a_notice_no_step_is_broken(way: type[Protocol]) -> None:
    found = way(TWO, BY_HAND, 60.0, 202.0).replayed()
    (leave,) = found.incidents
    assert (leave.kind, leave.pause_s, leave.broken, leave.lost_steps) == ("leave", 3.0, 0.0, 0)
    assert found.idle > 0  # the machine that leaves is present until it is taken


@pytest.mark.parametrize("way", WAYS)
def test_where_all_are_lost_the_bucket_has_the_state(way: type[Protocol]) -> None:
    """The save of step 20, committed at 53, is in the bucket a minute later."""
    lost = (*TWO[:2], Row(120.0, False, "a"), Row(120.0, False, "b"), Row(130.0, True, "c"))
    found = way(lost, replace(BY_HAND, save_every=20), 0.0, 202.0).replayed()
    (loss,) = found.incidents
    assert (loss.tier, loss.lost_steps, loss.pause_s) == ("bucket", 53 - 20, 10.0 + 10.0 + 20.0)


# ---- both ways, and the simulator


@pytest.mark.parametrize("layout", [LayoutRule(), SHARDED], ids=["replicas", "shards"])
@pytest.mark.parametrize(
    ("name", "seconds", "lead_s"),
    [("aws_g4dn_2020", 15_000.0, 0.0), ("aws_g4dn_2020", 15_000.0, 30.0), ("parcae_hl_15_25", 4000.0, 120.0)],
)
def test_both_ways_to_decide_give_the_same_goodput(
    name: str, seconds: float, lead_s: float, layout: LayoutRule
) -> None:
    costs = costs_8b(layout=layout)
    one, other = (way(rows(name, seconds), costs, lead_s, seconds).replayed() for way in WAYS)
    assert one.goodput == pytest.approx(other.goodput, abs=0.001)
    assert len(one.incidents) == len(other.incidents) > 2
    # the step under way at the end belongs to no incident
    lost = one.ideal - one.steps
    assert all(abs(found.accounted - 1) <= max(0.01, 1 / lost) for found in (one, other))


def test_a_large_world_is_replayed_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only copies are found in another way in a large world, and replicas need none."""
    machines, costs = drawn(24, 0.2, 5.0, back_s=300.0), costs_8b(layout=LayoutRule())
    small = Protocol(machines, costs, 0.0, 0.2 * DAY_S).replayed()
    monkeypatch.setattr("elastic.sim.policy.PROTOCOL", 0)
    large = Policy(machines, costs, 0.0, 0.2 * DAY_S).replayed()
    assert large.goodput == pytest.approx(small.goodput, abs=0.001)
    assert len(large.incidents) == len(small.incidents) > 10


def test_as_many_steps_as_in_the_simulator_that_sends_every_beat() -> None:
    """The costs are the simulator's own, as its commits show them.  The bound is 10 %."""
    text = "seconds,event,node\n0,add,a\n0,add,b\n0,add,c\n30,remove,b\n45,add,d\n70,remove,a\n"
    scenario = scenario_of(text)
    scenario = replace(scenario, rules=replace(scenario.rules, target_step=120, copy_every=1, buddy_every=1))
    counts = list[int]()
    for seed in range(3):
        commits: dict[int, float] = {}
        for at, event, _ in simulate(seed, scenario).lines:
            if isinstance(event, StepDone):
                commits.setdefault(event.outcome.step, at)
        counts.append(sum(at <= 90.0 for at in commits.values()) - 1)
    costs = replace(BY_HAND, microbatches=1, round_s=0.95, reform_s=1.3, heal_s=0.0, join_s=1.6, start_s=2.0)
    found = Protocol(rows_of(text), replace(costs, detect_s=3.0), 0.0, 90.0).replayed()
    assert found.steps == pytest.approx(mean(counts), rel=0.1)


# ---- goodput

GOODPUT = [
    ("aws_g4dn_2020", 0.0, 0.9897, 0.9905),
    ("aws_g4dn_2020", 30.0, 0.9919, 0.9944),
    ("parcae_hl_15_25", 0.0, 0.9869, 0.9883),
    ("parcae_hl_15_25", 30.0, 0.9902, 0.9927),
    ("parcae_hh_55_65", 0.0, 0.9778, 0.9808),
    ("parcae_hh_55_65", 30.0, 0.9832, 0.9876),
    ("parcae_ll_10_11", 0.0, 0.9571, 0.9589),
    ("parcae_ll_10_11", 30.0, 0.9687, 0.9741),
]
"""The goodput of each trace, repeated to a day, with the notice in seconds, and the bound on it by :func:`bound`.
The aim is 97 % without notices and 99 % with them.  Three cells miss it, and so do their bounds: these machines come
and go too often for pauses of this length.
"""
BEHIND = 0.006
"""The part by which the goodput may be below a bound that misses the aim."""


def day_of(
    name: str, lead_s: float, factor: float = 1.0, policy: str = "own", way: type[Replay] = Policy
) -> Replayed:
    costs = costs_8b(layout=LayoutRule()).times(factor)
    more = {"policy": policy} if way is Policy else {}
    return way(rows(name, DAY_S), costs, lead_s, DAY_S, **more).replayed()


def aim(lead_s: float) -> float:
    return 0.99 if lead_s else 0.97


def bound(machines: Sequence[Row], costs: Costs, lead_s: float, seconds: float) -> float:
    """Returns the goodput of the best policy that knows when machines come and go, but not which, if members are
    replicas.

    A world begins with a pause at an event, and has all machines, or all that were there when the world before it
    began, too.  With the latter its pause is one without newcomers; that lets some newcomers in for less, so no
    such policy does better.  It ends when the first of its machines goes, or earlier.  With a notice all worlds
    have connected ahead, and a machine works until it is taken.  Without one, a loss has to be detected and breaks
    half a step on average.
    """
    begun_s = machines[0].at
    lives = [
        (row.at - begun_s + costs.start_s, min(goes_at - begun_s, seconds))
        for row, goes_at in zip(machines, removals(machines), strict=True)
        if row.comes
    ]
    lives = [(comes_at, goes_at) for comes_at, goes_at in lives if comes_at < goes_at]
    times = sorted({at for life in lives for at in life} | {seconds})
    place, at = {each: i for i, each in enumerate(times)}, np.array(times)
    comes, goes = (np.array([place[each] for each in ends]) for ends in zip(*lives, strict=True))
    last = len(times) - 1
    # the number of machines that are there from one event to another, and how fast they step
    there = np.zeros((last + 1, last + 1), int)
    np.add.at(there, (comes, goes), 1)
    there = there.cumsum(0)[:, ::-1].cumsum(1)[:, ::-1]
    fast = np.array([0.0, *(1 / costs.step_s(number) for number in range(1, there.max() + 1))])[there]
    lost, ahead_s = np.isin(np.arange(last + 1), goes), costs.ahead_s
    known_s = 0.0 if lead_s else costs.detect_s + costs.decide_s + ahead_s
    # of the machines that are there since one event, some go at another one
    gone = there[:, :-1] > there[:, 1:]

    def ends(since: int | slice, first: int, steps: np.ndarray) -> np.ndarray:
        """Returns the ``steps`` until each event from ``first`` on; none is possible after a machine has gone."""
        before = gone[since, first:].cumsum(-1)
        return np.where(np.insert(before, 0, 0, axis=-1) > 0, -np.inf, steps)

    # the steps until an event, if the newest world began at another one
    best = np.full((last + 1, last + 1), -np.inf)
    best[0, 1:] = ends(0, 1, fast[0, 1:] * (at[1:] - at[0]))
    for i in range(1, last):
        left_s = at[i + 1 :] - at[i]
        join_s = costs.join_s - ahead_s + (known_s if lost[i] else 0.0)
        leave_s = costs.reform_s - ahead_s + known_s
        grown = ends(i, i + 1, fast[i, i + 1 :] * np.maximum(left_s - join_s, 0))
        shrunk = ends(slice(i), i + 1, fast[:i, i + 1 :] * np.maximum(left_s - leave_s, 0))
        broken = 0.0 if lead_s else 0.5 * gone[:i, i]
        best[i, i + 1 :] = ((best[:i, i] - broken)[:, None] + np.maximum(grown, shrunk)).max(0)
    ideal = sum(fast[i, i + 1] * (at[i + 1] - at[i]) for i in range(last))
    return float(best[:last, last].max() / ideal)


@pytest.mark.parametrize(
    ("name", "lead_s", "goodput", "best"),
    [
        pytest.param(*row, marks=[pytest.mark.full] if n not in (0, 1, 2, 4) else [])
        for n, row in enumerate(GOODPUT)
    ],
)
def test_the_goodput_of_each_trace(name: str, lead_s: float, goodput: float, best: float) -> None:
    """R18: each trace meets the aim, or is at most 0.6 % below a bound that misses it."""
    found, most = day_of(name, lead_s), bound(rows(name, DAY_S), costs_8b(), lead_s, DAY_S)
    assert most == pytest.approx(best, abs=0.001)
    assert min(aim(lead_s), most - BEHIND) <= found.goodput <= most
    assert found.goodput == pytest.approx(goodput, abs=0.002)
    assert abs(found.accounted - 1) <= 0.01


def test_where_the_aim_is_missed_the_bound_misses_it_too() -> None:
    missed = [(best, aim(lead_s)) for _, lead_s, goodput, best in GOODPUT if goodput < aim(lead_s)]
    assert len(missed) == 3 and all(best < wanted for best, wanted in missed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.full] if n else [])
        for n, name in enumerate(("aws_g4dn_2020", "parcae_hl_15_25", "parcae_hh_55_65", "parcae_ll_10_11"))
    ],
)
def test_a_notice_is_never_worse_than_none(name: str) -> None:
    """No step breaks, and the next world has connected."""
    plain, noticed = (day_of(name, lead_s) for lead_s in (0.0, 30.0))
    assert noticed.goodput > plain.goodput
    assert noticed.lost_steps == 0 and sum(each.broken for each in noticed.incidents) == pytest.approx(
        0.0, abs=1e-6
    )


def test_pauses_that_take_four_times_as_long_miss_the_aim() -> None:
    assert day_of("aws_g4dn_2020", 0.0, factor=4.0).goodput < aim(0.0)


@pytest.mark.parametrize(
    ("name", "lead_s"),
    [
        pytest.param(name, lead_s, marks=[pytest.mark.full] if lead_s or n else [])
        for n, name in enumerate(("aws_g4dn_2020", "parcae_hl_15_25", "parcae_hh_55_65", "parcae_ll_10_11"))
        for lead_s in (0.0, 30.0)
    ],
)
def test_the_policy_is_at_most_2_percent_behind_the_best(name: str, lead_s: float) -> None:
    goodput = {policy: day_of(name, lead_s, policy=policy).goodput for policy in POLICIES}
    assert goodput["own"] >= max(goodput.values()) - 0.02, goodput
    assert len(set(goodput.values())) > 2, goodput


def test_a_world_waits_for_a_machine_that_is_about_to_start() -> None:
    """Machine c starts 10 s after it has come, so it joins 0.75 s after the loss of b is known; the control came
    8 s later, and a steps alone until it joins.  Machine x has shown how long a re-form takes.
    """
    pauses = []
    for comes_at in (91.75, 99.75):
        machines = (*TWO[:2], Row(30.0, True, "x"), Row(60.0, False, "x"))
        there = sorted((*machines, Row(comes_at, True, "c"), TWO[2]), key=lambda row: row.at)
        for way in WAYS:
            found = way(there, replace(BY_HAND, join_s=3.0), 0.0, 202.0).replayed()
            pauses.append([(each.kind, each.pause_s) for each in found.incidents if each.at > 100.0])
    first, again, late, last = pauses
    assert first == again and late == last
    assert [kind for kind, _ in first] == ["loss"], "one pause, in which the newcomer is taken in"
    assert [kind for kind, _ in late] == ["loss", "growth"]


@pytest.mark.full
def test_the_whole_protocol_on_three_days_of_24_machines() -> None:
    found = Protocol(rows("aws_g4dn_2020", 3 * DAY_S), costs_8b(), 0.0, 3 * DAY_S).replayed()
    assert abs(found.accounted - 1) <= 0.01 and found.seconds > 2.9 * DAY_S


# ---- the command


def test_the_page_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trace := tmp_path / "machines.csv").write_text(
        "seconds,event,node\n0,add,a\n0,add,b\n3000,remove,b\n3600,add,c\n7200,remove,a\n"
    )
    words = ["simulate", "--trace", str(trace), "--costs", str(COSTS), "--days", "0.2", "--microbatches", "8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "M = 8 microbatches" in said and "goodput of the present" in said and len(said.splitlines()) < 32
    assert main([*words, "--json", "--lead", "30"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole_protocol"] and told["lead_s"] == 30 and 0.9 < told["goodput"] < 1
    assert sum(each["cost"] for each in told["incidents"]) + told["idle_steps"] == pytest.approx(
        told["ideal_steps"] - told["steps"], abs=1
    )


def test_a_trace_that_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--costs", str(COSTS), "--days", "0.1", "--mtbf", "2", "--nodes", "6"]
    pages = []
    for seed in ("0", "0", "1"):
        assert main([*words, "--seed", seed]) == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1] != pages[2]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trace", "TRACE"], r"line 2: 0,vanish,a: 'vanish' is no event"),
        (["--days", "1"], r"without --trace a trace is drawn, and --mtbf is missing"),
        (["--days", "0", "--mtbf", "2", "--nodes", "6"], r"--days 0 must be a finite number, greater than 0"),
        (
            ["--days", "nan", "--mtbf", "2", "--nodes", "6"],
            r"--days nan must be a finite number, greater than 0",
        ),
        (
            ["--days", "inf", "--mtbf", "2", "--nodes", "6"],
            r"--days inf must be a finite number, greater than 0",
        ),
        (
            ["--days", "1", "--mtbf", "2", "--nodes", "6", "--back", "-1"],
            r"--back -1 must be a finite number, at least 0",
        ),
        (["--trace", "TRACE", "--lead", "-1"], r"--lead -1 must be a finite number, at least 0"),
    ],
)
def test_wrong_input_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace := tmp_path / "machines.csv").write_text("seconds,event,node\n0,vanish,a\n")
    words = [str(trace) if word == "TRACE" else word for word in words]
    assert main(["simulate", "--costs", str(COSTS), *words]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round_s": None}, "round_s: this cost is missing"),
        ({"rounds": 3}, "rounds: there is no such cost"),
        ({"heal_s": "long"}, "heal_s = 'long' must be a number of seconds of at least 0"),
        ({"microbatches": 2.5}, "microbatches = 2.5 must be a whole number of at least 1"),
        ({"layout": {"rows": 2}}, r"layout = {'rows': 2} must be an object"),
        ({"round_s": 0}, "round_s = 0 must be greater than 0"),
    ],
)
def test_wrong_costs_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Costs.of({**json.loads(COSTS.read_text(encoding="utf-8")), **changes})
    assert Costs.from_json(costs_8b().to_json()) == costs_8b()


def test_a_run_that_never_steps_has_a_page_too() -> None:
    found = Protocol(TWO[:1], replace(BY_HAND, layout=LayoutRule(min_shard=2)), 0.0, 100.0).replayed()
    assert (found.goodput, found.steps) == (0.0, 0)
    assert "0 of 0 steps" in page(found, 0.0) and json.loads(json_page(found, 0.0))["goodput"] == 0


@pytest.mark.full
def test_thirty_days_of_10000_machines() -> None:
    """The time that this takes is a figure and no promise: minutes."""
    machines = drawn(10_000, 30.0, 5000.0, back_s=600.0)
    costs = costs_8b(layout=LayoutRule(), microbatches=160_000)
    found = Policy(machines, costs, 0.0, 30 * DAY_S).replayed()
    assert abs(found.accounted - 1) <= 0.01 and len(found.incidents) > 1000
