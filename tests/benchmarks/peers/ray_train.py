"""Ray Train elastic (Ray 2.60, ``ScalingConfig(num_workers=(1, 2))``), gloo, DDP, on the same Ray cluster as
ours.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from tests.benchmarks.peers import toy
from tests.benchmarks.peers.nodes import Nodes, kill
from tests.benchmarks.peers.toy import Mark, StepLog
from tests.support.toys import Sums

TUNED = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # default 2
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",  # default 60
}
RESIZE_S = 1.0  # default 60


def train_loop(config: dict[str, Any]) -> None:
    """The loop follows Ray's guide: prepare, restore, step, report a checkpoint."""
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    log = StepLog(config["folder"], rank, ray.get_runtime_context().get_node_id())
    size: toy.Size = config.get("size", toy.Size())
    epoch = time.time_ns() // 1_000_000
    log.write("joined", 0, epoch, world)
    torch.set_num_threads(1)
    model = ray.train.torch.prepare_model(toy.model(size.layers))
    optimizer, data, step = toy.optimizer(model), Sums(read_s=size.read_s), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        inner(model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < size.steps:
        step += 1
        log.write("begin", step, epoch, world)
        optimizer.zero_grad()
        mine = range(rank, size.microbatches, world)
        for microbatch in mine:
            last = microbatch == mine[-1] or world == 1
            with nullcontext() if last else model.no_sync():
                toy.loss(model, data, step, microbatch, size.microbatches).backward()
        optimizer.step()
        if rank == 0:
            log.write("commit", step, epoch, world)
        if step % size.save_every == 0:
            save(model, optimizer, step, rank)


def inner(model: torch.nn.Module) -> torch.nn.Module:
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            state = {"model": inner(model).state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)


def trainer(storage: Path, most: int, config: dict[str, Any]) -> TorchTrainer:
    """Returns a trainer of 1 to ``most`` workers that restarts as often as it must."""
    return TorchTrainer(
        train_loop,
        train_loop_config=config,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=(1, most), elastic_resize_monitor_interval_s=RESIZE_S),
        run_config=RunConfig(
            name="recovery",
            storage_path=str(storage),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=-1),
        ),
    )


class RayTrain:
    settings = (
        f"{TUNED}, elastic_resize_monitor_interval_s = {RESIZE_S:g}, a checkpoint every {toy.SAVE_EVERY} "
        "steps"
    )

    def __init__(self, folder: Path) -> None:
        os.environ.update(TUNED)
        self.folder = folder / "steps"
        self.folder.mkdir()
        self.nodes = Nodes()
        self.trainer = trainer(folder / "storage", toy.WORKERS, {"folder": str(self.folder)})

    def start(self) -> None:
        for _ in range(toy.WORKERS):
            self.nodes.add()
        threading.Thread(target=self.trainer.fit, daemon=True).start()

    def marks(self) -> Sequence[Mark]:
        return toy.read_marks(self.folder)

    def last(self, rank: int) -> Mark:
        """Returns the last mark that the present worker of that rank wrote."""
        return [mark for mark in self.marks() if mark.rank == rank][-1]

    def kill_process(self) -> None:
        kill(self.last(toy.WORKERS - 1).pid)

    def kill_node(self) -> None:
        self.nodes.kill(self.last(toy.WORKERS - 1).node)

    def give_notice(self, lead_s: float) -> Callable[[], None]:
        victim = self.last(toy.WORKERS - 1).node
        self.nodes.drain(victim, lead_s)
        return lambda: self.nodes.kill(victim)

    def add_node(self) -> None:
        self.nodes.add()

    def phases(self, killed_at: float) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.nodes.close()
