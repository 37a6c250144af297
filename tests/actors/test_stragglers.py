"""R15: a worker that is slow by its own work is named, and replaced if the job says so; nothing is lost.

A spare is there before the run may go on, so that it can take the seat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.view import View
from elastic.control.stragglers import WINDOW
from elastic.data.cursor import Cursor
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import Trial, Witness, alone, assert_nothing_left, formed, samples, trial
from tests.support.mischief import EACH_S
from tests.support.toys import LIGHT, toy_job

STEPS, GATE = 40, 3
SAMPLES = 16 * STEPS
DATA: dict[str, Any] = {"dataset": "tests.support.toys:Sums", "args": {"samples": SAMPLES}}
ROUNDS = 2
"""Microbatches of each of two workers in a step."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of the same job in one process, by the usual loss."""
    folder = tmp_path_factory.mktemp("alone")
    return alone(toy_job(folder, **LIGHT, name="local", steps=STEPS, data=DATA))


def run(folder: Path, loss: str, straggler: str) -> Trial:
    """Runs two workers and a spare; from step ``GATE`` on only once the spare is there."""
    sample = Cursor(SAMPLES, 16, 0, "permutation").microbatch_ids(GATE, 0, 4)[0]
    gate = folder / "gate"
    args = {**DATA["args"], "gates": {str(sample): str(gate)}}

    def act(witness: Witness, view: View) -> bool:
        if there := len(view.workers) == 3:
            gate.touch()
        return there

    return trial(
        toy_job(
            folder,
            **LIGHT,
            name=f"straggler-{straggler}",
            steps=STEPS,
            loss=f"tests.support.mischief:{loss}",
            data=DATA | {"args": args},
            workers={"min": 1, "max": 2, "spares": 1, "straggler": straggler},
            checkpoint={"save_every": 100},
        ),
        act,
    )


def named(chaos: Trial) -> list[str]:
    """Returns the sentences that name slow workers."""
    said = [line.text for line in chaos.lines if isinstance(line, Sentence)]
    return [text for text in said if "is slow, and all others wait for it" in text]


def assert_same(chaos: Trial, reference: Any) -> None:
    """Checks that the run ended as the undisturbed one: bits, losses and samples, each step once, and no
    microbatch was computed twice.
    """
    assert chaos.result.state == "Finished", chaos.result
    assert (chaos.hash, chaos.losses) == (reference.hash, reference.losses)
    assert samples(chaos.ledger) == samples(reference.ledger)
    assert chaos.witness.total("microbatches_run") == STEPS * chaos.job.microbatches
    assert_nothing_left(chaos)


@pytest.mark.must_run_in_ci
def test_r15_a_straggler_is_replaced_by_a_spare(tmp_path: Path, undisturbed: Any) -> None:
    """Slowed twofold, it is named within 20 steps and leaves once the others and the spare have connected the
    next world (R24).  No step is done again.
    """
    chaos = run(tmp_path, "twice_as_slow", "evict")
    assert_same(chaos, undisturbed)
    records = list(Run.open(chaos.job).records())
    first, second = formed(records)
    (_, slow), (spare,) = first.members, {*second.members} - {*first.members}
    assert set(second.members) == {first.members[0], spare} and (second.redone, second.tier) == (0, "live")
    (told,) = named(chaos)
    assert told.startswith(f"{slow} on node ")
    record = next(each for each in records if told in each["reason"])
    assert max(each["step"] for each in record["commits"]) <= 20
    assert second.ahead == 1, "nobody had to connect in the pause"
    evicted, rest = chaos.witness.seen[slow], [chaos.witness.seen[each] for each in second.members]
    assert evicted.ended_at < min(each.ended_at for each in rest), "its process has ended"
    assert (evicted.final["generation"], evicted.final["step"]) == (1, second.step)
    assert all(each.final["generation"] == 2 and each.process.pid == each.final["pid"] for each in rest)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["five_times_as_slow", "slow_in_exchanges"])
def test_b5_the_log_names_the_straggler_that_every_step_waits_for(
    tmp_path: Path, undisturbed: Any, loss: str
) -> None:
    """R15 too.  Each step takes as long as the slowest worker; no worker is ever a step ahead.  The control is
    slow only in exchanges: its steps take as long, and nobody is named.
    """
    chaos = run(tmp_path, loss, "report")
    assert_same(chaos, undisturbed)
    (world,) = formed(Run.open(chaos.job).records())
    finals = [chaos.witness.seen[member].final for member in world.members]
    assert [each["updates_applied"] for each in finals] == [STEPS] * 2, "staleness is 0"
    if loss == "slow_in_exchanges":
        assert named(chaos) == []
        assert all(outcome.usage.step_s > 2 * ROUNDS * EACH_S for outcome in chaos.ledger.values())
        return
    (told,) = named(chaos)
    assert told.startswith(f"{world.members[1]} on node ")
    for step in range(WINDOW, STEPS + 1):
        usage = chaos.ledger[step].usage
        assert usage.step_s >= ROUNDS * usage.forward_s and usage.forward_s >= 5 * EACH_S
