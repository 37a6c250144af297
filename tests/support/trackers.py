"""Rows for trackers, and what trackers have, each read with its own reader or messages and nothing of ours."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic.report.metrics import Row
from elastic.sinks.port import TrackedRun, make_sink
from storage.objects import ObjectStore

History = dict[str, list[tuple[int, float]]]
"""Pairs of step and value of each number, by its name, in the order in which the tracker has them."""


def tensorboard_has(folder: Path) -> tuple[History, dict[int, str]]:
    """Returns the numbers, and the texts by step, that TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, TENSORS: 0}, purge_orphaned_data=False)
    found.Reload()
    numbers = {
        tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    texts = [each for tag in found.Tags()["tensors"] for each in found.Tensors(tag)]
    return numbers, {each.step: each.tensor_proto.string_val[0].decode() for each in texts}


def wandb_has(folder: Path) -> tuple[History, dict[int, str], set[str]]:
    """Returns the numbers, the texts by step, and the ids of the runs in all sessions of a folder, as ``wandb
    sync`` orders them.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    numbers, texts, ids = History(), dict[int, str](), set[str]()
    for file in sorted(folder.glob("*/wandb/offline-run-*/*.wandb")):
        for data in _logged(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            values = {
                item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item
            }
            for name, value in values.items():
                if isinstance(value, str):
                    texts[values["_step"]] = value
                elif not name.startswith("_"):
                    numbers.setdefault(name, []).append((values["_step"], value))
    return numbers, texts, ids


def _logged(file: bytes) -> Iterator[bytes]:
    """Yields the records of a log of LevelDB, of which W&B makes its files: blocks of 32 KiB after 7 bytes
    that name the format.
    """
    at, parts = 7, b""
    while at + 7 <= len(file):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", file, at)
        parts, at = parts + file[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def mlflow_has(uri: str, experiment: str = "elastic") -> tuple[History, dict[int, str], int]:
    """Returns the numbers and the texts by step of the oldest run of an experiment, and how many runs it has."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs(
        [client.get_experiment_by_name(experiment).experiment_id], order_by=["attributes.start_time ASC"]
    )
    data, run = runs[0].data, runs[0].info.run_id
    numbers = {
        name: [(each.step, each.value) for each in client.get_metric_history(run, name)]
        for name in data.metrics
    }
    return (
        numbers,
        {int(key[6:]): text for key, text in data.tags.items() if key.startswith("event.")},
        len(runs),
    )


STEPS, BATCH = 60, 4
"""Number of steps, and of those that a tracker gets at a time."""


def row(step: int) -> Row:
    """Returns the row of a step.  Some numbers are not in every row, and one is not finite."""
    event = {"event": f"w{step} was lost"} if step % 25 == 0 else {}
    validated = {"validation_loss": 1 / 3 + step} if step % 10 == 0 else {}
    loss = math.nan if step == 7 else 1 / step
    return {
        "step": step,
        "generation": 1 + step // 25,
        "time": 1e9 + step,
        "loss": loss,
        "skipped": int(step == 7),
        **validated,
        **event,
    }


def tracked(folder: Path) -> TrackedRun:
    return TrackedRun("toy", {"steps": STEPS, "optim.lr": 0.1}, ObjectStore.open(str(folder / "runs")))


def hand_on(folder: str, name: str, args: dict[str, Any]) -> None:
    """Hands the rows on as a coordinator does, and says when some are written; the process that does so is
    killed.
    """
    sink = make_sink(tracked(Path(folder)), name, args)
    while (last := sink.last()) < STEPS:
        sink.write([row(step) for step in range(last + 1, min(last + BATCH, STEPS) + 1)])
        print("written", flush=True)


def mlflow_in_files(run: TrackedRun, uri: str) -> Any:
    """Returns our sink for MLflow, in a process that MLflow allows to use files."""
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return make_sink(run, "mlflow", {"uri": uri})
