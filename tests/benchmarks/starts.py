"""Measures how long a worker takes from its start to its joining, with processes that Ray has prepared and
without.

    python -m tests.benchmarks.starts [--kills 2]

Each way has a cluster of its own on this machine and one run of two workers of the tests' toy model, of which
one is killed again and again.  ``start`` is the time by the journal from the order to start a worker to its
joining.  The worker's log says how much of that it computed; this does not depend on what else the machine
does.  Memory is that of a process that waits, with torch and without.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import ray

from actors import cluster, own_cluster
from actors.launch import launch
from elastic.runs.run import Run
from elastic.train.gauges.counters import Counters, segment
from storage.objects import ObjectStore
from tests.support.toys import toy_job

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("cold", "prepared")
COMPUTED = re.compile(r"joined [\d.]+ s after it was made, with ([\d.]+) s of processor time")


def idle() -> list[psutil.Process]:
    """Returns the processes of this machine's clusters that wait for work."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name().startswith("ray::IDLE") or (process.cmdline() or [""])[0].startswith(
                "ray::IDLE"
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


def settle(count: int, limit_s: float = 240) -> list[psutil.Process]:
    """Waits until ``count`` processes wait for work and compute nothing more."""
    until, before = time.monotonic() + limit_s, -1.0
    while time.monotonic() < until:
        there = idle()
        spent = sum(sum(each.cpu_times()[:2]) for each in there)
        if len(there) >= count and spent - before < 0.05:
            return there
        before = spent
        time.sleep(1.0)
    raise TimeoutError(f"{len(idle())} of {count} processes wait for work")


def measure(way: str, kills: int) -> dict[str, float | list[float]]:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        workers, deadlines = {"min": 1, "max": 2, "cpus": 1}, {"grow_debounce_s": 1}
        job = toy_job(folder, name="starts", steps=100_000, workers=workers, deadlines=deadlines)
        if way == "prepared":
            # also on a machine with too few cores for it
            os.environ |= {"RAY_preload_python_modules": own_cluster.PRELOADED}
        cluster.connect("local")
        # of bare ones Ray may keep fewer
        waiting = settle(int(ray.cluster_resources()["CPU"]) if way == "prepared" else 1)
        memory = [each.memory_full_info() for each in waiting]
        found: dict[str, float | list[float]] = {
            "idle_processes": float(len(waiting)),
            "idle_uss_mib": statistics.median(each.uss for each in memory) / 2**20,
            "idle_pss_mib": statistics.median(each.pss for each in memory) / 2**20,
            "idle_cpu_s": statistics.median(sum(each.cpu_times()[:2]) for each in waiting),
        }
        driver = threading.Thread(target=strike, args=(job.name, kills), daemon=True)
        driver.start()
        launch(job)
        starts, joins = {}, {}
        for record in Run.open(job).records():
            for action in record["actions"]:
                if action["$"] == "StartWorkers":
                    starts |= dict.fromkeys(action["workers"], record["at"])
            if record["event"]["$"] == "Joined":
                joins[record["event"]["worker"]] = record["at"]
        store = ObjectStore.open(job.bucket)
        logs = {Path(key).stem: store.get(key).decode() for key in store.list(f"{job.name}/logs/")}
        found["start_s"] = [joins[worker] - starts[worker] for worker in joins]
        found["computed_s"] = [
            float(match[1]) for worker in joins if (match := COMPUTED.search(logs.get(worker, "")))
        ]
        ray.shutdown()
        return found


def strike(name: str, kills: int) -> None:
    """Kills a worker whenever both are there, then stops the run."""
    from actors.living import attach

    killed = 0
    while killed <= kills:
        time.sleep(0.2)
        coordinator = attach(name)
        if coordinator is None:
            continue
        view = ray.get(coordinator.view.remote(10**9))
        if view.state != "Running" or len(view.workers) < 2:
            continue
        if killed < kills:
            victim = max(view.workers, key=lambda worker: int(worker.removeprefix("w")))
            os.kill(Counters(segment(view.token, victim), create=False)["pid"], signal.SIGKILL)
            while len(ray.get(coordinator.view.remote(10**9)).workers) == 2:
                time.sleep(0.1)
        else:
            ray.get(coordinator.stop.remote("measured"))
        killed += 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.way:
        print(json.dumps(measure(options.way, options.kills)))
        return
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.starts",
            "--way",
            way,
            "--kills",
            str(options.kills),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        print(
            way,
            done.stdout.strip().splitlines()[-1]
            if done.returncode == 0
            else done.stdout[-2000:] + done.stderr[-2000:],
            flush=True,
        )


if __name__ == "__main__":
    main()
