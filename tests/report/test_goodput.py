"""R18: every second of a run is in one bucket, the costs of incidents add up, and what counts is goodput."""

from __future__ import annotations

import io
import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.machine import Transition, advance
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.journal import codec
from elastic.journal.deltas import Misfit
from elastic.protocol.events import Event, Recovered
from elastic.protocol.faults import Fault, Kind
from elastic.report.goodput import BUCKETS, STEPPING, Account, Figures, Interval, Totals
from elastic.report.page.parquet import parquet_of
from elastic.report.timeline import Timeline
from elastic.sim.scenario import Scenario
from elastic.sim.simulation import simulate
from elastic.sim.trace import scenario_of
from storage import journal
from storage.objects import ObjectStore
from tests.golden.make import unpack
from tests.sim.scenarios import CALM, noticed, straggling

pytestmark = pytest.mark.fast

TRACES = Path(__file__).parents[1] / "sim" / "traces"
RUNS = ("undisturbed", "killed", "shards", "coordinator", "stopped")


class Recorder:
    """Decides as the product does, and writes the journal of a simulated run.  A coordinator that goes on
    from an earlier record takes back those after it, as nobody has read them.
    """

    def __init__(self) -> None:
        self.lives: list[tuple[RunState, list[tuple[RunState, Event, float, Transition]]]] = []

    def __call__(self, run: RunState, event: Event, now: float, rules: Rules) -> Transition:
        done = advance(run, event, now, rules)
        decided = self.lives[-1][1] if self.lives else []
        newest = decided[-1][3].run.incarnation if decided else -1
        kept = next((at for at in reversed(range(len(decided))) if decided[at][3].run is run), None)
        if run.incarnation < newest and not isinstance(event, Recovered):
            return done  # a coordinator that does not know yet that another one has taken over
        if kept is not None:
            del decided[kept + 1 :]
        elif self.lives and run is self.lives[-1][0]:
            decided.clear()
        else:
            self.lives.append((run, decided := []))
        decided.append((run, event, now, done))
        return done

    @property
    def segments(self) -> list[codec.Segment]:
        found, number = [], 0
        for begun, decided in self.lives:
            records, recorded = [], begun
            for before, event, now, done in decided:
                if codec.worth_recording(event, before, done):
                    records.append(codec.record(number, now, event, before, done, recorded))
                    recorded, number = codec.known_after(event, before, done.run), number + 1
            found.append((codec.snapshot(begun), json.loads(json.dumps(records))))
        return found


def simulated(seed: int, scenario: Scenario | None = None) -> list[codec.Segment]:
    """Returns the journal of a simulated run."""
    recorder = Recorder()
    simulate(seed, scenario, recorder)
    return recorder.segments


def real(name: str, folder: Path) -> list[codec.Segment]:
    """Returns the journal of a golden run on a real cluster."""
    unpack(f"journals/{name}.tar.gz", folder)
    return list(journal.read(ObjectStore.open(str(folder)), name))


def account_of(segments: Sequence[codec.Segment]) -> Account:
    return Timeline().read(segments).account


def times(segments: Sequence[codec.Segment]) -> list[float]:
    """Returns the times of all records, none before its predecessor."""
    found = list[float]()
    for _, records in segments:
        for each in records:
            found.append(max([each["at"], *found[-1:]]))
    return found


def check(account: Account, segments: Sequence[codec.Segment]) -> None:
    """Fails unless the buckets and the costs of incidents add up to the time of the journal."""
    at, seconds = times(segments), account.whole.seconds
    assert sum(seconds.values()) == pytest.approx(at[-1] - at[0], abs=1e-9)
    assert all(each >= 0 for each in seconds.values()) and seconds.keys() <= BUCKETS.keys()
    assert sum(each.lost_s for each in account.lost) == pytest.approx(
        at[-1] - at[0] - seconds[STEPPING], abs=1e-9
    )
    assert (account.intervals[0].begin, account.intervals[-1].end) == (at[0], at[-1])
    assert all(one.end == next_.begin for one, next_ in pairwise(account.intervals))
    assert all(each.begin <= each.end for each in account.intervals)
    for found in (account.whole.figures, account.since_first.figures):
        assert 0 <= found.paid <= 1 + 1e-9 and found.present >= 0 and 0 <= found.stepping <= 1
        assert 0 <= found.stepping_nodes <= found.available_nodes + 1e-9 <= 1 + 2e-9


# ---- an independent computation: the table, and the nodes as the events of the journal tell of them


def nodes_of(segments: Sequence[codec.Segment]) -> list[tuple[float, int, int]]:
    """Returns the trace: (time, workers that have joined, nodes paid) after each record, from whole states."""
    trace, newest = list[tuple[float, int, int]](), -1
    for head, records in segments:
        known: Mapping[str, Any] = head
        if head["run"]["incarnation"] > newest and trace:
            trace.append((trace[-1][0], 0, 0))  # nothing is there between two lives
        for record in records:
            known = codec.after(known, record)
            run = codec.decode_run(known["run"])
            there = {*run.cluster.keepers, *(each.node for each in run.workers.values())}
            paid = sum(node in there or not up for node, up in run.cluster.nodes.items())
            trace.append((record["at"], *((0, 0) if run.over else (len(run.workers), paid))))
            newest = max(newest, run.incarnation)
    return trace


def recomputed(table: bytes, trace: Sequence[tuple[float, int, int]], *, after_first: bool) -> list[float]:
    """Returns the three figures of the whole run, or of the time after its first step, with nothing of ours:
    from the table that a report writes, and from a trace of workers and nodes.
    """
    rows = pq.read_table(io.BytesIO(table)).to_pylist()
    first = next(row["end"] for row in rows if row["steps"])
    rows = [row for row in rows if not after_first or row["begin"] >= first]
    steps = [row for row in rows if row["bucket"] == "stepping"]

    def possible(row: Mapping[str, Any], ranks: int, seconds: float) -> float:
        """Returns the number of steps that so many data ranks could have made in rounds of a second."""
        return seconds / ceil(row["microbatches"] / ranks) if ranks else 0.0

    made = sum(possible(row, row["data_ranks"], row["end"] - row["begin"]) for row in steps)
    present = paid = 0.0
    at = [each[0] for each in trace]
    for row in rows:
        inside = trace[bisect_right(at, row["begin"]) : bisect_left(at, row["end"])]
        there = trace[bisect_right(at, row["begin"]) - 1][1:]
        for begin, end, (workers, nodes) in zip(
            [row["begin"], *(each[0] for each in inside)],
            [*(each[0] for each in inside), row["end"]],
            [there, *(each[1:] for each in inside)],
            strict=True,
        ):
            present += possible(row, workers * row["data_ranks"] // row["members"], end - begin)
            paid += possible(row, nodes * row["data_ranks"] // row["world_nodes"], end - begin)
    all_s = rows[-1]["end"] - rows[0]["begin"]
    return [made / present, made / paid, sum(row["end"] - row["begin"] for row in steps) / all_s]


def three(found: Figures) -> list[float]:
    return [found.present, found.paid, found.stepping]


@given(seed=st.integers(0, 100_000))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_r18_every_second_of_any_simulated_run_is_in_one_bucket(seed: int) -> None:
    """R18: with kills, coordinators that die, stops and resumptions, whatever the seed draws."""
    segments = simulated(seed)
    check(account_of(segments), segments)


@pytest.mark.parametrize("trace", ["aws_g4dn_2020.csv", "parcae_ll_10_11.csv"])
def test_r18_the_figures_are_those_of_the_table_and_the_trace_of_nodes(trace: str) -> None:
    """R18: recomputed by :func:`recomputed`.  The control is a table whose first interval of steps is a
    second longer.
    """
    rows = (TRACES / trace).read_text().splitlines()[:30]
    segments = simulated(1, scenario_of("\n".join(rows), 60.0))
    account, nodes = account_of(segments), nodes_of(segments)
    check(account, segments)
    table = parquet_of(account.intervals)
    for after_first, totals in ((False, account.whole), (True, account.since_first)):
        assert recomputed(table, nodes, after_first=after_first) == pytest.approx(
            three(totals.figures), rel=1e-9
        )
    at = next(at for at, each in enumerate(account.intervals) if each.bucket == STEPPING and each.steps > 1)
    wrong = [*account.intervals]
    wrong[at] = wrong[at]._replace(end=wrong[at].end + 1)
    assert recomputed(parquet_of(wrong), nodes, after_first=False) != pytest.approx(
        three(account.whole.figures), rel=1e-5
    )


@pytest.mark.parametrize("name", RUNS)
def test_r18_the_time_of_a_real_run(name: str, tmp_path: Path) -> None:
    """R18: journals of runs on a real cluster, with workers and a coordinator that were killed, and a stop."""
    segments = real(name, tmp_path)
    account = account_of(segments)
    check(account, segments)
    table, nodes = parquet_of(account.intervals), nodes_of(segments)
    assert recomputed(table, nodes, after_first=True) == pytest.approx(
        three(account.since_first.figures), rel=1e-9
    )
    commits = {
        each["step"] for _, records in segments for record in records for each in record.get("commits", ())
    }
    assert sum(each.steps for each in account.intervals) == len(commits)
    kinds = [each.kind for each in account.incidents]
    assert (
        kinds
        == {
            "undisturbed": ["start", "last save"],
            "killed": ["start", "loss", "join", "loss", "join", "loss", "join", "last save"],
            "shards": ["start", "loss", "join", "loss", "join", "fault", "last save"],
            "coordinator": ["start", "last save"],
            "stopped": ["start", "stop", "start", "last save"],
        }[name]
    )


def test_r18_a_shifted_record_moves_the_figures_as_by_hand(tmp_path: Path) -> None:
    """R18: w2 of a real run is lost a tenth of a second later: a tenth more until the world is stopped, and a
    tenth less until the outcome is decided.
    """
    segments = real("killed", tmp_path)
    before = account_of(segments)
    lost = next(each for _, records in segments for each in records if each["event"]["$"] == "Lost")
    lost["at"] += 0.05
    after = account_of(segments)
    moved = {name: after.whole.seconds[name] - before.whole.seconds[name] for name in BUCKETS}
    assert {name: round(each, 5) for name, each in moved.items() if abs(each) > 1e-6} == {
        "redone": 0.05,
        "decide": -0.05,
    }
    assert after.whole.figures.stepping == before.whole.figures.stepping
    done = next(record for _, records in segments for record in records if record["state"] == "Finished")
    done["at"] += 1.0
    later = account_of(segments)
    all_s, figures = before.whole.figures.seconds, before.whole.figures
    assert later.whole.seconds["save-blocked"] == pytest.approx(
        before.whole.seconds["save-blocked"] + 1, abs=1e-6
    )
    assert later.whole.figures.stepping == pytest.approx(figures.stepping * all_s / (all_s + 1))


def test_r18_the_figures_by_hand() -> None:
    """R18: 8 microbatches on two nodes are 4 rounds; 3 nodes need 3 rounds, and one node needs 8.  The steps of
    the last interval take half as long again, and its seconds count as much.
    """
    two = Interval(0.0, 40.0, STEPPING, 1, 2, 2, 2, 2, 2, 2, 8, 10, 80)
    lost = two._replace(begin=40.0, end=60.0, bucket="decide", workers=1, nodes=1, steps=0, samples=0)
    spare = two._replace(begin=60.0, end=72.0, workers=3, nodes=3, paid=4, steps=2, samples=16)
    totals = Totals()
    for each in (two, lost, spare):
        totals.add(each)
    found = totals.figures
    assert (found.seconds, found.samples) == (72.0, 96)
    assert found.present == pytest.approx(52 / 4 / (40 / 4 + 20 / 8 + 12 / 3))
    assert found.paid == pytest.approx(52 / 4 / (40 / 4 + 20 / 4 + 12 / 2)), "4 nodes need 2 rounds"
    assert found.stepping == pytest.approx(52 / 72)
    assert found.stepping_nodes == pytest.approx((40 * 2 + 12 * 2) / (72 * 3))
    assert found.available_nodes == pytest.approx((40 * 2 + 20 + 12 * 3) / (72 * 3))


def test_r18_a_coordinator_accounts_for_its_time_while_the_run_goes_on(tmp_path: Path) -> None:
    """R18: from any record on it has every second until now, and at the end the figures of a closed account."""
    ((head, records), *more) = real("killed", tmp_path)
    records = [*records, *(record for _, each in more for record in each)]
    known: Mapping[str, Any] = head
    for at in range(0, len(records), 20):
        living, closed = Account(keep=False), Account()
        for account in (living, closed):
            account.begins(records[at]["at"], known["run"])
        for record in records[at:]:
            living.note(record)
            closed.note(record)
            spent = living.spent(record["at"] + 1)
            assert sum(spent.values()) == pytest.approx(record["at"] + 1 - records[at]["at"], abs=1e-6)
        assert living.so_far == pytest.approx(closed.close().whole.figures)
        assert not living.intervals
        for record in records[at : at + 20]:
            known = codec.after(known, record)


@pytest.mark.parametrize("amount", [0.0, -1.0])
def test_r18_a_noticed_leave_is_a_kind_of_its_own(amount: float) -> None:
    """R18: with its seconds, and the node-seconds that its price counts.  The machine comes back, and that is
    a join.
    """
    rules = replace(CALM.rules, target_step=60)
    segments = simulated(
        0, replace(CALM, rules=rules, faults=(Fault(6.0, Kind.NODE_NOTICE, 1, 12.0, amount),))
    )
    account = account_of(segments)
    check(account, segments)
    kinds = [each.kind for each in account.lost]
    (found,) = [each for each in account.lost if each.kind == "noticed leave"]
    assert found.lost_s > 0 and found.node_s >= found.lost_s and found.generation
    assert "before the machine is taken" in found.reason
    assert kinds == ["start", "noticed leave", "join", "last save"]


def test_r18_a_world_that_forms_without_a_doomed_node_is_a_noticed_leave_too() -> None:
    """R18: a fence that nothing but a notice has caused is no fault."""
    segments = simulated(2, noticed(2))
    account = account_of(segments)
    check(account, segments)
    left = [each for each in account.incidents if "machine is taken: stop generation" in each.reason]
    assert left and {each.kind for each in left} == {"noticed leave"}


def test_r15_an_eviction_is_a_kind_of_its_own() -> None:
    """R18: its seconds are those of a pause, and the slow steps before it are steps."""
    segments = simulated(0, straggling(0))
    account = account_of(segments)
    check(account, segments)
    (found,) = [each for each in account.lost if each.kind == "eviction"]
    assert found.lost_s > 0 and "because it is slow" in found.reason


def stepping() -> tuple[Account, Mapping[str, Any]]:
    """Returns the account of a run without faults, up to its first step, and the record of that step."""
    ((head, records), *_) = simulated(3, replace(Scenario.drawn(3), faults=()))
    account = Account()
    account.begins(records[0]["at"], head["run"])
    for record in records:
        account.note(record)
        if "commits" in record and record["event"]["$"] == "StepDone":
            break
    return account, record


@pytest.mark.parametrize("part", ["cluster", "stragglers"])
def test_the_record_of_a_step_may_tell_who_leaves(part: str) -> None:
    """The next record tells of changes to that only."""
    account, record = stepping()
    for cut, put in ((0, ["n1"]), (1, [])):
        leaving = {"at": 0, "cut": cut, "put": put}
        account.note({**record, "changed": {part: {"~": {"leaving": leaving}}}})
    with pytest.raises(Misfit):
        account.note({**record, "changed": {part: {"~": {"leaving": leaving}}}})


def test_r18_a_month_is_few_intervals() -> None:
    """R18: thousands of steps without an incident are two intervals."""
    account, record = stepping()
    step = record["commits"][0]
    for more in range(1, 20_000):
        commit = {**step, "step": step["step"] + more}
        account.note({**record, "at": record["at"] + more, "commits": [commit]})
    steps = [each.steps for each in account.close().intervals if each.bucket == STEPPING]
    assert steps == [1, 19_999] and len(account.intervals) < 10
