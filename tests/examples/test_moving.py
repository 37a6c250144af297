"""U7: scripts of Ray Train and of Hugging Face's Trainer move to Elastic with at most 20 changed lines, and
train as plain torch does.
"""

from __future__ import annotations

import difflib
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.data.cursor import Cursor
from elastic.job import Job
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.examples.blocks import ROOT, blocks_of

FOLDER = ROOT / "examples" / "moving"
SCRIPTS = ("ray", "trainer")
MOST = 20
"""Largest number of changed lines."""


def lines_of(script: str) -> list[str]:
    return (FOLDER / f"{script}.py").read_text(encoding="utf-8").splitlines()


def changes(before: list[str], after: list[str]) -> int:
    """Counts the changed lines: a line that is replaced counts once, and so does one that only comes or goes.
    Empty lines do not count.
    """
    found, before, after = (
        0,
        [line for line in before if line.strip()],
        [line for line in after if line.strip()],
    )
    for kind, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        found += max(b - a, d - c) if kind != "equal" else 0
    return found


@pytest.mark.fast
@pytest.mark.parametrize("script", SCRIPTS)
def test_u7_the_guide_shows_the_difference_and_it_is_small(script: str) -> None:
    """U7: it is made from the two files.  The control: with two more lines of a hunk, the count is two more."""
    before, after = lines_of(f"{script}_before"), lines_of(f"{script}_after")
    assert max(len(before), len(after)) < 60
    count = changes(before, after)
    assert 10 < count <= MOST
    assert changes(before, [*after, "one()", "", "two()"]) == count + 2 and changes(before, before) == 0
    page = ROOT / "examples" / "guide" / "moving.md"
    text = page.read_text(encoding="utf-8")
    wanted = "\n".join(line for line in [*difflib.unified_diff(before, after, n=1, lineterm="")][2:])
    shown = [block.text.rstrip() for block in blocks_of(text, page.name)]
    assert [re.sub(r"^@@.*", "@@", wanted, flags=re.MULTILINE)] == [
        each for each in shown if each.splitlines()[1] == f"-{before[0]}"
    ]
    told = re.findall(rf"{script}_after\.py\).*?\*\*(\d+) changed lines\*\*", text, re.DOTALL)
    assert [int(each) for each in told] == [count]


def losses_of(script: str, folder: Path, name: str, patch: pytest.MonkeyPatch) -> list[float]:
    """Runs the script with ``--local`` as a user does, and returns the losses of its steps from the bucket."""
    patch.chdir(folder)
    patch.setattr(sys, "argv", [f"{script}.py", "--local"])
    runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
    return [row["loss"] for row in rows_of(Run.find(Job(name=name, bucket=str(folder / "moved"))))]


def by_torch(
    model: nn.Module,
    dataset: Any,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    steps: int,
    clip: float,
    seed: int = 0,
) -> list[float]:
    """Trains with torch alone on the same samples, a whole batch at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    cursor, found = Cursor(len(dataset), 32, seed), []
    for step in range(1, steps + 1):
        batch = torch.utils.data.default_collate([dataset[i] for i in cursor.ids(step)])
        optimizer.zero_grad()
        mean = loss(model, batch)
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(mean.item())
    return found


def test_u7_after_ray_train_the_losses_are_those_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U7: the judge takes the model, the mean and the optimizer of the script before.  The control: it draws
    other samples.
    """
    found = losses_of("ray_after", tmp_path, "waves", monkeypatch)
    parts = runpy.run_path(str(FOLDER / "ray_after.py"))

    def judge(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = parts["Net"](32)
        model.init_weights()  # as the engine does, after the constructor
        mean = nn.functional.mse_loss
        return by_torch(
            model,
            parts["Waves"](),
            lambda model, batch: mean(model(batch["x"]), batch["y"]),
            64,
            math.inf,
            seed,
        )

    assert len(found) == 64 and found[-1] < found[0] / 4
    torch.testing.assert_close(found, judge(0), rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, judge(1), rtol=1e-1, atol=1e-6)


def test_u7_after_the_trainer_the_losses_are_those_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U7: the judge is the library's own model with its own loss, a mean.  The control: it draws other
    samples.
    """
    transformers = pytest.importorskip("transformers", reason="the library of the script is not installed")
    found = losses_of("trainer_after", tmp_path, "counting", monkeypatch)
    parts = runpy.run_path(str(FOLDER / "trainer_after.py"))

    def judge(seed: int) -> list[float]:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model("llama", **parts["SHAPE"])
        )
        return by_torch(model, parts["Counting"](), lambda model, batch: model(**batch).loss, 40, 1.0, seed)

    assert len(found) == 40 and found[-1] < found[0] / 4
    torch.testing.assert_close(found, judge(0), rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, judge(1), rtol=1e-2, atol=1e-6)


HERE = (
    "import ray; ray.init(address='local', num_cpus=4, _node_ip_address='127.0.0.1', "
    "include_dashboard=False)\n"
)
"""Ray on this machine alone, whatever its network is."""


@pytest.mark.full
@pytest.mark.parametrize(("script", "needs"), [("ray", "pandas"), ("trainer", "accelerate")])
def test_u7_the_scripts_before_run(script: str, needs: str, tmp_path: Path) -> None:
    """U7: they are no pseudocode.  Ray Train and the Trainer run them as they are, and the loss falls."""
    pytest.importorskip(needs, reason="a library of the script is not installed")
    pytest.importorskip("transformers" if script == "trainer" else "pyarrow")
    run = (
        f"{HERE if script == 'ray' else ''}import runpy; runpy.run_path({str(FOLDER / script)!r} + "
        "'_before.py', run_name='__main__')"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    words = [sys.executable, "-c", run, "--local"]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    losses = [float(each) for each in re.findall(r"'loss': '?([\d.]+)", done.stdout)]
    assert len(losses) == (1 if script == "ray" else 40) and losses[-1] < 0.5, done.stdout
