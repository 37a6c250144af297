"""``elastic simulate``: seeds, scripts and traces; a violation comes with the smallest schedule that shows
it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.cli import main
from elastic.control.rules import Rules
from elastic.protocol.faults import Fault, Kind, from_json, to_json
from elastic.sim import command, coverage
from elastic.sim.trace import drawn, from_trace, repeated, rows_of, scenario_of
from tests.benchmarks import schedules

TRACES = Path(__file__).parent / "traces"
COSTS = Path(__file__).parent / "costs" / "8b.json"


def test_it_needs_no_ray(tmp_path: Path) -> None:
    """Two processes find what one process finds."""
    program = "import sys; sys.modules['ray'] = None; from elastic.__main__ import main; sys.exit(main())"
    line = [sys.executable, "-c", program, "simulate", "--seeds", "600..606", "--jobs"]
    told = [
        subprocess.run([*line, jobs], capture_output=True, text=True, check=True).stdout
        for jobs in ("1", "2")
    ]
    assert re.sub(r"in \d+ s by \d", "", told[0]) == re.sub(r"in \d+ s by \d", "", told[1])
    assert "6 seeds, " in told[0] and "(judged from 20000 seeds on)" in told[0]


def test_a_pair_that_never_met_fails_the_command_where_there_were_seeds_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(command, "JUDGED_FROM", 6)
    assert command.simulate_seeds(range(5), 1, said.append) == 0
    assert command.simulate_seeds(range(6), 1, said.append) == 1
    assert "pairs never met: " in said[-1]


def test_what_is_recorded_goes_on_from_where_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(schedules, "RESULT", tmp_path / "schedules.json")
    assert schedules.load() == (coverage.Coverage(), 0.0)
    seen, _ = coverage.run_many(range(5))
    schedules.save(seen, 12.34, 2)
    assert schedules.load() == (seen, 12.3)


def test_a_violation_is_explained_by_as_few_faults_as_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator does not wait until leases have run out; of the faults only cuts and lost kills are
    left.
    """
    monkeypatch.setattr(Rules, "lease_over_s", property(lambda rules: 0.5 * rules.lease_s))
    said: list[str] = []
    assert command.simulate_seeds(range(82, 90), 1, said.append) == 1
    script = from_json(said[-1])
    found = re.search(r"(\d+) of (\d+) faults are enough: simulate --seeds (\d+)", said[-2])
    assert found and int(found[1]) == len(script) < int(found[2])
    assert "may still commit" in said[-3] and {fault.kind for fault in script} <= {
        Kind.PARTITION,
        Kind.KILL_LOST,
        Kind.PARTITION_FROM,
    }


def test_a_script_is_performed_on_the_cluster_of_each_seed(tmp_path: Path) -> None:
    script, said = tmp_path / "faults.json", list[str]()
    script.write_text(
        to_json(
            [Fault(5.0, Kind.NODE_KILL, duration_s=3.0), Fault(5.5, Kind.COORDINATOR_KILL, duration_s=2.0)]
        )
    )
    assert command.simulate_script(script, range(5, 8), said.append) == 0
    assert len(said) == 3 and all(" after " in line for line in said)


@pytest.mark.parametrize(
    ("name", "pace", "nodes", "removals"), [("parcae_ll_10_11", 10.0, 18, 4), ("aws_g4dn_2020", 60.0, 1, 74)]
)
def test_a_spot_trace_is_survived(name: str, pace: float, nodes: int, removals: int) -> None:
    """Whole groups of machines come and go as recorded in the trace."""
    text = (TRACES / f"{name}.csv").read_text(encoding="utf-8")
    there, faults = from_trace(text, pace)
    assert (there, sum(fault.kind is Kind.NODE_KILL for fault in faults)) == (nodes, removals)
    scenario = scenario_of(text, pace)
    said, kept = command.tried(0, scenario)
    assert kept and said.split()[2] == "Finished"
    assert scenario.rules.max_workers >= nodes


@pytest.mark.parametrize("text", ["x", "7..7", "9..3", "", "0", "-3"])
def test_seeds_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a number of at least 1, or FIRST\.\.LAST"):
        command.seeds_of(text)


def test_a_trace_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="begins with the line"):
        from_trace("0,add,n1")
    with pytest.raises(ValueError, match=r"5,remove,n2: no such node is there"):
        from_trace("seconds,event,node\n0,add,n1\n5,remove,n2")


def test_a_trace_without_rows_is_refused_by_a_sentence_that_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["simulate", "--costs", str(COSTS), "--trace", str(trace := tmp_path / "machines.csv")]
    for text, said in {
        "# a source\nseconds,event,node\n": "machines.csv: a trace has a row for each machine that comes or goes",
        "0,add,n1\n": "machines.csv: a trace begins with the line",
    }.items():
        trace.write_text(text)
        assert main(words) == 1
        assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--trace T", "--trace needs --costs FILE.json, the costs of a recorded run"),
        ("--lead 30", "--lead needs --costs FILE.json"),
        ("--json --seeds 3", "--json needs --costs FILE.json"),
        ("--costs C --seeds 3", "--seeds is of simulated faults, and --costs replays a trace"),
        ("--costs C --trace T --mtbf 3", "--mtbf is of a trace that is drawn, and --trace gives one"),
        ("--costs C --trace T --seed 0", "--seed is of a trace that is drawn, and --trace gives one"),
        ("--costs C --mtbf 3 --nodes 4", "without --trace a trace is drawn, and --days is missing"),
        ("--costs C", "without --trace a trace is drawn, and --days is missing"),
        ("--costs C --trace NONE", "NONE: No such file or directory"),
        ("--script SCRIPT --seeds 1", "SCRIPT: a schedule is a JSON list of faults"),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    line: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("T").write_text("seconds,event,node\n0,add,n1\n9,remove,n1\n")
    Path("C").write_bytes(COSTS.read_bytes())
    Path("SCRIPT").write_text("{}")
    assert main(["simulate", *line.split()]) == 1
    assert said in " ".join(capsys.readouterr().out.split())


def test_every_reason_in_the_list_of_impossible_pairs_is_of_a_pair_that_exists() -> None:
    states = {*coverage.STATES, "over"}
    assert all(state in states and event in coverage.EVENTS for state, event in coverage.IMPOSSIBLE)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0,add,n1\n5,remove,n2", r"line 3: 5,remove,n2: no such node is there; a row before must add it"),
        ("0,add,n1\n5,remve,n1", r"line 3: 5,remve,n1: 'remve' is no event; it must be add or remove"),
        ("0,add,n1\nsoon,remove,n1", r"line 3: soon,remove,n1: 'soon' is no number of seconds"),
        (
            "0,add,n1\n\n# later\n5,remove",
            r"line 5: 5,remove: a row is a time in seconds, an event and a node",
        ),
        ("7,add,n1\n5,add,n2", r"line 3: 5,add,n2: the row before is later, at 7"),
        ("0,add,n1\n5,add,n1", r"line 3: 5,add,n1: this node is there already"),
        ("0,add,n1\nnan,remove,n1", r"line 3: nan,remove,n1: a row is"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named_by_its_number(lines: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rows_of(f"seconds,event,node\n{lines}\n")


def test_a_repeated_trace_has_the_same_changes_again() -> None:
    """Two of three machines go in each repetition and one comes.  One more comes before it, since only two are
    there at its beginning.
    """
    text = "seconds,event,node\n0,add,a\n0,add,b\n0,add,c\n10,remove,a\n14,add,d\n20,remove,b\n"
    rows = repeated(rows_of(text), 40.0)
    assert [(row.at, row.comes, row.node) for row in rows[5:]] == [
        (20.0, False, "b"),
        *((20.0, True, "c/1"), (20.0, False, "c"), (24.0, True, "d/1+"), (30.0, False, "d")),
        *((30.0, True, "c/2"), (30.0, False, "c/1"), (34.0, True, "d/2+"), (40.0, False, "d/1+")),
    ]


def test_a_drawn_trace_has_the_losses_that_were_asked_for() -> None:
    rows = drawn(100, 10.0, 24.0, back_s=60.0, seed=3)
    assert sum(not row.comes for row in rows) == pytest.approx(1000, rel=0.1)
    assert rows == drawn(100, 10.0, 24.0, back_s=60.0, seed=3) != drawn(100, 10.0, 24.0, back_s=60.0, seed=4)
