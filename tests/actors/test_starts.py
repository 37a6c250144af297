"""R19: a command that has to ask a cluster: beside its run on another machine, at a head that is frozen, and
at what is no head.

The cluster is begun by ``ray start``.  Its head is at 127.0.0.2, from which no process of this machine
connects: so it is elsewhere, as far as addresses tell, and this machine is a node of its cluster.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors import cluster, heads
from actors.cli import main
from actors.launch import launch
from elastic.errors import ClusterGone, PlatformGaveUp
from elastic.job import Job
from elastic.report.story import Line
from elastic.runs.run import Run
from storage.objects.folder import Folder
from tests.actors.test_one_owner import command, slow_job, stopped, until_it_says
from tests.support.clusters import TUNED, Nodes
from tests.support.patience import PATIENCE_S
from tests.support.processes import processes
from tests.support.warm import SOCKET, Warm


@pytest.fixture(scope="module", autouse=True)
def local_cluster(no_cluster_is_left: None, forks: Warm) -> Iterator[None]:
    """Replaces the cluster of the other modules: this process is part of none, as a command is when it
    begins.
    """
    ray.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv(SOCKET, forks.path)  # of commands
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def nodes(local_cluster: None, forks: Warm) -> Iterator[Nodes]:
    with Nodes(Path(sys.executable), head_cpus=2, head_ip="127.0.0.2", forks=forks, jobs=False) as nodes:
        yield nodes


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join("".join(capsys.readouterr()).split())


class Begins(Exception):
    """A cluster is about to start on this machine."""


def begins(line: Line) -> None:
    """Ends a launch that is about to start a cluster."""
    if "a Ray cluster starts" in str(line):
        raise Begins(getattr(line, "text", ""))


class Attaches(Exception):
    """A command has found its run, and is about to follow it."""


def attaches(line: Line) -> None:
    """Ends a launch that has found its run."""
    if "attached to" in str(line):
        raise Attaches


def asked(monkeypatch: pytest.MonkeyPatch, command: Callable[[], object]) -> tuple[int, int]:
    """Returns how often ``command`` has asked a head, and how often it has listed the claims of a run.  Its
    process joins a cluster.
    """
    heard, listed, reply, every = list[str](), list[str](), heads._reply, Folder.list

    def heads_reply(address: str, *call: str, **request: str) -> Any:
        heard.append(address)
        return reply(address, *call, **request)

    def folder_list(store: Folder, prefix: str = "") -> list[str]:
        listed.extend([prefix] if prefix.endswith("/owner/") else [])
        return every(store, prefix)

    with monkeypatch.context() as patch:
        patch.setattr(heads, "_reply", heads_reply)
        patch.setattr(Folder, "list", folder_list)
        try:
            command()
        finally:
            ray.shutdown()
    return len(heard), len(listed)


@pytest.mark.full
def test_a_command_on_another_node_of_its_cluster_attaches_to_the_run(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no address.  It began a cluster of its own there, and the run a second time; the one that
    lived lost what it had not saved.

    It asks the head once, and reads once which claim is the newest: it asked three times and read three
    times. The control: for a run that does not live it begins one, and says which word would have it join
    that of its node.
    """
    path = slow_job(tmp_path, "beside")
    first = command(path, "train", "--address", nodes.address)
    second = None
    try:
        until_it_says(first, "step     3")
        second = command(path, "train")
        until_it_says(
            second,
            "attached to beside, which runs on this cluster already",
            never="a Ray cluster starts on this machine",
        )

        def train() -> None:
            with pytest.raises(Attaches):
                launch(Job.load(path), show=attaches)

        assert asked(monkeypatch, train) == (1, 1)
        assert asked(monkeypatch, lambda: main(["status", str(path), "--once"])) == (1, 1)
        stopped(path, first, second)
    finally:
        for each in filter(None, (first, second)):
            each.kill()
    assert Run.find(Job.load(path)).latest_claim() == 1, "one coordinator, ever"
    # where `ray start` was told to note the address
    monkeypatch.setenv("RAY_TMPDIR", str(nodes.started[0].folder))
    with pytest.raises(
        Begins,
        match=f"; --address auto uses the cluster at {nodes.address}, of which this machine is a node$",
    ):
        launch(Job.load(path), show=begins)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(Begins, match=r"a Ray cluster starts on this machine, in 5 to 20 s$"):
        launch(Job.load(path), show=begins)


@pytest.mark.full
def test_a_command_that_the_cluster_of_its_run_refuses_does_not_begin_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Warm
) -> None:
    """The cluster wants a token.  A command without one, or with another one, took the refusal for "no such
    run", and began it anew.

    One that wants a token and finds none was ended by Ray's own process.  The control: with the cluster's
    token it attaches.
    """
    refused = (
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 64},
        {"RAY_AUTH_MODE": "token"},
    )
    right, path = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}, slow_job(tmp_path, "guarded")
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray looks for a token

    def begun(environment: dict[str, str], *line: str) -> subprocess.Popen[str]:
        with pytest.MonkeyPatch.context() as patch:
            for name in right:
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            return command(path, *line)

    for name, value in right.items():
        monkeypatch.setitem(TUNED, name, value)
    with Nodes(Path(sys.executable), head_cpus=2, forks=forks, jobs=False) as nodes:
        commands = [begun(right, "train", "--address", nodes.address)]
        try:
            until_it_says(commands[0], "step     3")
            for environment, line in (*((each, "train") for each in refused), ({}, "status")):
                commands.append(begun(environment, line))
                until_it_says(
                    commands[-1],
                    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or",
                    never="a Ray cluster starts",
                )
                assert not commands[-1].communicate(timeout=PATIENCE_S)[0] and commands[-1].returncode == 1
            commands.append(begun(right, "train"))
            until_it_says(
                commands[-1],
                "attached to guarded, which runs on this cluster already",
                never="a Ray cluster starts",
            )
            begun(right, "stop").communicate(timeout=PATIENCE_S)
            for each in (commands[0], commands[-1]):
                assert each.communicate(timeout=PATIENCE_S) and each.returncode == 3
        finally:
            for each in commands:
                each.kill()
    assert Run.find(Job.load(path)).latest_claim() == 1, "one coordinator, ever"


@pytest.fixture
def frozen(nodes: Nodes) -> Iterator[str]:
    """Stops the process that is the head of the cluster, and lets it go on at the end."""
    (head,) = [
        each for each in processes(f"NODE_OF_TEST={nodes.folder}") if "gcs_server" in each.command.split()[0]
    ]
    os.kill(head.pid, signal.SIGSTOP)
    try:
        yield nodes.address
    finally:
        os.kill(head.pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "line",
    [
        "status",
        "stop",
        "logs",
        "attach",
        "clean",
        "train",
        "train --local",
        "train --address THERE",
        "train --address auto",
    ],
)
def test_a_head_that_is_frozen_is_told(
    nodes: Nodes,
    frozen: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
) -> None:
    """No command waits for it without a limit, none takes it for a cluster that has ended, and none begins
    the run anew.
    """
    monkeypatch.setattr(heads, "ANSWER_S", 1.0)
    monkeypatch.setenv("RAY_TMPDIR", str(nodes.started[0].folder))  # where Ray finds what "auto" means
    path = slow_job(tmp_path, "iced")
    Run.open(Job.load(path)).claim(frozen, uuid.uuid4().hex[:6])
    word, *more = line.replace("THERE", frozen).split()
    code = main([word, str(path), *more])
    told = said(capsys)
    assert code == 2, told
    assert (
        f"the head of the Ray cluster at {frozen} accepts connections, but has not answered for 1 s" in told
    )
    assert "restart that cluster, or train on another cluster" in told and not ray.is_initialized()


def test_the_head_answers_before_and_after(nodes: Nodes) -> None:
    """The control of the test above; and the name of no actor."""
    assert heads.answers(nodes.address) and not heads.has_actor(
        nodes.address, "iced/coordinator", cluster.NAMESPACE
    )


class Page(http.server.BaseHTTPRequestHandler):
    """A web page, as Ray's dashboard has."""

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_web_page_in_place_of_the_head(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Port 8265 in place of 6379.  The claim of a run whose cluster has ended, at whose port another program
    listens now, keeps nobody.
    """
    path = slow_job(tmp_path, "webbed")
    assert main(["train", str(path), "--address", page]) == 2
    told = said(capsys)
    assert (
        f"no Ray cluster answers at {page}, where another program listens (the head's port is usually 6379"
    ) in told
    Run.open(Job.load(path)).claim(page, "abcdef")
    assert not heads.has_actor(page, "webbed/coordinator", cluster.NAMESPACE)
    assert main(["status", str(path), "--once"]) == 0
    assert "is not running, or its cluster" in said(capsys)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8265", "ray://127.0.0.1:10001", "127.0.0.1", "127.0.0.1:port"]
)
@pytest.mark.parametrize("named", ["--address", "the environment variable RAY_ADDRESS"])
def test_what_is_no_address_of_a_head(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    named: str,
) -> None:
    path = str(slow_job(tmp_path, "nowhere"))
    if named != "--address":
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert main(["train", path, *(["--address", address] if named == "--address" else [])]) == 1
    assert f"{named} = '{address}' is not the address of a Ray cluster's head" in said(capsys)


def test_somebody_who_accepts_a_connection_and_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "ANSWER_S", 1.0)
    with socket.create_server(("", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(
            ClusterGone,
            match=(
                rf":{silent.getsockname()[1]} accepts connections, but has "
                r"not answered for 1 s"
            ),
        ):
            cluster.connect(address)
    assert not heads.answers(address), "the control: nobody is there any more"


def test_a_cluster_of_another_ray_says_which(nodes: Nodes) -> None:
    """The head keeps with which version it was begun; here it is told another one."""
    from ray._common.usage import usage_constants
    from ray._private import ray_constants
    from ray._raylet import GcsClient

    head, key, namespace = (
        GcsClient(address=nodes.address),
        usage_constants.CLUSTER_METADATA_KEY,
        ray_constants.KV_NAMESPACE_CLUSTER,
    )
    kept = head.internal_kv_get(key, namespace)
    other = kept.replace(ray.__version__.encode(), b"2.51.0")
    assert other != kept
    try:
        head.internal_kv_put(key, other, True, namespace)
        with pytest.raises(PlatformGaveUp, match=r"cannot be joined .*Version mismatch[^)]*Ray: 2\.51\.0"):
            cluster.connect(nodes.address)
    finally:
        ray.shutdown()
        head.internal_kv_put(key, kept, True, namespace)
