"""Two nodes with a slow link between them: network namespaces, a pair of devices (veth) and a limit on each
(``tc``, tbf).

Each node has ``each`` workers, which are processes with a real world over gloo; inside a node they talk over
its loopback device.  Run as a program, this module is one worker.  Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT
from tests.support.patience import PATIENCE_S

DEVICE, PORT = "slow", 29411
WARM, TIMED = 1, 3


class NoLink(Exception):
    """This machine makes no namespaces, no veth devices, or no limits on them."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise NoLink(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def link(rate: str) -> Iterator[list[str]]:
    """Yields the namespaces of two nodes; each sends to the other at ``rate`` at most, in the words of
    ``tc``.
    """
    names = [f"slow{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            DEVICE,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            DEVICE,
            "netns",
            names[1],
        )
        for number, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.9.9.{number + 1}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            limit = ("rate", rate, "burst", "256kb", "latency", "200ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)
        yield names
    except FileNotFoundError as error:
        raise NoLink(str(error)) from error
    finally:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(
                    ["ip", "netns", "del", name], check=False, capture_output=True, timeout=PATIENCE_S
                )


@dataclass(frozen=True)
class Measured:
    """The result of one training over the link."""

    step_s: float
    """Median time of a step."""
    out_bytes: float
    """Bytes that the kernel sent out of a node in a step, the mean of both nodes, headers and
    acknowledgements included.
    """
    parameters: int
    hash: str
    """The hash of world rank 0's shard at the end."""


def train(
    folder: Path, block: int, *, each: int, rate: str, model: dict[str, Any], microbatches: int
) -> Measured:
    """Trains a few steps with two replicas of ``each`` shards, one on each node, and returns what was
    measured.
    """
    from tests.support.toys import toy_job

    job = toy_job(
        folder / f"bucket-{block}",
        model_args={"vocab": 29, **model},
        microbatch=1,
        global_batch=microbatches,
        network={"interface": DEVICE},
        reduction={"block": block},
    )
    with link(rate) as names:
        workers = []
        for rank in range(2 * each):
            arguments = [str(rank), str(each), job.to_json()]
            inside = [
                "ip",
                "netns",
                "exec",
                names[rank // each],
                sys.executable,
                "-m",
                "tests.support.slow_link",
            ]
            workers.append(
                subprocess.Popen([*inside, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
        try:
            said = [worker.communicate(timeout=10 * PATIENCE_S)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    assert not any(worker.returncode for worker in workers), said
    found = [json.loads(text.splitlines()[-1]) for text in said]
    out = sum(found[rank]["out_bytes"] for rank in (0, each)) / 2 / TIMED
    return Measured(statistics.median(found[0]["steps_s"]), out, found[0]["parameters"], found[0]["hash"])


def worker(rank: int, each: int, text: str) -> None:
    """Trains as one worker; the last line of its output is a dictionary."""
    import torch.distributed as dist

    from elastic.engine.world import World
    from elastic.ids import Version
    from elastic.job import Job
    from elastic.plan.layout import Layout
    from elastic.train.session import prepare_process
    from tests.support.segments import member, shard_hash

    job, layout = Job.from_json(text), Layout(2, each)
    device = prepare_process(job)
    store = dist.TCPStore("10.9.9.1", PORT, is_master=rank == 0, wait_for_workers=False)
    nodes = tuple("ab"[other // each] for other in range(layout.world))
    world = World.form(
        store, generation=1, layout=layout, rank=rank, device=device, form_s=PATIENCE_S, nodes=nodes
    )
    world.connect(PATIENCE_S, 10 * PATIENCE_S)
    counter = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    steps_s, before = [], 0
    with member(world, job, Version(0, 0)) as me:
        for number in range(WARM + TIMED):
            if number == WARM:
                dist.barrier()
                before = int(counter.read_text())
                dist.barrier()
            began = time.perf_counter()
            me.step()
            steps_s.append(time.perf_counter() - began)
        dist.barrier()
        out = int(counter.read_text()) - before
        dist.barrier()  # nobody leaves while another still counts
        parameters = sum(parameter.numel() for parameter in me.state.model.parameters())
        print(
            json.dumps(
                {
                    "steps_s": steps_s[WARM:],
                    "out_bytes": out,
                    "parameters": parameters,
                    "hash": shard_hash(me.state.shard),
                }
            )
        )
    world.close()


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
