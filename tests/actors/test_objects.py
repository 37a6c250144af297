"""L11: scripts, typed code and notebooks are run as their users run them; workers and coordinators are killed
meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import ray

from elastic.job import Job
from elastic.runs.code import noted
from elastic.runs.run import Run
from tests.support.commands import FORK, ROOT
from tests.support.patience import PATIENCE_S
from tests.support.state_hash import state_hash
from tests.support.warm import SOCKET
from tests.test_objects import CELL

STEPS = 14
PROGRAM = f"""{CELL}
import os, signal, sys
from actors.living import attach
from actors.screen import Screen

show = Screen().show
from elastic import Job, launch
from elastic.report.story import StepLine

bucket, where = sys.argv[1:]
struck = []

def strike(line):
    show(line)
    if where == "ray" and isinstance(line, StepLine) and line.step >= 4 and not struck:
        struck.append(attach("objects").view.remote())
        import ray
        pid = ray.get(struck[0]).pid
        os.kill(pid, signal.SIGKILL)
        print("--- SIGKILL to the coordinator", pid)

job = Job(
    name="objects", bucket=bucket, model=build, loss=loss, data={{"dataset": Waves}}, steps={STEPS}, global_batch=8,
    checkpoint={{"save_every": 4}}, workers={{"min": 2, "max": 2}}, deadlines={{"form_s": 300, "wait_s": 900}},
    faults=[{{"point": "backward", "step": 10, "world_rank": 1}}] if where == "ray" else [],
)
result = launch(job, local=where == "local", show=strike)
print("RESULT", result.state, sorted(result.losses.items()))
"""


def told(words: list[str], folder: Path, text: str | None = None, **environment: str) -> str:
    """Runs Python in ``folder``, where nothing of ours lies, and returns what it printed."""
    environment |= {
        "PYTHONPATH": str(ROOT),
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, *words]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hash_of(bucket: Path) -> str:
    run = Run.find(Job(name="objects", bucket=str(bucket)))
    newest = run.newest()
    assert newest is not None and newest.step == STEPS
    with TemporaryDirectory() as folder:
        run.checkpoints.export(newest, Path(folder))
        return state_hash(sorted(Path(folder).glob("*.safetensors")))


@pytest.mark.full
@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.full)])
def test_l11_a_script_on_a_cluster_ends_with_the_bits_of_one_process(tmp_path: Path, typed: bool) -> None:
    """L11: model, loss and dataset are of ``__main__``, which has no file if it is typed.  The coordinator
    dies, then a worker; the run needs two, so the worker that the next coordinator starts must have got the
    objects.  The bucket has none of them.
    """
    (tmp_path / "script.py").write_text(PROGRAM)
    alone = told(
        [FORK, "script.py", str(tmp_path / "alone"), "local"], tmp_path, **{SOCKET: os.environ[SOCKET]}
    )
    words, text = (["-"], PROGRAM) if typed else (["script.py"], None)
    here = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "disabled"}
    said = told([*words, str(tmp_path / "bucket"), "ray"], tmp_path, text, **here)
    assert "--- SIGKILL to the coordinator" in said
    assert "start w3: 1 worker" in said and re.search(r"form generation \d+ of w[12] and w3", said), said
    assert hash_of(tmp_path / "bucket") == hash_of(tmp_path / "alone")
    results = [
        next(line for line in each.splitlines() if line.startswith("RESULT")) for each in (alone, said)
    ]
    assert results[0] == results[1] and f"({STEPS}, " in results[0]
    run = Run.find(Job(name="objects", bucket=str(tmp_path / "bucket")))
    (its,) = noted(run.store, "objects")
    assert {"object:build", "object:loss", "object:Waves", "__main__.SCALE"} <= its.files.keys()
    written = [path.read_bytes() for path in (tmp_path / "bucket").rglob("*") if path.is_file()]
    assert len(written) > 5 and not any(b"init_weights" in each or b"cloudpickle" in each for each in written)


@pytest.mark.skipif(
    find_spec("nbconvert") is None or find_spec("ipykernel") is None,
    reason="nbconvert and ipykernel are not installed",
)
def test_l11_a_notebook_trains_with_its_cells(tmp_path: Path) -> None:
    """L11: run by ``jupyter nbconvert --execute``; a cell redefines the loss, and the run refuses it by name."""
    head, _, rest = CELL.partition("def make_loss")
    begin = (
        "from elastic import Job, JobError, launch\n"
        "def job(steps):\n"
        f"    return Job(name='objects', bucket={str(tmp_path / 'bucket')!r}, model=build, loss=loss, "
        "data={'dataset': Waves},\n"
        "        steps=steps, global_batch=8, checkpoint={'save_every': 4}, workers={'min': 1, 'max': 1}, "
        "schedule={'kind': 'constant'})\n"
        f"result = launch(job({STEPS}))\n"
        "print('RESULT', result.state, sorted(result.losses))"
    )
    again = (
        f"loss = make_loss(4)\ntry:\n    launch(job({STEPS + 4}), branch=True)\nexcept JobError as "
        "error:\n    print('REFUSED', error)"
    )
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text} for text in
             (head, f"def make_loss{rest}", begin, again)]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (tmp_path / "own.ipynb").write_text(
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 4})
    )
    told(
        ["-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", "own.ipynb"], tmp_path
    )
    done = json.loads((tmp_path / "done.ipynb").read_text())
    printed = [
        "".join("".join(output.get("text", "")) for output in each["outputs"]) for each in done["cells"]
    ]
    assert f"RESULT Finished {list(range(1, STEPS + 1))}" in printed[2], printed
    assert f"step    {STEPS}/{STEPS}  loss" in printed[2], "progress is plain text in the cell"
    assert re.search(
        (
            rf"REFUSED the code of the run 'objects' .* has changed since step {STEPS}: "
            r"object:loss \(changed\)"
        ),
        printed[3],
    ), printed
    assert hash_of(tmp_path / "bucket")
