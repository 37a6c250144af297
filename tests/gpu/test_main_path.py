"""The README's GPU job by its command line, on one node with all its GPUs: it trains, loses a worker, and
ends with the bits of one GPU.

It goes the user's way: a Ray node that sees every GPU, processes that wait with the compiler imported,
workers that Ray gives one GPU each. Run it first wherever there are GPUs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elastic.job import Job
from elastic.runs.run import Run
from tests.support.clusters import TUNED
from tests.support.commands import MARK, ROOT, Command
from tests.support.processes import Process, Watched, free_ports, processes
from tests.support.state_hash import state_hash

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")

STEPS, KILL_AT, STARTS_S = 60, 8, 240
LINE = re.compile(r"step +(\d+)/\d+ .* world (\d+) ")
RAY = (sys.executable, "-m", "ray.scripts.scripts")
PATH = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with what a user has after the README's first command: the job file, and tokens of
    real text.
    """
    here = tmp_path_factory.mktemp("gpus")
    shutil.copy(ROOT / "examples" / "gpus.toml", here)
    (prepare,) = re.findall(
        r"^elastic (data prepare .* tokens .*)$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    arguments = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {prepare}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    done = Command(here, *arguments, PYTHONPATH=PATH)
    assert done.wait() == 0, done.text
    return here


def line(name: str, *settings: str) -> tuple[str, ...]:
    return ("train", "gpus.toml", "--name", name, "--steps", str(STEPS), *settings)


def hash_of(folder: Path, name: str) -> str:
    """Returns the hash of the last step's state."""
    job = Job.load(folder / "gpus.toml").replace(name=name, steps=STEPS, bucket=str(folder / "gpus-out"))
    run = Run.open(job)
    return state_hash(run.checkpoints.export(run.version_at(STEPS), folder / f"export-{name}"))


@pytest.fixture(scope="module")
def one_gpu(folder: Path) -> str:
    """The hash of the job on one GPU; nothing happens to it."""
    alone = Command(folder, *line("alone", "--workers.max", "1"), PYTHONPATH=PATH)
    assert alone.wait(STARTS_S) == 0, alone.text
    return hash_of(folder, "alone")


def workers(folder: Path, name: str) -> list[Process]:
    return [each for each in processes(f"{MARK}={folder}") if each.command.startswith(f"ray::Worker {name}/")]


def worlds(text: str) -> list[tuple[int, int]]:
    """Returns the step and the number of members of each commit that the command has shown."""
    return [(int(step), int(members)) for step, members in LINE.findall(text)]


def survived(
    folder: Path, name: str, until: Callable[[Callable[[], object]], None], text: Callable[[], str]
) -> None:
    """Kills a worker once all have committed some steps together.  The others go on in their processes, until
    all are there again.
    """
    until(lambda: any(step >= KILL_AT and members == GPUS for step, members in worlds(text())))
    *others, victim = (Watched(each.pid) for each in workers(folder, name))
    assert len(others) == GPUS - 1
    before = len(worlds(text()))
    victim.kill()
    assert victim.wait(60).signal in (signal.SIGKILL, None)
    until(lambda: any(members == GPUS - 1 for _, members in worlds(text())[before:]))
    assert all(each.running for each in others), text()
    until(lambda: worlds(text())[-1][1] == GPUS)
    assert all(each.running for each in others), text()


def assert_trained(said: str) -> None:
    """Checks that no world was refused, that at most two began for each worker, and that the last step was
    committed.
    """
    assert "cannot go on" not in said and "is replaced" not in said, said
    assert max(int(number) for number in re.findall(r"form generation (\d+)", said)) <= 2 * GPUS, said
    assert worlds(said)[-1][0] == STEPS, said


@pytest.mark.parametrize("zero", [0, 3])
def test_r1_the_readmes_job_on_all_gpus_of_a_node(zero: int, folder: Path, one_gpu: str) -> None:
    """R1, B17: every world forms at the first try, the survivors go on, and the weights are those of one GPU."""
    name = f"zero{zero}"
    command = Command(folder, *line(name, "--parallel.zero", str(zero)), PYTHONPATH=PATH)
    survived(folder, name, lambda true: command.until(true, STARTS_S), lambda: command.text)
    assert command.wait(STARTS_S) == 0, command.text
    assert_trained(command.text)
    assert (f"(1×{GPUS})" if zero else f"({GPUS}×1)") in command.text, command.text
    assert hash_of(folder, name) == one_gpu


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[str]:
    """The address of the job server of a cluster that somebody began on this machine, with all its GPUs."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | TUNED
    guide = (ROOT / "examples" / "guide" / "clusters.md").read_text(encoding="utf-8")
    variables |= dict(
        pair.split("=", 1)
        for pair in re.findall(r"^export (PYTORCH_NVML\S+ .*)$", guide, re.MULTILINE)[0].split()
    )
    # as the guide says of jobs that compile
    variables["RAY_preload_python_modules"] += ",torch._inductor.compile_fx"
    variables |= {"PYTHONPATH": PATH, MARK: str(folder)}
    ports = free_ports(3)
    listens = [
        f"--port={ports[0]}",
        f"--dashboard-port={ports[1]}",
        f"--dashboard-agent-listen-port={ports[2]}",
    ]
    start = [
        *RAY,
        "start",
        "--head",
        "--block",
        "--include-dashboard=true",
        f"--temp-dir=/tmp/ray-{ports[0]}",
        *listens,
    ]
    with open(folder / "head", "wb") as output:
        process = subprocess.Popen(
            start, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        end = time.monotonic() + STARTS_S
        while "Ray runtime started" not in (said := (folder / "head").read_text()):
            assert process.poll() is None and time.monotonic() < end, said
            time.sleep(0.1)
        yield f"http://127.0.0.1:{ports[1]}"
    finally:
        for each in processes(f"{MARK}={folder}"):
            os.kill(each.pid, signal.SIGKILL)
        process.wait(60)


def test_r1_the_same_job_by_ray_job_submit(folder: Path, one_gpu: str, head: str) -> None:
    job = [arg.replace("gpus.toml", str(folder / "gpus.toml")) for arg in line("submitted")]
    where = ["--bucket", str(folder / "gpus-out"), "--data.args.path", str(folder / "tokens")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "PYTHONPATH": PATH
    }
    submit = [*RAY, "job", "submit", "--address", head, "--", sys.executable, "-m", "elastic", *job, *where]
    shown = folder / "submitted"
    with open(shown, "wb") as output:
        process = subprocess.Popen(
            submit, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )

    def until(true: Callable[[], object]) -> None:
        end = time.monotonic() + STARTS_S
        while not true():
            assert process.poll() is None and time.monotonic() < end, shown.read_text()
            time.sleep(0.01)

    survived(folder, "submitted", until, shown.read_text)
    assert process.wait(STARTS_S) == 0, shown.read_text()
    assert_trained(shown.read_text())
    assert hash_of(folder, "submitted") == one_gpu, shown.read_text()
