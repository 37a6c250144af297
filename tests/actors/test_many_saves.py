"""L7: 500 saves by real processes.  The bucket and the memory of every process of the run stay as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from actors.living import attach
from actors.view import View
from elastic.job import Job
from tests.support.chaos import Witness, assert_nothing_left, trial
from tests.support.processes import children
from tests.support.toys import toy_job

OBJECTS = 4
"""Number of objects of a checkpoint of two workers: two shards, the index and the manifest."""
KEPT, UNDER_WAY = 3, 3
"""Number of checkpoints that the rule keeps, and of others that may be there: one that is marked, one that is
due, one that is written.
"""
KIB_A_SAVE = 16
"""KiB by which the memory of a process may grow for each save.  A coordinator keeps the last 10,000 lines of
its story.
"""
ROW_BYTES = 20_000
"""Bytes of the metrics that come at once."""
KINDS = re.compile(r"ray::(?P<actor>Coordinator|Keeper|Worker)\b|(?P<module>uploader)")


@dataclass(frozen=True)
class Sample:
    """The run after ``saves`` saves: objects and bytes of the bucket by folder, and the KiB that processes
    had in memory by kind.
    """

    saves: int
    step: int
    objects: dict[str, int]
    size: dict[str, int]
    resident: dict[str, int]


def in_bucket(run: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the number of objects and their bytes, for each folder of the run."""
    objects, size = dict[str, int](), dict[str, int]()
    for path in run.rglob("*"):
        with suppress(FileNotFoundError):  # deleted meanwhile
            if path.is_file() and not path.name.startswith("."):
                folder = path.relative_to(run).parts[0]
                objects[folder], size[folder] = (
                    objects.get(folder, 0) + 1,
                    size.get(folder, 0) + path.stat().st_size,
                )
    return objects, size


def resident() -> dict[str, int]:
    """Returns the KiB of memory that the processes of the run have, the largest of each kind: those below
    this process.
    """
    found = dict[str, int]()
    for pid in children(os.getpid()):
        with suppress(OSError):  # gone meanwhile
            title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if match := KINDS.search(title):
                kind = match["actor"] or match["module"]
                status = dict(
                    line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                )
                found[kind] = max(
                    found.get(kind, 0), int(status["RssAnon"].split()[0]) + int(status["RssShmem"].split()[0])
                )
    return found


class Follows:
    """Takes a sample at each of ``at`` saves, and stops the run after the last one.  A save counts once its
    manifest is there.
    """

    def __init__(self, job: Job, at: Sequence[int]) -> None:
        self.job, self.at, self.samples = job, list(at), list[Sample]()
        self.run = Path(job.bucket) / job.name
        self._manifests = set[str]()

    def __call__(self, witness: Witness, view: View) -> bool:
        for folder in (self.run / "steps").glob("*"):
            if folder.name not in self._manifests and any(folder.glob("*/MANIFEST.json")):
                self._manifests.add(folder.name)
        if len(self._manifests) < self.at[0]:
            return False
        self.samples.append(Sample(len(self._manifests), view.step, *in_bucket(self.run), resident()))
        print(json.dumps(asdict(self.samples[-1])))
        self.at.pop(0)
        if not self.at and (coordinator := attach(self.job.name)) is not None:
            coordinator.stop.remote("the test has seen enough")
        return not self.at


def followed(bucket: Path, name: str, at: Sequence[int], **checkpoint: int) -> list[Sample]:
    """Runs a job of two workers that saves as often as it can, and returns the samples of it."""
    job = toy_job(
        bucket,
        name=name,
        model_args={"vocab": 29, "dim": 32, "layers": 2, "heads": 2},
        steps=100_000,
        data={"dataset": "tests.support.toys:Sums", "args": {"samples": 16_000}},
        workers={"min": 2, "max": 2},
        checkpoint={"save_every": 1} | checkpoint,
    )
    follows = Follows(job, at)
    chaos = trial(job, follows, hash_it=False)
    assert chaos.result.state == "Stopped", chaos.result
    assert_nothing_left(chaos)
    return follows.samples


def grown(samples: Sequence[Sample]) -> list[str]:
    """Returns what grows from the first sample on.

    The journal and the metrics have a line for each step, which stays: they may grow, but no more for a later
    save than for an earlier one.
    """
    first, last = samples[0], samples[-1]
    saves = last.saves - first.saves
    room = OBJECTS * (KEPT + UNDER_WAY)
    found = [
        f"{each.objects['steps']} objects after {each.saves} saves"
        for each in samples
        if each.objects["steps"] > room
    ]
    if max(each.size["steps"] for each in samples) > room / (OBJECTS * KEPT) * first.size["steps"]:
        found.append(f"{last.size['steps']} bytes of checkpoints, of {first.size['steps']}")
    for kind, kib in last.resident.items():
        if kib - first.resident[kind] > KIB_A_SAVE * saves:
            found.append(f"{kind} has {kib} KiB, of {first.resident[kind]}")
    for folder in ("journal", "metrics"):
        if last.size[folder] > 1.1 * last.saves / first.saves * first.size[folder] + ROW_BYTES:
            found.append(f"{folder} has {last.size[folder]} bytes, of {first.size[folder]}")
    return found


@pytest.mark.full
def test_l7_five_hundred_saves(tmp_path: Path) -> None:
    """``pytest -s`` prints the samples."""
    samples = followed(tmp_path / "bucket", "kept", (100, 200, 300, 400, 500), keep_last=KEPT)
    assert {"Coordinator", "Keeper", "Worker", "uploader"} <= samples[0].resident.keys()
    assert not grown(samples[1:]), (
        "the first 100 saves fill what is kept for a while: lines of the story, buffers of the allocator"
    )
    held = samples[1].size["steps"] // 6 * 300 // 1024
    leaking = replace(
        samples[-1], resident=samples[-1].resident | {"Keeper": samples[1].resident["Keeper"] + held}
    )
    assert len(grown([*samples[1:-1], leaking])) == 1, (
        "the control: one checkpoint that stays in memory for each save"
    )


@pytest.mark.full
def test_without_a_rule_the_bucket_grows(tmp_path: Path) -> None:
    """The negative control, by the same judge."""
    samples = followed(tmp_path / "bucket", "all", (50, 100, 150))
    told = " ".join(grown(samples))
    assert (
        samples[-1].objects["steps"] >= OBJECTS * 150
        and f"{samples[-1].objects['steps']} objects after" in told
    )
    assert "bytes of checkpoints" in told and "journal" not in told
