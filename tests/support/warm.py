"""Makes processes by ``fork`` from one that has imported torch and the platform's code, for tests whose
subject is not an import.

Importing takes a worker of Ray five seconds of a core, and the tests start hundreds.  :class:`Warm` imports
once.  Then ``python warm.py <arguments of python>`` is a small process that asks for a fork, waits for it,
and ends as it did.  A raylet whose ``setup_worker.py`` is this file has its workers made so.  What the fork
does is Ray's own program of a worker, with its own environment, folder and output; Ray knows it by its own
pid.  It is in the namespaces of the small process, and is told of signals that this one gets.  ``python
warm.py node start …`` is ``ray start …`` with workers made so, and without the agent that takes submitted
jobs.  ``tests/actors/test_submit.py`` has nodes and workers as users have them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # whoever asks for a process must start fast
    from collections.abc import Callable
    from selectors import BaseSelector, SelectorKey

SOCKET = "PROCESSES_OF_TESTS"
"""The environment variable with the path of the socket on which forks are asked for."""
MODULES = (
    *(
        "torch",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch._inductor.config",
        "torch._dynamo",
        "numpy",
    ),
    *(
        "pyarrow.parquet",
        "pydantic.main",
        "blake3",
        "google.protobuf",
        "jsonschema",
        "msgpack",
        "psutil",
        "requests",
        "yaml",
    ),
    *(
        "elastic.runs.run",
        "elastic.train.heal",
        "elastic.train.loop",
        "elastic.train.session",
        "tests.support.toys",
        "s3fs",
    ),
)
"""The modules that workers import, without those of Ray, which reads the environment of its process while it
is imported.
"""
WORKER = "default_worker.py"
"""Ray's program of a worker, which ``setup_worker.py`` starts."""
CONTEXT = "--serialized-runtime-env-context"
STANDS_FOR = "for "
"""The name, by ``/proc/<pid>/comm``, of a small process whose fork runs: this, and the pid of the fork."""
NAMESPACES = {"mnt": 0x20000, "net": 0x40000000, "time": 0x80}
"""The flags of Linux for the namespaces of which a fork enters those of the process that asked."""
LIMIT = 1 << 20
"""The bytes of the longest request: a command line and an environment."""


class Warm:
    """The process from which others are forked.  A context manager; the forks that still run at its end are
    killed.
    """

    def __init__(self, folder: str | os.PathLike[str], *more: str, **environment: str) -> None:
        """Begins the process with this ``environment`` beside ours; it imports ``more`` modules, too."""
        import subprocess

        self.program, self.path = __file__, os.path.join(folder, "socket")
        root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
        # a long line: titles of the forks must have room in it
        command = [sys.executable, __file__, "serve", self.path, *MODULES, *more]
        has = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("RAY_") and name != "PYTHONPATH"
        }
        has |= {"PYTHONPATH": root} | environment
        self.process = subprocess.Popen(command, env=has, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *error: object) -> None:
        with self.process:  # the end of its input ends it
            pass


def enter(command: list[str]) -> None:
    """Enters the runtime environment of a worker as Ray's ``setup_worker.py`` does: its variables, its folder
    and its own Python.

    Then this program runs there again.  Without such an environment, there is nothing to do.
    """
    import shlex

    for number, word in enumerate(command):
        option, _, text = word.partition("=")
        context = json.loads(text) if option == CONTEXT else {}
        if prefix := context.get("command_prefix"):
            os.environ.update(
                {name: os.path.expandvars(value) for name, value in context["env_vars"].items()}
            )
            again = shlex.join(
                [context["py_executable"], __file__, *command[:number], *command[number + 1 :]]
            )
            os.execvp("bash", ["bash", "-c", " ".join([*prefix, "exec", again])])


def ask(path: str, command: list[str]) -> NoReturn:
    """Asks the process at ``path`` for a fork that does ``command``, and ends as the fork ends."""
    enter(command)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        here = {
            "folder": os.getcwd(),
            "searched": sys.path[1:],
            "python": sys.executable,
            "group": os.getpgrp(),
        }
        request = json.dumps({"command": command, "environment": dict(os.environ), **here}).encode()
        socket.send_fds(server, [request], [0, 1, 2])
        if pid := int(server.recv(64) or 0):
            with open("/proc/self/comm", "w") as name:
                name.write(f"{STANDS_FOR}{pid}")
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, lambda number, _: _tell(pid, number))
        try:
            # nothing comes if the server was killed, and its forks with it
            status = int(server.recv(64) or signal.SIGKILL)
        except ConnectionResetError:
            status = int(signal.SIGKILL)
    if os.WIFSIGNALED(status):
        with contextlib.suppress(OSError):  # nobody can set what SIGKILL does
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _tell(pid: int, number: int) -> None:
    """Sends a signal to the fork, and to what it has started, as a terminal would."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:  # it leads no group yet, or it has ended
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def serve(path: str, modules: list[str]) -> None:
    """Imports, says that it is ready, and makes processes until the end of its standard input."""
    import gc
    import importlib
    import selectors

    for name in modules:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.collect()
    gc.freeze()  # collections in forks need not look at what is here, and do not copy it
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as waits,
    ):
        listener.bind(path)
        listener.listen(128)
        waits.register(listener, selectors.EVENT_READ)
        waits.register(0, selectors.EVENT_READ)
        print("ready", flush=True)
        while True:
            for key, _ in waits.select():
                if key.fileobj == 0:
                    return
                if key.data is None:
                    _make(listener, waits)
                # else its process ended, and who asked for it has gone, at the same time
                elif key.fd in waits.get_map():
                    _end(key, waits)


def _make(listener: socket.socket, waits: BaseSelector) -> None:
    """Makes the process that is asked for.  The server then waits for its end, and for that of the process
    that asked.
    """
    import selectors

    asks, _ = listener.accept()
    message, files, _, _ = socket.recv_fds(asks, LIMIT, 3)
    if not message:
        asks.close()
        return
    asker, _, _ = struct.unpack("3i", asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if not (pid := os.fork()):
        waits.close()
        listener.close()
        asks.close()
        _become(files, asker, **json.loads(message))
    for each in files:
        os.close(each)
    process = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        asks.send(str(pid).encode())
    for each in (process, asks):
        waits.register(each, selectors.EVENT_READ, (pid, process, asks))


def _end(key: SelectorKey, waits: BaseSelector) -> None:
    """Says how a process ended.  It is killed if the process that asked for it has gone."""
    pid, process, asks = key.data
    if key.fileobj is asks:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        asks.send(str(status).encode())
    for each in (process, asks):
        waits.unregister(each)
    os.close(process)
    asks.close()


def _become(
    files: list[int],
    asker: int,
    command: list[str],
    environment: dict[str, str],
    folder: str,
    searched: list[str],
    python: str,
    group: int,
) -> NoReturn:
    """Runs what ``python`` or, for a worker, ``python setup_worker.py`` runs with these arguments."""
    import atexit
    import threading
    import traceback

    code: Any = 0
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number, each in enumerate(files):
            os.dup2(each, number)
            os.close(each)
        os.environ.clear()
        os.environ.update(environment)
        _enter_namespaces(asker)
        os.chdir(folder)
        sys.path[:], sys.executable = searched, python
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ImportError):  # Python imports it when it starts
            import sitecustomize  # noqa: F401
        sys.stdout.reconfigure(line_buffering="PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
        if any(word.endswith(WORKER) for word in command):
            _enter_group(group)
            _ray(command)
        else:
            _enter_group(0)
            _python(command)
        threading._shutdown()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _enter_namespaces(asker: int) -> None:
    """Enters the namespaces of ``asker`` that are others than ours: a node of the tests may have a disk or a
    network of its own.
    """
    import ctypes

    other = [
        flag
        for name, flag in NAMESPACES.items()
        if not os.path.samefile(f"/proc/self/ns/{name}", f"/proc/{asker}/ns/{name}")
    ]
    if other and ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(asker), sum(other)):
        raise OSError(ctypes.get_errno(), "the namespaces of the process that asked cannot be entered")


def _enter_group(group: int) -> None:
    """Enters a group of processes; 0: one of its own, as the foreground of a terminal.

    A worker is in the group of its raylet: of a worker that is in another one, the raylet kills the whole
    group in the end, and the tests with it.
    """
    try:
        os.setpgid(0, group)
    except OSError:  # it is of another session
        os.setpgid(0, 0)


def _ray(command: list[str]) -> None:
    """Prepares the process as Ray's ``setup_worker.py`` does, and runs its program of a worker."""
    # Ray reads the environment while it is imported
    from ray._private.runtime_env.context import RuntimeEnvContext, update_envs
    from ray._private.workers.setup_worker import parser

    asked, rest = parser.parse_known_args(command)
    update_envs(RuntimeEnvContext.deserialize(asked.serialized_runtime_env_context or "{}").env_vars)
    _python(rest)


def _python(command: list[str]) -> None:
    """Runs a module, a program as text, or a script, as ``python`` does; workers of a cluster that it starts
    are forks, too.
    """
    import runpy

    if "train" in command:
        import ray

        ray._private.ray_constants.SETUP_WORKER_FILENAME = __file__
        lean()
    match command:
        case ["-m", module, *_]:
            sys.argv, sys.path[:0] = command[1:], [""]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", text, *rest]:
            sys.argv, sys.path[:0] = ["-c", *rest], [""]
            exec(compile(text, "<string>", "exec"), {"__name__": "__main__"})
        case [script, *_]:
            sys.argv, sys.path[:0] = command, [os.path.dirname(script)]
            runpy.run_path(script, run_name="__main__")


def lean(replace: Callable[[object, str, Any], None] = setattr, *, scaler: bool = False) -> None:
    """Lets nodes that this process starts have no agent, dashboard, reader of logs or, without ``scaler``,
    autoscaler: each computes a second and more, and hardly any run needs them."""
    from ray import _raylet
    from ray._private import node, services

    start, agent = services.start_ray_process, "--dashboard_agent_command="
    ports = (
        _raylet.METRICS_AGENT_PORT_NAME,
        _raylet.METRICS_EXPORT_PORT_NAME,
        _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    )

    def start_lean(command: list[str], *arguments: Any, **options: Any) -> Any:
        # of a raylet, which waits for an agent and its ports
        if any(word.startswith(agent) for word in command):
            of = dict(word.split("=", 1) for word in command if "=" in word)
            for port in ports:
                _raylet.persist_port(of["--session_dir"], of["--node_id"], port, -1)
            command = [word for word in command if not word.startswith(agent)] + [
                f'{agent}sh -c "exec tail --pid=$PPID -f /dev/null"'
            ]
        return start(command, *arguments, **options)

    replace(services, "start_ray_process", start_lean)
    replace(services, "start_api_server", lambda *_, **__: (None, None))
    for part in ("start_log_monitor", *(() if scaler else ("start_monitor",))):
        replace(node.Node, part, lambda *_: None)


def node(words: list[str]) -> None:
    """Runs ``ray <words>``; the workers of this node are forks of the process that is named, or of one that
    lives below this one.
    """
    import runpy
    import tempfile

    import ray

    ray._private.ray_constants.SETUP_WORKER_FILENAME = __file__
    sys.argv, sys.path[0] = ["ray", *words], ""
    if "--include-dashboard=true" not in words:
        lean(scaler=any(word.startswith("--autoscaling-config=") for word in words))
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, contextlib.ExitStack() as stack:
        if SOCKET not in os.environ:
            os.environ[SOCKET] = stack.enter_context(Warm(folder)).path
        runpy.run_module("ray.scripts.scripts", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    elif sys.argv[1] == "node":
        node(sys.argv[2:])
    else:
        ask(os.environ[SOCKET], sys.argv[1:])
