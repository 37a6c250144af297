"""One torchft replica group of one rank, started by torchrun: the loop of torchft's ``train_ddp.py`` with the
toy job.

The gradients are averaged by ``Manager.allreduce``, in one piece.  torchft 0.2.0's own
``DistributedDataParallel`` (``--ddp``) kills the survivor on gloo: when the all-reduce fails its hook finds
no future (``assert fut._fut``, ddp.py:76), and both replicas begin again.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from tests.benchmarks.peers import toy
from tests.benchmarks.peers.toy import StepLog
from tests.support.toys import Sums


def main() -> None:
    folder, replica = sys.argv[1], int(sys.argv[2])
    log, data = StepLog(folder, replica), Sums(read_s=toy.READ_S)
    torch.set_num_threads(1)

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        hostname="localhost",
    )
    ddp = "--ddp" in sys.argv
    model = DistributedDataParallel(manager, toy.model()) if ddp else toy.model()
    optimizer = Optimizer(manager, toy.optimizer(model))
    mine = range(replica, toy.MICROBATCHES, toy.WORKERS)
    while True:
        step = manager.current_step()
        log.write("begin", step + 1, 0, 0)
        optimizer.zero_grad()
        for microbatch in mine:
            with model.no_sync() if ddp and microbatch != mine[-1] else nullcontext():
                toy.loss(model, data, step, microbatch).backward()
        if not ddp:
            average(manager, model)
        optimizer.step()
        done = manager.current_step()  # a replica that was healed jumps
        log.write(
            "commit" if done > step else "dropped", done, manager._quorum_id + 1, manager.num_participants()
        )


def average(manager: Manager, model: torch.nn.Module) -> None:
    """Averages all gradients as one bucket, as DDP would at this size."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(bucket).wait()
    for gradient, part in zip(
        gradients, bucket.split([gradient.numel() for gradient in gradients]), strict=True
    ):
        gradient.copy_(part.view_as(gradient))


if __name__ == "__main__":
    main()
