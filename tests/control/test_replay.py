"""This version tells the kept journals of real runs, and decides as was decided then.  A journal that was
tampered with is found out.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.cli import main
from elastic.control.decision import Transition
from elastic.control.rules import Rules
from elastic.control.run import RunState
from elastic.ids import Version
from elastic.journal import codec
from elastic.protocol.commit_record import Usage
from elastic.protocol.events import Recovered, StepDone
from elastic.report.replay import action_line, differences, tell
from storage import journal
from storage.objects import ObjectStore
from tests.control.play import Play, outcome, stepping
from tests.golden.make import unpack

JOURNALS = ("coordinator", "killed", "shards", "stopped", "undisturbed")


def read(name: str, folder: Path) -> Any:
    """Returns the journal of a golden run; ``tests/golden/test_golden.py`` decides each again."""
    job = unpack(f"journals/{name}.tar.gz", folder)
    return journal.read(ObjectStore.open(job.bucket), name)


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the journal of a run of seven worlds: kills in backward, in an update and in a save, and
    growth.
    """
    return read("killed", tmp_path_factory.mktemp("kills"))


@pytest.mark.parametrize("name", JOURNALS)
def test_kept_journals_are_told(tmp_path: Path, name: str) -> None:
    segments = read(name, tmp_path)
    lines = list(tell(segments))
    assert "Finishing → Finished" in "\n".join(lines[-2:])
    formed = [
        action
        for _, records in segments
        for record in records
        for action in record["actions"]
        if action["$"] == "Form"
    ]
    assert len([line for line in lines if "do Form" in line]) == len(formed)


def test_the_telling(kills: Any) -> None:
    """The telling names the worker, the edge, the reason and the actions."""
    text = "\n".join(tell(kills))
    assert "commits of steps 5 to 7" in text
    assert "Lost worker=w2 reason=its process died  [Running → Stopping]\n" in text
    assert "w2 is lost (its process died): stop generation 1 of 2 workers" in text
    assert "do Fence w1 generation=1" in text
    assert "do Settle generation 1 for w1: nothing more was committed" in text
    assert "do Form generation 2 of w1 as 1×1 at step 7@g1 from live" in text


def test_a_run_that_was_started_again_is_told_so() -> None:
    """The control is a coordinator that takes over: the run goes on as it was."""
    play = stepping(2)
    play.steps(1, 3)
    first, before = RunState.begin(1, 0.0), play.run
    again = RunState.begin(3, 9.0, (Version(2, 1),), ((1, 2),), 101)
    taken_over = codec.record(8, 8.0, Recovered(2, (), ()), before, followed(play))
    text = [
        *tell(
            [(codec.snapshot(first), []), (codec.snapshot(before), [taken_over]), (codec.snapshot(again), [])]
        )
    ]
    assert [line.strip() for line in text if "started again" in line] == [
        "the run is started again (owner 3) and goes on from step 2"
    ]
    assert any("coordinator 2 takes over at step 3" in line for line in text)


def followed(play: Play) -> Transition:
    """Returns the decision of the next coordinator."""
    play.tell(Recovered(2, tuple(play.run.workers), play.run.cluster.keepers))
    return play.last


def test_a_layout_is_told_with_all_its_axes(kills: Any) -> None:
    form = next(
        action
        for _, records in kills
        for record in records
        for action in record["actions"]
        if action["$"] == "Form"
    )
    form = copy.deepcopy(form)
    form["plan"]["layout"] |= {"dp_replicate": 2, "dp_shard": 3, "more": [["columns", 4]]}
    assert " as 2×3×4 columns at step " in action_line(form)


def test_a_decision_that_was_changed_is_found(kills: Any) -> None:
    """Negative controls: another state, a missing action, another event."""
    number, record = next(
        (n, r)
        for n, (_, records) in enumerate(kills)
        for r in records
        if r["event"]["$"] == "Lost" and r["actions"]
    )

    def changed(**changes: Any) -> list[tuple[int, str]]:
        segments = copy.deepcopy(kills)
        (target,) = (each for each in segments[number][1] if each["n"] == record["n"])
        target.update(changes)
        return [(each.n, each.what) for each in differences(segments, "another version")]

    assert changed() == []
    assert changed(state="Running") == [(record["n"], "state")]
    assert changed(actions=record["actions"][1:]) == [(record["n"], "actions")]
    assert (record["n"], "state") in changed(event=codec.encode(codec.decode_event({"$": "Tick"})))


def test_other_rules_decide_otherwise(kills: Any) -> None:
    rules = codec.decode(Rules, kills[-1][0]["rules"])
    segments = [
        ({**snapshot, "rules": codec.encode(replace(rules, max_workers=1))}, records)
        for snapshot, records in kills
    ]
    found = list(differences(segments, "another version"))
    assert any(each.what == "actions" and "StartWorkers w1,w2" in each.recorded for each in found), found
    nameless = [({**snapshot, "rules": None}, records) for snapshot, records in kills]
    with pytest.raises(ValueError, match="does not contain the rules of its decisions"):
        list(differences(nameless, "another version"))
    assert not [each for each in differences(nameless, "another version", rules) if each.what != "reason"]


def test_sentences_are_compared_where_version_and_rules_are_the_same(kills: Any) -> None:
    """Differences that the kept journal already has, because some sentences have changed since, do not count."""
    segments, code = copy.deepcopy(kills), kills[0][0]["code"]
    segments[0][1][1]["reason"] = "because"
    there = [*differences(kills, code)]
    added = [each for each in differences(segments, code) if each not in there]
    assert [(each.n, each.what) for each in added] == [(segments[0][1][1]["n"], "reason")]
    assert list(differences(segments, "another version")) == []


def test_the_command(kills: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (written := tmp_path / "journal.jsonl").write_text(
        "\n".join(json.dumps(line) for head, records in kills for line in (head, *records))
    )
    path = str(written)
    assert main(["replay", path]) == 0
    assert "[Finishing → Finished]" in capsys.readouterr().out
    assert main(["replay", path, "--check"]) == 0
    assert " decides 0 otherwise and words " in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "none.jsonl")]) == 1
    assert (
        "none.jsonl' cannot be read (No such file or directory); name a job file" in capsys.readouterr().out
    )


def test_steps_are_told_with_their_speed_and_what_they_waited_for() -> None:
    """Each of two steps has 4 tokens in half a second.  Control: nobody has measured the steps of an older
    version.
    """
    play = stepping(2)
    begun, records = codec.snapshot(play.run), list[Any]()
    for step in (1, 2):
        before, done = (
            play.run,
            replace(outcome(step, 1), usage=Usage(0.5, 0.125, 3_000_000_000), usage_ranks=(0, 1, 0, 0)),
        )
        play.tell(StepDone(play.plan.members[0], 1, done))
        records.append(
            codec.record(step, float(step), StepDone(play.plan.members[0], 1, done), before, play.last)
        )
    (line,) = tell([(begun, records)])
    assert line.endswith(
        "commits of steps 1 to 2: 8 tokens/s, 25.0% of the time waiting for data, up to 3 GB of a GPU"
    )
    unmeasured = json.loads(json.dumps(records))
    for record in unmeasured:
        del record["commits"][0]["usage"], record["commits"][0]["usage_ranks"]
    (line,) = tell([(begun, unmeasured)])
    assert line.endswith("commits of steps 1 to 2")
