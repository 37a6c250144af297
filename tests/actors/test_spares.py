"""R13: a spare takes a dead worker's seat: no process is started for it, nothing is imported, and one world
follows the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from actors.view import View
from elastic.data.cursor import Cursor
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import LEFT, Trial, Witness, assert_survived, formed, how, trial, validated
from tests.support.kills import SAMPLES, Cramp, Script, perform, undisturbed
from tests.support.room import Room
from tests.support.toys import LIGHT

STEP = 8
SHORT = {"steps": 14, **LIGHT}
HELD_OUT = {
    "every": 4,
    "samples": 21,
    "dataset": "tests.support.toys:Sums",
    "args": {"samples": 50, "seq_len": 16},
}


def struck(
    folder: Path, spares: int, layout: str, tier: str, strike: tuple[str, int, int], **changes: Any
) -> tuple[Script, Trial]:
    """Runs two members, of which one dies.  Without a spare there is room for another process; with a spare
    there is none.

    ``strike`` is the point at which it dies, its world rank, and the step.
    """
    point, rank, step = strike
    script = Script(layout, 2)
    script.form(2, "init")
    script.fault(point, "SIGKILL", rank, step)
    script.form(2, tier)
    room, gate = Room(), folder / "gate"
    sample = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(STEP - 2, 0, 2)[0]

    def act(witness: Witness, view: View) -> bool:
        """Lets the strike come once all workers are there and, with a spare, somebody else waits for the
        victim's place.
        """
        if len(view.workers) < 2 + spares or len(witness.seen) < 2 + spares:
            return False
        if spares:
            room.queue(1)
        gate.touch()
        return True

    try:
        room.take(ray.cluster_resources()["CPU"] - 2 - spares)
        data = {
            "dataset": "tests.support.toys:Sums",
            "args": {"samples": SAMPLES, "gates": {str(sample): str(gate)}},
        }
        return script, trial(
            script.job(
                folder,
                "spares",
                data=data,
                workers={"min": 2, "max": 2, "spares": spares},
                **SHORT,
                **changes,
            ),
            act,
        )
    finally:
        room.close()


def waited_for(chaos: Trial, generation: int = 2) -> list[str]:
    """Returns the starts and the joins of workers between the first loss and the ``Go`` of ``generation``."""
    records = list(Run.open(chaos.job).records())
    begin = next(n for n, each in enumerate(records) if each["event"]["$"] == "Lost")
    end = next(
        n
        for n, each in enumerate(records)
        if any(did["$"] == "Go" and did["generation"] == generation for did in each["actions"])
    )
    between = records[begin:end]
    started = [did["$"] for each in between for did in each["actions"] if did["$"] == "StartWorkers"]
    return started + [each["event"]["$"] for each in between if each["event"]["$"] == "Joined"]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the undisturbed run, which validates nothing."""
    return undisturbed(tmp_path_factory.mktemp("reference"), **SHORT)


@pytest.mark.must_run_in_ci
@pytest.mark.parametrize(
    ("layout", "tier", "rank"),
    [
        ("shard", "host", 0),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("shard", "host", 1), ("replicate", "live", 0))
        ),
    ],
)
def test_l1_r13_a_spare_takes_the_seat_of_a_worker_that_dies_in_a_validation(
    tmp_path: Path, expected: Any, layout: str, tier: str, rank: int
) -> None:
    """R13: three processes, no more, from first to last; a plan follows the loss at once, and the spare's
    state comes from the survivor, or from what the dead worker has left in its keeper's memory.

    L1: the next world stands at the same step and validates it again; each is told once, with the bits of one
    process without Ray.  The bits of the training are those of a run without validations.
    """
    script, chaos = struck(tmp_path, 1, layout, tier, ("validation", rank, STEP + 1), validation=HELD_OUT)
    assert_survived(chaos, expected, worlds=script.worlds, tiers=script.tiers)
    assert len(chaos.witness.seen) == 3 and waited_for(chaos) == []
    first, second = formed(Run.open(chaos.job).records())
    (spare,) = set(second.members) - set(first.members)
    (survivor,) = set(second.members) & set(first.members)
    assert (
        chaos.witness.seen[spare].final[f"healed_{tier}_bytes"] > 0
        and chaos.witness.seen[survivor].final["healed_live_bytes"] == 0
    )
    assert chaos.witness.seen[spare].final["updates_applied"] == chaos.job.steps - second.step
    (killed,) = chaos.witness.killed()
    assert killed.final["step"] == STEP
    scored = undisturbed(tmp_path / "validated", **SHORT, validation=HELD_OUT)
    assert scored.hash == expected.hash and validated(chaos.lines) == scored.validated
    assert [at for at, _ in scored.validated] == [4, STEP, 12, 14]
    told = {at - 1: each.validated.mean for at, each in chaos.ledger.items() if each.validated is not None}
    assert told == dict(scored.validated[:-1]), "no step follows the last one"
    said = [
        line.text
        for line in chaos.lines
        if isinstance(line, Sentence) and "validation after step" in line.text
    ]
    assert [
        sum(f"validation after step {at}: loss {loss:.6g}" in text for text in said)
        for at, loss in scored.validated
    ] == [1] * 4


@pytest.mark.full
def test_without_a_spare_another_process_is_waited_for(tmp_path: Path, expected: Any) -> None:
    """The control: the next world forms only after another process has been started and has joined."""
    script, chaos = struck(tmp_path, 0, "replicate", "live", ("backward", 1, STEP))
    assert_survived(chaos, expected, worlds=script.worlds, tiers=script.tiers)
    assert len(chaos.witness.seen) == 3 and waited_for(chaos) == ["StartWorkers", "Joined"]


def two_by_two(folder: Path, kills: int) -> tuple[Script, Trial]:
    """Runs two replicas of two shards, which lose a member, and with ``kills`` = 2 another one.

    Every world after a loss has two shards, so of three workers one is left over.
    """
    script = Script("2x2", 4)
    script.form(4, "init")
    script.cramps.append(Cramp(script.generation, 4, victims=kills))
    for step, tier in ((STEP, "live"), (2 * STEP, "host"))[:kills]:
        script.fault("backward", "SIGKILL", 1, step)
        script.form(2, tier)
    return script, perform(script, folder, "left-over", parallel={"min_shard": 2, "use": "fit"})


@pytest.mark.full
def test_who_is_left_over_of_a_replica_takes_a_dead_workers_seat(
    tmp_path: Path, script_reference: Any
) -> None:
    """R13: four processes, no more, from first to last.  The first loss leaves a whole replica and a worker
    over.  With the second one, both holders of a shard are dead; the worker that was over gets the shard from
    what the dead one left in its keeper's memory."""
    script, chaos = two_by_two(tmp_path, kills=2)
    assert_survived(chaos, script_reference, worlds=script.worlds, tiers=script.tiers)
    assert len(chaos.witness.seen) == 4 and waited_for(chaos, generation=3) == []
    first, second, third = formed(Run.open(chaos.job).records())
    (over,) = set(third.members) - set(second.members)
    final = chaos.witness.seen[over].final
    assert (first.layout, second.layout, third.layout) == ((2, 2), (1, 2), (1, 2))
    assert over in first.members and final["healed_host_bytes"] > 0
    assert final["updates_applied"] == second.step + chaos.job.steps - third.step, (
        "as a member, and again as one; none between"
    )
    (survivor,) = set(second.members) & set(third.members)
    assert chaos.witness.seen[survivor].final["healed_host_bytes"] == 0, "the other shard stays where it is"


@pytest.mark.full
def test_who_is_left_over_idles_where_nobody_else_dies(tmp_path: Path, script_reference: Any) -> None:
    """The control: the first of the two losses alone.  The same process waits, and takes no seat until the
    end.
    """
    script, chaos = two_by_two(tmp_path, kills=1)
    assert_survived(chaos, script_reference, worlds=script.worlds, tiers=script.tiers)
    assert len(chaos.witness.seen) == 4 and waited_for(chaos) == []
    first, second = formed(Run.open(chaos.job).records())
    (over,) = set(first.members) - set(second.members) - {first.members[1]}
    seen = chaos.witness.seen[over]
    assert (seen.final["generation"], seen.final["updates_applied"]) == (1, second.step)
    assert (
        how(seen.ended) == LEFT
        and sum(each.final["generation"] == 2 for each in chaos.witness.seen.values()) == 2
    )
