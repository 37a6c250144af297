"""TensorBoard: event files, by default in the run's bucket.

    <run>/tensorboard/<run>/events.out.tfevents.000000000051

An event file has the rows of some steps, and its name has the first step.  A file is created whole and never
again, as every object is, so each step is there exactly once, whichever process dies at whatever moment, and
even if two coordinators write at the same time. TensorBoard reads all files of a folder in the order of their
names as one run: ``tensorboard --logdir <bucket>/<run>/tensorboard``, also in object stores that fsspec
knows.

torch's ``SummaryWriter`` is not used: it appends to a local file, where a death leaves half a record, and
which a restart on another machine does not have.  Only TensorBoard's own protocol buffers and framing of
records are used here.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from elastic.report.metrics import Row
from elastic.sinks.port import EVENT, TrackedRun, shown
from storage.objects import ObjectStore

PREFIX = "events.out.tfevents."
"""TensorBoard takes a file for one of events if this is in its name."""


class Tracker:
    """Writes an event file for the rows of each call into ``folder``, a folder or a URL; without one, into
    the run's bucket.
    """

    def __init__(self, run: TrackedRun, folder: str = "") -> None:
        self._store, self._folder = (
            (ObjectStore.open(folder), "") if folder else (run.store, f"{run.name}/tensorboard/")
        )
        self._folder += run.title
        self._last = 0
        """The last step that this process has written: its file may be too new to be listed."""

    def last(self) -> int:
        if self._last:
            return self._last
        files = self._store.list(f"{self._folder}/{PREFIX}")
        return max((event.step for event in _events(self._store.get(files[-1]))), default=0) if files else 0

    def write(self, rows: Sequence[Row]) -> None:
        file = io.BytesIO()
        writer = RecordWriter(file)
        writer.write(Event(wall_time=rows[0]["time"], file_version="brain.Event:2").SerializeToString())
        for row in rows:
            writer.write(
                Event(wall_time=row["time"], step=int(row["step"]), summary=_summary(row)).SerializeToString()
            )
        self._store.put_if_absent(f"{self._folder}/{PREFIX}{int(rows[0]['step']):012d}", file.getvalue())
        self._last = int(rows[-1]["step"])


def _summary(row: Row) -> Summary:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in shown(row).items()]
    if EVENT in row:
        text = TensorProto(dtype=DT_STRING, string_val=[row[EVENT].encode()])
        values.append(Summary.Value(tag=EVENT, metadata=create_summary_metadata(EVENT, ""), tensor=text))
    return Summary(value=values)


def _events(file: bytes) -> Iterator[Event]:
    """Yields the events of a file.  A record is its length (8 bytes), a checksum (4), the event, and a
    checksum (4).
    """
    at = 0
    while at < len(file):
        (size,) = struct.unpack_from("<Q", file, at)
        yield Event.FromString(file[at + 12 : at + 12 + size])
        at += 16 + size
