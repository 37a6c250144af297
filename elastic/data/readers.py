"""Lets other processes read the samples of a worker, so that slow code of a dataset does not hold Python's
lock (GIL) in the process that trains.

A worker has ``data.readers`` such processes.  Each is a new program that opens the dataset by itself
(``reader_process.py``): nothing is forked, and no main module is imported again.  A reader gets ids and gives
tensors over a socket.  Only the worker and the reader hold its ends, so the reader ends with its worker,
however the worker ends.  Tensors travel as their bytes: that needs no shared memory, of which containers have
little, and no open file for each tensor.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from elastic.code.imports import Elsewhere
from elastic.errors import DataError

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from elastic.data.reader_process import serve
serve(int(sys.argv[2]))
"""
TRIES = 2
"""Number of readers that may die of the same samples: the first one may have been killed because of other
processes.
"""


class Readers:
    """The processes that read for one loader.  Up to ``count`` threads may read at a time, and a process
    starts when a thread needs it.
    """

    def __init__(self, count: int, dataset: str, args: Mapping[str, Any], section: str) -> None:
        """``section`` is the name of the section that has the settings of the dataset, for errors."""
        self.count, self._named = count, f"{section}.dataset = {dataset!r}"
        self._begins = (
            dataset,
            dict(args),
            section,
            torch.get_num_threads(),
            torch.get_deterministic_debug_mode(),
        )
        self._all: list[_ReaderProcess] = []
        self._idle: list[_ReaderProcess] = []
        self._closed, self._lock = False, threading.Lock()

    def read(self, ids: tuple[int, ...]) -> dict[str, Any]:
        """Returns the samples.  Raises what the dataset raises, and :class:`DataError` if two processes die
        of them.
        """
        for _ in range(TRIES):
            reader, how = self._taken(), ""
            try:
                return reader.read(ids)
            except (EOFError, OSError):
                how = reader.end()
                if not self._closed:
                    print(f"{self._named}: a reader {how} while it read samples {[*ids]}", flush=True)
            finally:
                if not how:
                    self._idle.append(reader)
        raise DataError(
            f"{self._named}: samples {[*ids]} cannot be read: {TRIES} reader processes died while they "
            f"read them (the last one {how}); read these samples by themselves to see why, or lower "
            f"data.readers = {self.count} if the node has too little memory"
        )

    def close(self) -> None:
        """Ends the processes, also those that are reading."""
        with self._lock:
            self._closed = True
        for reader in self._all:
            reader.end(kill=True)

    def _taken(self) -> _ReaderProcess:
        with self._lock:
            if self._closed:
                raise DataError(f"{self._named}: its readers are closed")
            if self._idle:
                return self._idle.pop()
            self._all.append(reader := _ReaderProcess(self._begins))
            return reader


class _ReaderProcess:
    """One reader process.  It is in a session of its own, so that Ctrl-C in a terminal ends only the worker,
    and the worker ends the reader.
    """

    def __init__(self, begins: tuple[Any, ...]) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-c", PROGRAM, json.dumps(sys.path), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
        with suppress(OSError):  # it has died, and the first read says so
            self._connection.send(begins)

    def read(self, ids: tuple[int, ...]) -> dict[str, Any]:
        """Returns the samples, or raises what reading them raised.  Raises :class:`EOFError` or
        :class:`OSError` if the process died.
        """
        self._connection.send(ids)
        error, trace, tensors = self._connection.recv()
        if error is not None:
            raise error from (Elsewhere(trace) if trace else None)
        return {name: _received(self._connection, dtype, shape) for name, dtype, shape in tensors}

    def end(self, *, kill: bool = False) -> str:
        """Waits until the process has ended, and returns how it ended, in words.  With ``kill`` it is killed
        first.
        """
        if kill:
            self._process.kill()
        else:
            self._connection.close()
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def send(connection: Connection, batch: Mapping[str, torch.Tensor]) -> None:
    """Sends ``batch`` to the worker, where :meth:`_ReaderProcess.read` returns it."""
    parts = {name: value.detach().cpu().contiguous() for name, value in batch.items()}
    flat = [value.flatten().view(torch.uint8).numpy().data for value in parts.values()]
    connection.send((None, "", [(name, value.dtype, tuple(value.shape)) for name, value in parts.items()]))
    for each in flat:
        connection.send_bytes(each)


def _received(connection: Connection, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    value = torch.empty(shape, dtype=dtype)
    connection.recv_bytes_into(value.flatten().view(torch.uint8).numpy())
    return value
