"""A process that Ray has prepared has imported nearly all that a worker imports before it joins."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.cores import usable_cores
from actors.own_cluster import PRELOADED, crowded, prepared, wanted
from elastic.config.sections import Workers
from tests.support.commands import ROOT, Command
from tests.support.job_file import to_toml
from tests.support.patience import PATIENCE_S
from tests.support.toys import toy_job

JOINS = """
import importlib, json, ray, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
before = set(sys.modules)
import actors.worker, elastic.train.loop, elastic.train.model, elastic.train.session, elastic.train.warmup, storage.checkpoints
from elastic.train.session import prepare_process
from tests.support.toys import toy_job
prepare_process(toy_job("/nowhere", reproducible=True))
ours = ("actors", "elastic", "storage", "tests", "ray")
print(json.dumps(sorted(name for name in set(sys.modules) - before if not name.startswith(ours))))
"""

COMPILES = """
import importlib, json, os, sys, tempfile, torch
empty = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = empty.name  # what was compiled before takes fewer modules
for name in sys.argv[1:]:
    importlib.import_module(name)
import actors.worker, elastic.train.loop, elastic.train.session, elastic.train.warmup
before = set(sys.modules)
torch.compile(lambda x: (x.sin() * 2).sum(), fullgraph=True)(torch.randn(4, 5, requires_grad=True)).backward()
print(json.dumps(sorted(name for name in set(sys.modules) - before if name.startswith(("torch", "sympy")))))
"""


@pytest.mark.parametrize(
    ("workers", "cores", "gpus", "processes"),
    [
        ({"max": 2}, 8, 0, 5),  # two workers, coordinator, keeper, and one that takes a dead one's place
        ({"max": 2}, 64, 0, 5),  # Ray alone would start 64
        ({"max": 2}, 2, 0, 0),  # five would import on two cores, while the first worker waits
        ({"max": 8, "spares": 1, "gpus": 1, "cpus": 0}, 32, 16, 12),
        # no more workers than GPUs can run: eleven imports at once take twice as long as five
        ({"max": 8, "gpus": 1}, 32, 2, 5),
        ({"max": 8, "gpus": 1}, 32, None, 11),  # Ray does not say how many there are
        ({"max": 4, "cpus": 2}, 16, 0, 11),  # a CPU for Ray is a process
    ],
)
def test_processes_wait_where_each_has_a_core(
    workers: dict[str, int], cores: int, gpus: int | None, processes: int
) -> None:
    assert prepared(Workers(min=1, **workers), cores, gpus) == processes


def imported_after(modules: list[str], program: str = JOINS) -> list[str]:
    """Returns the installed modules that a worker, or another ``program``, still imports once it has
    ``modules``.
    """
    done = subprocess.run(
        [sys.executable, "-c", program, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def guides() -> list[str]:
    """Returns the modules that the guide names for clusters that are there before a run."""
    guide = (ROOT / "examples" / "guide" / "clusters.md").read_text(encoding="utf-8")
    return re.findall(r"RAY_preload_python_modules=(\S+)", guide)[0].split(",")


@pytest.mark.parametrize(
    ("modules", "least", "most"), [(guides(), 0, 50), (PRELOADED.split(","), 500, 999), ([], 1000, 10_000)]
)
def test_a_prepared_process_has_imported_what_a_worker_needs(
    modules: list[str], least: int, most: int
) -> None:
    """N13: the figures count modules, since these do not depend on the machine.  The last one is the control."""
    left = imported_after(modules)
    assert least <= len(left) <= most, left


@pytest.mark.full
@pytest.mark.parametrize("preloaded", [True, False], ids=["prepared", "control"])
def test_a_process_prepared_for_a_job_that_compiles_has_the_compiler(preloaded: bool) -> None:
    """N13: more than three hundred modules of torch and sympy are imported while the first graph is compiled;
    counted as above.

    Those of setuptools, whose number is another in each version, are not counted.
    """
    left = imported_after([*guides(), *["torch._inductor.compile_fx"] * preloaded], COMPILES)
    assert len(left) < 150 if preloaded else len(left) > 300, len(left)


@pytest.mark.parametrize(
    ("workers", "cores", "cpus", "said"),
    [
        ({"max": 2}, 2, 5, ""),
        ({"max": 2}, 1, 5, "this machine has 1 core, and 2 workers with workers.cpus = 1 share them"),
        ({"max": 3}, 2, 6, "this machine has 2 cores, and 3 workers with workers.cpus = 1 share them"),
        (
            {"max": 12, "spares": 1},
            8,
            16,
            "this machine has 8 cores, and 13 workers with workers.cpus = 1 share them",
        ),
        ({"max": 2, "cpus": 4}, 4, 11, "and 2 workers with workers.cpus = 4 share them"),
        ({"max": 2, "cpus": 0.5}, 1, 5, ""),
        ({"max": 8, "gpus": 1, "cpus": 0}, 2, 11, ""),
        ({"max": 4}, 64, 7, ""),
    ],
)
def test_a_cluster_of_this_machine_has_room_for_the_run_and_says_if_that_has_more_workers_than_cores(
    workers: dict[str, int], cores: int, cpus: int, said: str
) -> None:
    """The control: where each worker has its cores, nothing is said."""
    one = Workers(min=1, **workers)
    assert wanted(one, None) == cpus
    told = crowded(one, cores)
    assert said in told if said else told == ""


@pytest.mark.full
def test_who_trains_more_workers_than_there_are_cores_is_told_once(tmp_path: Path) -> None:
    """All of them have room, too.  The control is one worker."""
    cores = usable_cores()
    for most, said in ((cores + 1, 1), (1, 0)):
        workers = {"min": most, "max": most}
        (tmp_path / "job.toml").write_text(
            to_toml(toy_job(tmp_path / "bucket", name=f"of-{most}", steps=2, workers=workers))
        )
        command = Command(tmp_path, "train", "job.toml")
        assert command.wait() == 0, command.text
        assert command.text.count(f"this machine has {cores} cores, and {most} workers") == said
        assert f"world {most} " in command.text


@pytest.mark.fast
@pytest.mark.parametrize(
    ("files", "own", "cores"),
    [
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({"cpu.max": "150000 100000"}, "0::/", 2),
        (
            {"cpu.max": "max 100000", "a/cpu.max": "100000 100000", "a/b/cpu.max": "300000 100000"},
            "0::/a/b",
            1,
        ),
        ({"cpu.max": "1000 100000"}, "0::/", 1),
        ({"a/cpu.max": "100000 100000"}, "0::/b", None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, "3:cpu,cpuacct:/x\n0::/", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "50000"}, "3:cpu,cpuacct:/", None),
        ({}, "", None),
    ],
    ids=(
        "no quota",
        "a part",
        "a group around it",
        "less than one",
        "another group",
        "version 1",
        "version 1, none",
        "no cgroups",
    ),
)
def test_a_quota_of_the_container_counts_as_cores_do(
    tmp_path: Path, files: dict[str, str], own: str, cores: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores are those of a quota, if the machine has more.  None stands for no quota."""
    for name, text in files.items():
        (path := tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    for there in (8, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, there=there: set(range(there)))
        assert usable_cores(tmp_path / "cgroup", tmp_path / "own") == min(cores or there, there)
