"""A profile shows the steps that were asked for, and changes nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.report.story import Line, Sentence
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.gauges.profiler import Profiler
from storage.objects import ObjectStore
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.state_hash import state_hash
from tests.support.toys import small_job


def trained(job: Job) -> tuple[str, list[str]]:
    """Trains ``job`` and returns the hash of its last state, and the sentences that were shown."""
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    run, folder = Run.find(job), Path(job.bucket, "export")
    newest = run.newest()
    assert newest is not None
    run.checkpoints.export(newest, folder)
    return state_hash(sorted(folder.glob("*.safetensors"))), [
        line.text for line in lines if isinstance(line, Sentence)
    ]


def events(file: Path) -> list[Any]:
    return list(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])


def small(bucket: Path, **settings: Any) -> Job:
    return small_job(bucket, steps=4, **settings)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained(small(tmp_path_factory.mktemp("plain")))[0]


def test_a_profile_has_the_operations_of_its_steps_and_the_bits_stay(tmp_path: Path, plain: str) -> None:
    found, said = trained(small(tmp_path, profile="2-3"))
    assert found == plain
    (file,) = Path(tmp_path, "toy", "profiles").iterdir()
    assert file.name == "steps-2-3-g1.trace.json.gz"
    assert f"a profile is at {tmp_path}/toy/profiles/steps-2-3-g1.*" in said
    told = events(file)
    spans = {
        each["name"]: (each["ts"], each["ts"] + each["dur"])
        for each in told
        if each.get("cat") == "user_annotation"
    }
    assert {name for name in spans if name.startswith("step")} == {"step 2", "step 3"}
    for begins, ends in (spans["step 2"], spans["step 3"]):
        there = {
            each["name"] for each in told if each.get("cat") == "cpu_op" and begins <= each["ts"] <= ends
        }
        assert {"aten::mm", "aten::embedding", "aten::_foreach_lerp_"} <= there, (
            "forward, backward and the update"
        )


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, plain: str) -> None:
    """A file is where the folder of profiles should be."""
    Path(tmp_path, "toy").mkdir()
    Path(tmp_path, "toy", "profiles").write_text("in the way")
    found, said = trained(small(tmp_path, profile="4"))
    assert found == plain
    assert any(
        text.startswith(f"the profile steps-4-4-g1 could not be written to {tmp_path}/toy/profiles:\n")
        for text in said
    )


def profiled(world: Any, job: Job) -> list[str]:
    from elastic.ids import Version

    said: list[str] = []
    profiler = Profiler(job, ObjectStore.open(job.bucket), said.append)
    with member(world, job, Version(0, 0)) as me:
        for step in (1, 2):
            with profiler.watch(step, world):
                me.step()
        with pytest.raises(ZeroDivisionError), profiler.watch(3, world):
            me.step(lambda: 1 // 0)
    profiler.finish()
    profiler.close()
    return said


def test_world_rank_0_alone_profiles_and_a_world_that_breaks_leaves_the_steps_that_it_made(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(Layout(2, 1), profiled, small_job(tmp_path, profile="2-9"))
    assert (
        first == [f"a profile is at {tmp_path}/toy/profiles/steps-2-2-g{ranks.generation}.*"] and second == []
    )
    assert [file.name for file in Path(tmp_path, "toy", "profiles").iterdir()] == [
        f"steps-2-2-g{ranks.generation}.trace.json.gz"
    ]


@pytest.mark.parametrize("steps", ["x", "5-", "0", "7-5", "1-2-3", " 5"])
def test_steps_that_are_none_are_refused(steps: str) -> None:
    with pytest.raises(
        JobError,
        match=f"profile = '{steps}'.* must be a step, as '7', or the first and the last of several, as '5-7'",
    ):
        small(Path("/b"), profile=steps)


def test_steps_after_the_last_one_are_refused() -> None:
    """Control: the last step may be profiled."""
    assert small(Path("/b"), profile="4").profiled() == range(4, 5)
    with pytest.raises(JobError, match=r"profile = '5-7' begins after the last step \(steps = 4\)"):
        small(Path("/b"), profile="5-7")
