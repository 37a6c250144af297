"""Starts a cluster as its users do: ``ray start`` for every node, each with folders of its own, and a job
server on the head.

A node's Python may have all that Elastic depends on, but not Elastic itself, which must come with what is
submitted.  Where that is not the subject, the workers of all nodes are forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.job_submission import JobSubmissionClient

from actors import cluster
from tests.support import warm
from tests.support.patience import PATIENCE_S
from tests.support.processes import Ended, Process, free_ports, frozen, kill_all, processes, wait_gone

MARK = "NODE_OF_TEST"
NICENESS = "RAY_worker_niceness"
TUNED = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # at Ray's 15 any two other busy processes of the machine leave actors a thirtieth of the time
    NICENESS: "0",
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    # a dead node refuses at once; one that is only slow, on a machine that is busy, is not dead
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
ACTORS = re.compile(r"ray::(Coordinator|Worker|Keeper)\b")
OURS = re.compile(r"elastic|actors|storage|__editable__.*")


def python_without_elastic(folder: Path) -> Path:
    """Makes a Python in ``folder`` that finds all packages installed for this one, except Elastic."""
    venv.create(folder, with_pip=False, symlinks=True)
    (there,) = folder.glob("lib/python*/site-packages")
    for here in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(here).iterdir():
            if not OURS.fullmatch(entry.name) and not entry.name.startswith("elastic_train"):
                (there / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    asked = subprocess.run(
        [python, "-c", "import ray, elastic"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert "No module named 'elastic'" in asked.stderr, asked
    return python


class Started:
    """One ``ray start --block``: the process above all processes of its node."""

    def __init__(
        self, folder: Path, python: Path, forks: warm.Warm | None, *arguments: str, **environment: str
    ) -> None:
        self.folder, self.output = folder, folder / "output"
        folder.mkdir()
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name != "PYTHONPATH"
        }
        # Ray's default is the same for all nodes of a machine, even of an earlier cluster
        (self.agent_port,) = free_ports(1)
        bin_first = f"{python.parent}{os.pathsep}{ours['PATH']}"
        places = [f"--temp-dir={folder}/ray", f"--dashboard-agent-listen-port={self.agent_port}"]
        program = ["-m", "ray.scripts.scripts"] if forks is None else [warm.__file__, "node"]
        asked = {} if forks is None else {warm.SOCKET: forks.path}
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [python, *program, "start", "--block", *places, *arguments],
                cwd=folder,
                env=ours
                | TUNED
                | {"PYTHONUNBUFFERED": "1", MARK: str(folder.parent), "PATH": bin_first}
                | asked
                | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )  # in the process group of the tests, so that a signal to the group ends the nodes too

    def says(self, pattern: str, deadline_s: float = PATIENCE_S) -> str:
        """Waits until its output matches.  Returns the first group of the match, or the whole match if there
        is no group.
        """
        end = time.monotonic() + deadline_s
        while not (found := re.search(pattern, text := self.output.read_text(errors="replace"))):
            assert self.process.poll() is None and time.monotonic() < end, text
            time.sleep(0.05)
        return found[1] if found.groups() else found[0]

    def has_an_agent(self, deadline_s: float = PATIENCE_S) -> None:
        """Waits for the process that takes submitted jobs, which comes a little later than the others."""
        end = time.monotonic() + deadline_s
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(
                    f"http://127.0.0.1:{self.agent_port}/api/local_raylet_healthz", timeout=5
                ),
            ):
                return
            assert time.monotonic() < end, self.output.read_text(errors="replace")
            time.sleep(0.05)


class Nodes:
    """The cluster.  By default the head has no CPU to give, so workers run on the nodes that are added.  A
    context manager.

    Its workers are forks of ``forks`` if that is given, and the head has a server that takes jobs only if
    ``jobs``.  ``head_ip`` is an address of this machine, such as 127.0.0.2, from which a process does not
    connect by itself: so the head is not on the machine of the process, as far as addresses tell.  ``scales``
    is Ray's configuration of an autoscaler, which the head then has, with ``environment``.
    """

    def __init__(
        self,
        python: Path,
        head_cpus: int = 0,
        head_ip: str = "",
        *,
        forks: warm.Warm | None = None,
        jobs: bool = True,
        scales: Mapping[str, Any] | None = None,
        **environment: str,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nodes-"))  # short, as paths of Unix sockets must be
        self.python, self.forks, self.started = python, forks, list[Started]()
        self.submitted = list[Submitted]()
        dashboard = (
            ("--include-dashboard=true", f"--dashboard-port={free_ports(1)[0]}")
            if jobs
            else ("--include-dashboard=false",)
        )
        place = (f"--node-ip-address={head_ip}",) if head_ip else ()
        more = [*place, *dashboard, f"--num-cpus={head_cpus}"]
        if scales is not None:
            (self.folder / "scales.json").write_text(json.dumps(scales))
            more.append(f"--autoscaling-config={self.folder}/scales.json")
        head = self._start("--head", "--port=0", *more, **environment)
        self.address = head.says(r"--address='([^']+)'")
        if jobs:
            self.jobs = head.says(r"RAY_API_SERVER_ADDRESS='([^']+)'")
            head.has_an_agent()

    def _start(self, *arguments: str, **environment: str) -> Started:
        # nobody prints the logs of actors
        lean = ("--object-store-memory=80000000", "--include-log-monitor=false")
        self.started.append(
            Started(
                self.folder / str(len(self.started)),
                self.python,
                self.forks,
                *lean,
                *arguments,
                **environment,
            )
        )
        return self.started[-1]

    def add(self, cpus: int = 1, *more: str, **environment: str) -> Started:
        """Starts a node; ``says("Ray runtime started")`` waits for it."""
        return self._start(f"--address={self.address}", f"--num-cpus={cpus}", *more, **environment)

    def submit(self, folder: Path, command: list[str]) -> Submitted:
        """Submits ``command``, a whole line ``ray job submit …``, as a user types it in ``folder``."""
        self.submitted.append(Submitted(folder, self.jobs, command))
        return self.submitted[-1]

    def kill_everything(self) -> list[Ended]:
        """Kills every process of every node by SIGKILL, frozen first so that none sees another die.  Returns
        how each ended.
        """
        watched = [each for node in self.started for each in frozen(node.process.pid)]
        kill_all(watched)
        ends = wait_gone(watched, PATIENCE_S)
        assert not (left := processes(f"{MARK}={self.folder}")), left
        return ends

    def ours(self) -> list[Process]:
        """Returns the processes of runs that live on these nodes."""
        return [process for process in processes(f"{MARK}={self.folder}") if ACTORS.search(process.command)]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the cluster by force: nothing of it is kept, and in good order it takes seconds to end.

        A process with a title has no mark any more: an agent whose node was killed before it goes on, and
        computes, for a minute.
        """
        kill_all([each for node in self.started for each in frozen(node.process.pid)])
        for submitted in self.submitted:
            submitted.process.kill()
            submitted.process.wait(PATIENCE_S)
        while left := processes(f"{MARK}={self.folder}"):
            for each in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            for node in self.started:
                node.process.poll()
            time.sleep(0.05)
        for node in self.started:
            # ``processes`` has no zombies; a zombie that nobody waits for is blamed on another test
            node.process.wait(PATIENCE_S)
        shutil.rmtree(self.folder, ignore_errors=True)


INSTALLED_S = 3 * PATIENCE_S
"""The patience where Ray makes an environment with pip on each node first: 27 s on two idle cores, 4 minutes
beside four others.
"""


class Submitted:
    """A ``ray job submit`` that is followed to its end, and what can be asked of the job meanwhile."""

    def __init__(self, folder: Path, jobs: str, command: list[str]) -> None:
        self.jobs = jobs
        self.output = folder.parent / f"{folder.name}-output-{time.time_ns()}"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.environment["RAY_API_SERVER_ADDRESS"] = jobs
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def id(self) -> str:
        return re.findall(r"Job '(\w+)' submitted", self.text)[0]

    def stop(self) -> None:
        """Stops the job by ``ray job stop`` (SIGTERM to the driver, SIGKILL 3 s later).  Returns when Ray
        calls the job stopped.
        """
        jobs = JobSubmissionClient(self.jobs)
        jobs.stop_job(self.id)
        self.until(lambda: jobs.get_job_status(self.id).is_terminal(), ended=True)

    @property
    def log(self) -> str:
        """The text that the job has printed, as Ray keeps it."""
        return JobSubmissionClient(self.jobs).get_job_logs(self.id)

    def ray(self, *arguments: str) -> str:
        """Runs ``ray job …``, as in another terminal."""
        done = subprocess.run(
            ["ray", "job", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout + done.stderr

    def until(self, true: Callable[[], Any], deadline_s: float = INSTALLED_S, ended: bool = False) -> None:
        """Waits until ``true()``, while the job runs or, with ``ended``, also after its end."""
        end = time.monotonic() + deadline_s
        while not true():
            assert ended or self.process.poll() is None, (
                f"the command ended with code {self.process.returncode} before what the test waits for had "
                f"happened:\n{self.text}"
            )
            assert time.monotonic() < end, (
                f"what the test waits for did not happen within {deadline_s:g} s:\n{self.text}"
            )
            time.sleep(0.02)

    def wait(self, deadline_s: float = INSTALLED_S) -> int:
        """Returns its exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {deadline_s} s:\n{self.text}") from None


def assert_all_given_back(nodes: Nodes, name: str, deadline_s: float = 100) -> None:
    """Checks that no actor, process or placement group of the run is left and every CPU is free, before
    workers would have left by themselves.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        named = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == cluster.NAMESPACE
        ]
        free, total = ray.available_resources().get("CPU", 0), ray.cluster_resources().get("CPU", 0)
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        segments = list(Path("/dev/shm").glob(f"elastic-{name}-*"))
        left = (named, nodes.ours(), groups, segments, total - free)
        if not any(left):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
