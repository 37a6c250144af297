"""The program of a reader process, which reads samples for a worker (``readers.py``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from elastic.code.imports import arguments, failure, load, users_traceback
from elastic.data.apart import apart, seed_of
from elastic.data.loader import Dataset, batch_of
from elastic.data.readers import send
from elastic.data.rows import dataset_of
from elastic.errors import DataError, ElasticError
from storage.errors import Unavailable


def serve(descriptor: int) -> None:
    """Opens the dataset, and then reads the samples that the worker asks for.  Generators of random numbers
    are seeded by the sample ids, as in a read by the worker itself.
    """
    connection, asked = Connection(descriptor), SimpleQueue[Any]()
    Thread(target=_listen, args=(connection, asked), daemon=True).start()
    code, args, section, threads, deterministic = asked.get()
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(deterministic)
    named, dataset = f"{section}.dataset = {code!r}", None
    while True:
        ids = asked.get()
        try:
            if dataset is None:
                dataset = _opened(code, args, section, named)
            with apart(seed_of(ids)):
                send(connection, batch_of(dataset, ids, named))
        except (ElasticError, Unavailable) as error:
            cause = error.__cause__
            connection.send((error, users_traceback(cause, or_ours=False) if cause is not None else "", []))


def _opened(code: str, args: Mapping[str, Any], section: str, named: str) -> Dataset:
    try:
        return dataset_of(load(code, f"{section}.dataset"), arguments(f"{section}.args", args), named)
    except (ElasticError, Unavailable):
        raise
    except Exception as error:  # the user's class may raise anything, also where the worker has opened it
        raise DataError(
            f"{named} cannot be opened by a reader, as data.readers asks: {failure(error)}"
        ) from error


def _listen(connection: Connection, asked: SimpleQueue[Any]) -> None:
    """Hands on what the worker asks for, and ends this process when the worker has ended, also in the middle
    of a read.
    """
    with suppress(EOFError, OSError):
        while True:
            asked.put(connection.recv())
    os._exit(0)
