"""R4, N13: a worker on a node that never compiled the job gets the code from another node's keeper, and
compiles nothing.

Both nodes are real and have folders of their own for compiled code.  The head has no room for workers.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
import ray

from actors.processes import compiled_folder
from actors.view import View
from elastic.job import Job
from elastic.train.machine.compilers import CPU
from storage.objects import ObjectStore
from tests.support.chaos import Trial, Witness, trial
from tests.support.nodes import Node, joined
from tests.support.room import Room
from tests.support.toys import toy_job

COUNTS = re.compile(r"the warm-up took [\d.]+ s; (\d+) graphs were compiled, (\d+) were found compiled")
CAME = re.compile(r"compiled code came from \S+: (\d+) files, [\d.]+ MB")
MODEL = {"vocab": 29, "dim": 32, "layers": 2, "heads": 2}


def job_of(folder: Path) -> Job:
    workers, deadlines = {"min": 1, "max": 2, "cpus": 5}, {"grow_debounce_s": 0.2}
    gates = {"dataset": "tests.support.toys:Paced", "args": {"calm": str(folder / "calm"), "pace_s": 0.1}}
    (folder / "bucket").mkdir()
    return toy_job(
        folder / "bucket",
        compile=True,
        steps=200,
        model_args=MODEL,
        data=gates,
        workers=workers,
        deadlines=deadlines,
    )


class Latecomer:
    """Adds a node to a run that steps.  Once its worker is a member, the run goes on at full speed."""

    def __init__(self, folder: Path, second: Node, stack: ExitStack) -> None:
        self.folder, self.second, self.stack = folder, second, stack
        self.added = False

    def __call__(self, witness: Witness, view: View) -> bool:
        if not self.added and view.state == "Running" and view.step >= 1:
            self.added = True
            self.stack.enter_context(joined(self.folder, self.second))
        if view.state == "Running" and len(view.workers) == 2 and view.generation >= 2:
            (self.folder / "calm").touch()
            return True
        return False


def grown(folder: Path, **second: Path) -> tuple[Trial, list[str]]:
    """Runs a job that begins on one node and grows onto another one, on which the file ``cpuinfo`` stands for
    the true one if it is given.

    Returns the run and the logs of its workers, in their order.
    """
    root, room = compiled_folder(), Room()
    root.mkdir(parents=True, exist_ok=True)
    homes = [folder / f"home{number}" for number in range(2)]
    for home in homes:
        home.mkdir()
    first, then = (Node(f"n{number}", 5, instead={root: home}) for number, home in enumerate(homes))
    then = Node(
        then.name, then.cpus, instead={**then.instead, **({CPU: second["cpuinfo"]} if second else {})}
    )
    with ExitStack() as stack:
        room.take(ray.cluster_resources()["CPU"])
        stack.callback(room.close)
        stack.enter_context(joined(folder, first))
        chaos = trial(job_of(folder), Latecomer(folder, then, stack))
        store = ObjectStore.open(chaos.job.bucket)
        logs = {Path(key).stem: store.get(key).decode() for key in store.list(f"{chaos.job.name}/logs/")}
    return chaos, [logs[worker] for worker in sorted(logs, key=lambda each: int(each.removeprefix("w")))]


def compiled(log: str) -> tuple[int, int]:
    """Returns how many graphs a worker compiled in its warm-up, and how many it found."""
    (found,) = COUNTS.findall(log)
    return int(found[0]), int(found[1])


@pytest.mark.full
def test_a_worker_on_a_new_node_compiles_nothing(tmp_path: Path) -> None:
    """R4, N13: the first worker compiles; the second one, on another node, has its code before it compiles
    anything.
    """
    chaos, (first, second) = grown(tmp_path)
    assert chaos.result.state == "Finished" and compiled(first)[0] > 0 and not CAME.search(first)
    assert CAME.search(second) and compiled(second) == (0, sum(compiled(first))), second
    objects = [{path.name for path in (tmp_path / f"home{number}").rglob("*.so")} for number in range(2)]
    assert objects[0] and objects[0] == objects[1], "the C++ compiler made nothing, either"
    assert not [
        key for key in ObjectStore.open(chaos.job.bucket).list("") if key.endswith((".so", ".cpp"))
    ], "nothing is in the bucket"


@pytest.mark.full
def test_a_worker_on_a_node_of_another_kind_compiles(tmp_path: Path) -> None:
    """The control: the second node says that its CPU is another one, so its worker does not take the code.

    What it compiles by itself computes the same bits as code that came from another node.
    """
    hashes = []
    for name in ("same", "other"):
        folder = tmp_path / name
        folder.mkdir()
        cpuinfo = folder / "cpuinfo"
        cpuinfo.write_text(re.sub(r"(?m)^(model name|CPU part)\s*:.*$", rf"\1\t: {name}", CPU.read_text()))
        chaos, (first, second) = grown(folder, **({"cpuinfo": cpuinfo} if name == "other" else {}))
        assert compiled(first)[0] > 0 and bool(CAME.search(second)) == (name == "same")
        assert (compiled(second) == compiled(first)) == (name == "other")
        hashes.append(chaos.hash)
    assert hashes[0] == hashes[1]
