"""``microbatch = "auto"`` is the largest that fits, as plain torch and arithmetic find; it is decided once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cli import main
from actors.launch import launch
from elastic.config.sections import Workers
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.plan.memory_need import USABLE
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.checks.microbatch import chosen
from tests.support.chaos import exported_hash
from tests.support.job_file import to_toml
from tests.support.peaks import each_once, measured
from tests.support.ranks import Ranks
from tests.support.toys import toy_job

MODEL = {"vocab": 29, "dim": 32, "layers": 1, "heads": 2}
BATCH = 48


def job_of(bucket: Path, **changes: Any) -> Job:
    return toy_job(bucket, **{"model_args": MODEL, "global_batch": BATCH, "microbatch": "auto"} | changes)


@pytest.fixture(scope="module", autouse=True)
def each_peak_once() -> Iterator[None]:
    with each_once():
        yield


@cache
def needed(samples: int, ranks: Ranks | None = None, layers: int = 1) -> float:
    """The judge: what lives at once in a real step of one member; with ``ranks`` of the one or two that need
    less.

    Two also need memory for two parts of the state while they form a world.
    """
    args = {
        "model_args": {**MODEL, "layers": layers},
        "microbatch": samples,
        "global_batch": 4 * samples,
        "workers": {"max": 2},
    }
    job = toy_job("/nowhere", recompute="none", **args)
    with closing(World.alone(torch.device("cpu"))) as world:
        alone = measured(world, job)
    if ranks is None:
        return alone
    state = 12 * sum(each.numel() for each in build(**MODEL).parameters())
    return min(alone, max(*ranks.run(Layout(1, 2), measured, job), state))


def judged(workers: int, ranks: Ranks | None, usable: float, steps: tuple[int, ...]) -> int:
    """The judge tries every number of samples."""
    cut = [
        n for n in range(1, BATCH + 1) if not any(step % n for step in steps) and BATCH // n >= 4 * workers
    ]
    return max((n for n in cut if needed(n, ranks) <= usable), default=1)


RAMP = {"start": 24, "increment": 12, "samples": 300}


@pytest.mark.parametrize(
    ("workers", "members", "ramp", "between", "expected"),
    [
        ({"max": 1}, 1, {}, (1, 2), 1),
        ({"max": 1}, 1, {}, (6, 8), 6),
        ({"max": 1}, 1, RAMP, (8, 12), 6),
        ({"max": 3}, 1, {}, (12, 16), 4),
        ({"max": 3, "min": 2}, 2, {}, (2, 3), 2),
    ],
)
def test_it_is_the_largest_that_fits(
    ranks: Ranks,
    tmp_path: Path,
    workers: dict[str, int],
    members: int,
    ramp: dict[str, int],
    between: tuple[int, int],
    expected: int,
) -> None:
    """The memory is between what two sizes need.  The control: with any memory, the judge finds more, unless
    the workers are the bound.
    """
    pool = ranks if members == 2 else None
    usable = sum(needed(samples, pool) for samples in between) / 2
    steps = (BATCH, *range(RAMP["start"], BATCH, RAMP["increment"])) if ramp else (BATCH,)
    job, why = chosen(job_of(tmp_path, workers=workers, batch_ramp=ramp), int(usable / USABLE))
    assert job.microbatch == judged(workers["max"], pool, usable, steps) == expected, why
    bounded = judged(workers["max"], pool, math.inf, steps) == expected
    assert bounded is (workers["max"] == 3 and members == 1)
    assert ("has fewer than 4 microbatches a step" in why) is bounded and (
        "a worker needs" in why
    ) is not bounded


def test_where_one_sample_is_too_large_recompute_makes_room(tmp_path: Path) -> None:
    """A policy that the user names counts: with less to keep, eight samples fit where otherwise four do."""
    few: dict[str, Any] = {"global_batch": 32, "workers": {"max": 1}, "model_args": {**MODEL, "layers": 3}}
    job, why = chosen(job_of(tmp_path, **few), int(0.95 * needed(1, layers=3) / USABLE))
    assert job.microbatch == 1 and job.recompute == "auto" and "even with that, recompute = 'none'" in why
    memory = int(0.97 * needed(8, layers=3) / USABLE)
    assert [
        chosen(job_of(tmp_path, recompute=policy, **few), memory)[0].microbatch
        for policy in ("none", "block")
    ] == [4, 8]


def test_a_device_that_is_too_small_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    few: dict[str, Any] = {"global_batch": 8, "recompute": "block"}
    too_small = (
        r"^microbatch = 'auto': even with 1 sample and {}, a worker needs .* of device memory, and "
        r"92 kB of 100 kB can be used "
    )
    with pytest.raises(
        JobError,
        match=too_small.format("the whole state on one device")
        + (
            r"\(workers.device_gb = "
            r"0.0001\); raise workers.device_gb$"
        ),
    ):
        launch(job_of(tmp_path, workers={"max": 1, "device_gb": 1e-4}, **few), local=True)
    assert not Run.find(job_of(tmp_path)).latest_claim() and not (tmp_path / "toy" / "job.json").exists()
    fixes = (
        "use devices with more memory, or raise workers.max or parallel.dp_shard, or set recompute to 'block'"
    )
    with pytest.raises(
        JobError,
        match=too_small.format("3 workers sharing the state") + rf"\(workers.device_gb = auto\); {fixes}$",
    ):
        chosen(job_of(tmp_path, workers={"max": 3}, **few | {"recompute": "none"}), 10**5)


def test_the_memory_of_cpus_is_not_limited(tmp_path: Path) -> None:
    """Nothing is estimated then, so a model that cannot be traced does not matter; where it does, the user
    must name a number.
    """
    here = "tests.train.test_microbatch"
    job = job_of(tmp_path, loss=f"{here}:by_values", workers={"max": 2})
    assert chosen(job, 0)[0].microbatch == 6
    bounded = chosen(job.replace(batch_ramp={"start": 3, "increment": 3, "samples": 100}), 0)
    assert (bounded[0].microbatch, bounded[1].partition(";")[0]) == (
        3,
        "no larger number divides every batch",
    )
    with pytest.raises(
        JobError,
        match=(
            r"^microbatch = 'auto': the memory that a microbatch takes is not known \(.*\); set "
            r"microbatch to a number$"
        ),
    ):
        chosen(job, 10**9)


def by_values(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A loss that asks for values."""
    return model(batch["tokens"]).sum(), int(batch["tokens"].sum().item())


def local_run(job: Job, stop: int = 0) -> list[str]:
    """Runs ``job`` in this process, to its end or to step ``stop``, and returns what was said."""
    lines: list[str] = []

    def show(line: Line) -> None:
        if isinstance(line, Sentence):
            lines.append(line.text)
        if isinstance(line, StepLine) and line.step == stop:
            raise KeyboardInterrupt

    assert run_local(job, show)[0] == ("Stopped" if stop else "Finished")
    return lines


def test_a_run_keeps_its_number_and_its_bits_with_another_memory(tmp_path: Path) -> None:
    """The control: the number that the new memory would have given has other bits."""
    usable, steps = (needed(2) + needed(3)) / 2, {"steps": 4, "model_args": {**MODEL, "dropout": 0.1}}
    small = {"max": 1, "device_gb": usable / USABLE / 1e9}
    job = job_of(tmp_path, workers=small, **steps)
    assert local_run(job, stop=2)[0].startswith(
        "microbatch = 2: with 3, recompute = 'none' and the whole state on one device, a worker needs"
    )
    assert Run.find(job).job.microbatch == 2
    assert local_run(job_of(tmp_path, **steps))[0] == "microbatch = 2: the run began with it"
    hashes = {0: exported_hash(job)}
    for number in (2, 6):
        named = job_of(tmp_path, name=f"m{number}", microbatch=number, **steps)
        assert not any("microbatch =" in line for line in local_run(named))
        hashes[number] = exported_hash(named)
    assert hashes[0] == hashes[2] != hashes[6]
    assert chosen(job_of(tmp_path, **steps), 0)[0].microbatch == 6


@pytest.fixture
def said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def ask(*words: str, **changes: Any) -> str:
        (tmp_path / "job.toml").write_text(to_toml(job_of(tmp_path, **changes)))
        assert main(["estimate", str(tmp_path / "job.toml"), *words]) == 0
        return " ".join(capsys.readouterr().out.split())

    yield ask


def test_the_estimate_says_what_auto_takes(said: Any) -> None:
    """It reckons with all samples, too.  Without the memory of the devices it says how to name it, and tells
    the rest.
    """
    device_gb, few = (
        str((needed(2) + needed(4)) / 2 / USABLE / 1e9),
        {"recompute": "block", "workers": {"max": 1}},
    )
    line = said("--workers.device-gb", device_gb, global_batch="all", recompute="none", workers={"max": 1})
    assert (
        "microbatch = 2: with 4, recompute = 'none' and the whole state on one device" in line
        and "1 or more workers" in line
    )
    line = said(**few | {"workers": {"gpus": 1}})
    assert (
        "microbatch = auto: not known until you name the memory of a device" in line
        and "the state takes" in line
    )
    line = said("--workers.device-gb", "0.0001", **few, global_batch=8)
    assert (
        "microbatch = auto: not known: microbatch = 'auto': even with 1 sample" in line
        and "it does not fit" in line
    )


@pytest.mark.parametrize("ramp", [(), (12, 12), (6, 18)])
@pytest.mark.parametrize("workers", [1, 2, 5, 40])
@pytest.mark.parametrize("batch", [24, 60, 96])
def test_microbatches_of_auto_divide_every_step_and_are_four_for_each_worker(
    batch: int, workers: int, ramp: tuple[int, ...]
) -> None:
    """The judge walks through the steps.  The control: one worker more may have no such microbatch as large."""
    growth = dict(zip(("start", "increment"), ramp, strict=False)) | ({"samples": 500} if ramp else {})
    found = Job(
        name="cut",
        bucket="/bucket",
        global_batch=batch,
        microbatch="auto",
        workers=Workers(max=workers),
        batch_ramp=growth,
    )
    steps = {found.batches().of(step) for step in range(1, 200)}
    judged = [
        size
        for size in range(1, batch + 1)
        if not any(step % size for step in steps) and batch >= 4 * workers * size
    ]
    assert found.microbatch_sizes() == (judged or [1])
    larger = found.replace(
        batch_ramp={}, workers=Workers(max=batch // (4 * found.microbatch_sizes()[-1]) + 1)
    )
    assert found.microbatch_sizes()[-1] == 1 or found.microbatch_sizes()[-1] not in larger.microbatch_sizes()
    assert found.warnings() == []
