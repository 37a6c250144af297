"""R16: a bit flips in the memory of a worker, and nothing tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.job import Job
from elastic.report.story import Sentence
from elastic.runs.run import Run
from tests.support.chaos import Trial, alone, assert_nothing_left, formed, trial
from tests.support.mischief import STEP
from tests.support.toys import LIGHT, toy_job

BEFORE = STEP - 3
"""The step of the checkpoint before."""


def job_of(
    folder: Path, name: str, workers: int, loss: str, *, compare: bool = True, **changes: dict[str, Any]
) -> Job:
    values = {
        "workers": {"min": 1, "max": workers},
        "parallel": {"dp_shard": 1},
        "checkpoint": {"save_every": BEFORE, "compare": compare},
        **({"loss": f"tests.support.mischief:{loss}"} if loss else {}),
    }
    return toy_job(folder, name=name, **{**LIGHT, **values, **changes})


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The hash of a process without Ray, in which no bit flips."""
    yield alone(job_of(tmp_path_factory.mktemp("quiet"), "quiet", 1, "")).hash


def said(chaos: Trial, words: str) -> list[str]:
    return [line.text for line in chaos.lines if isinstance(line, Sentence) and words in line.text]


def flipped(chaos: Trial) -> str:
    """Returns the worker in whose memory the bit flipped, by its own log."""
    logs = [path.read_text() for path in Path(chaos.job.bucket).glob(f"{chaos.job.name}/logs/*/*.log")]
    words = [line.split() for log in logs for line in log.splitlines() if line.endswith("has another bit")]
    assert len(words) == 1, words
    return words[0][1]


def members(chaos: Trial) -> list[tuple[str, ...]]:
    return [each.members for each in formed(Run.open(chaos.job).records())]


def saved(chaos: Trial) -> list[tuple[int, int]]:
    """Returns the steps and generations of the manifests."""
    events: list[Any] = [record["event"] for record in Run.open(chaos.job).records()]
    return [
        (each["version"]["step"], each["version"]["generation"]) for each in events if each["$"] == "Saved"
    ]


def test_r16_a_bit_that_flips_in_one_of_three_replicas_never_reaches_a_checkpoint(
    tmp_path: Path, expected: str
) -> None:
    """All members have applied the wrong gradient by then, so the steps are done again.  The controls: the
    bit did change what is computed, and nobody notices if nobody looks.
    """
    chaos = trial(job_of(tmp_path, "chaos", 3, "bit_in_a_step"))
    liar = flipped(chaos)
    assert said(chaos, f"{liar} held other bits after step {STEP} than the other replicas: the run goes back")
    assert (chaos.result.state, chaos.hash) == ("Finished", expected)
    first, *later = members(chaos)
    assert liar in first and not any(liar in each for each in later)
    assert (STEP, 1) not in saved(chaos) and (BEFORE, 1) in saved(chaos)
    assert_nothing_left(chaos)

    silent = trial(job_of(tmp_path, "silent", 3, "bit_in_a_step", compare=False))
    assert flipped(silent) and not said(silent, "other bits") and silent.hash != expected
    assert len(members(silent)) == 1


def test_r16_of_two_replicas_the_steps_done_again_name_the_wrong_one(tmp_path: Path, expected: str) -> None:
    """The bit flips in the update of the step that is saved, so the other replica's state is right."""
    chaos = trial(job_of(tmp_path, "chaos", 2, "bit_in_an_update"))
    liar = flipped(chaos)
    assert said(chaos, f"hold different bits after step {STEP}, and nobody knows which are right")
    assert said(chaos, f"{liar} held other bits after step {STEP} than the same steps gave")
    assert (chaos.result.state, chaos.hash) == ("Finished", expected)
    first, second, *later = members(chaos)
    assert liar in first and liar in second and later and not any(liar in each for each in later)
    assert (STEP, 1) not in saved(chaos) and (STEP, 2) in saved(chaos)


@pytest.mark.parametrize("parallel", [{"dp_shard": 1}, {"dp_replicate": 1}], ids=["replicas", "shards"])
def test_r16_state_that_changes_is_not_read_by_the_next_update(
    tmp_path: Path, expected: str, parallel: dict[str, Any]
) -> None:
    """The step in which the bit flips is not committed, no step is done again, and the liar's part comes from a
    replica, or from its own copy.  The control: with one replica and without the check nobody notices.
    """
    copies = {"copy_every": 1, "buddy_every": 0, "verify": True}
    chaos = trial(job_of(tmp_path, "chaos", 2, "bit_in_a_step", parallel=parallel, copies=copies))
    liar = flipped(chaos)
    assert said(chaos, f"{liar} cannot go on (device: parameter ")
    assert said(chaos, f"has changed in memory since step {STEP - 2}, and no update has written to it")
    assert (chaos.result.state, chaos.hash) == ("Finished", expected)
    generations = formed(Run.open(chaos.job).records())
    assert liar in generations[0].members and not any(liar in each.members for each in generations[1:])
    assert [each.redone for each in generations] == [0] * len(generations)
    assert generations[1].tier == ("host" if "dp_replicate" in parallel else "live")
    if "dp_replicate" in parallel:
        silent = trial(job_of(tmp_path, "silent", 2, "bit_in_a_step", parallel=parallel))
        assert flipped(silent) and silent.hash != expected and len(members(silent)) == 1
