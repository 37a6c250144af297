"""A device finds the same microbatches too bad as the host does from the record of the commit, and leaves
them out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.launch import launch
from elastic.plan.layout import Layout
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from tests.train.test_spikes import HERE, WINDOW, drawn_by, spiky

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_g1_a_device_leaves_out_what_the_commit_says(tmp_path: Path, precision: str) -> None:
    """G1: the judge is a user's loss that counts nothing of the microbatch, from the same checkpoint: the
    loss and the norm have the same bits.  The control: the norm of the step with all of its microbatches is
    another one.
    """
    first = WINDOW + 1
    _, sample = drawn_by(tmp_path, first, Layout(1, 1), 0)
    common = {
        "optim": {"lr": 0.002},
        "precision": precision,
        "workers": {"min": 1, "max": 1, "gpus": 1},
        "checkpoint": {"save_every": WINDOW},
    }
    each = {"action": "skip", "microbatch_z": 6.0}
    rows = {}
    for name, gain, spikes in (
        ("told", 1.3, each),
        ("judge", 0.0, {"action": "none"}),
        ("control", 1.3, {"action": "none"}),
    ):
        begun = spiky(tmp_path, {sample: 1.3}, steps=first, spikes=each, **common).replace(name=name)
        launch(begun.replace(steps=WINDOW), local=True, show=lambda line: None)
        ends = spiky(tmp_path, {sample: gain}, steps=first, spikes=spikes, **common).replace(
            name=name, loss=f"{HERE}:{'without' if not gain else 'gained'}"
        )
        launch(ends, local=True, branch=True, accept_code=True, show=lambda line: None)
        rows[name] = next(row for row in rows_of(Run.find(ends)) if row["step"] == first)
    assert rows["told"]["left_out"] == 1
    assert [rows["told"][key] for key in ("loss", "norm", "tokens")] == [
        rows["judge"][key] for key in ("loss", "norm", "tokens")
    ]
    assert rows["control"]["norm"] != rows["told"]["norm"]
