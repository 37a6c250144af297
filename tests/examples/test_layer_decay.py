"""The learning rate of the example falls from layer to layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from elastic.job import Job
from elastic.runs.run import Run
from examples.layer_decay import groups, main

JOB = """
name = "run"
bucket = "{bucket}"
model_args = {{ vocab = 29, dim = 16, layers = 2, heads = 2 }}
data = {{ dataset = "tests.support.toys:Sums" }}
optim = {{ kind = "sgd", lr = 0.1, momentum = 0.0, weight_decay = 0.0, clip_norm = 1e9 }}
schedule = {{ kind = "constant" }}
steps = 1
global_batch = 4
"""


@pytest.mark.fast
def test_the_groups_cover_all_below_the_head() -> None:
    assert groups(2, 0.5) == [
        {"names": ["embedding.*"], "lr_scale": 0.125},
        {"names": ["layers.0.*"], "lr_scale": 0.25},
        {"names": ["layers.1.*"], "lr_scale": 0.5},
    ]


def trained(folder: Path, rate: float) -> dict[str, torch.Tensor]:
    """Returns the weights after a step by the example."""
    folder.mkdir()
    file = folder / "job.toml"
    file.write_text(JOB.format(bucket=folder))
    main(str(file), "2", str(rate), "--local")
    run = Run.open(Job.load(file, {"optim.groups": groups(2, rate)}))
    version = run.newest()
    assert version is not None
    run.checkpoints.export(version, folder / "out")
    return load_file(folder / "out" / "model.safetensors")


def test_a_step_of_each_layer_is_so_much_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run with a rate of 0 shows where all but the last norm began, and one with 1 their whole steps."""
    whole, half, begun = (trained(tmp_path / str(rate), rate) for rate in (1.0, 0.5, 0.0))
    assert re.search(r"layers\.1\.\* +9 +[\d,]+ +0\.05 +0\n", capsys.readouterr().out), "the table"
    parts = {"embedding.": 0.125, "layers.0.": 0.25, "layers.1.": 0.5}
    for name, start in begun.items():
        part = next((part for prefix, part in parts.items() if name.startswith(prefix)), None)
        if part is None:
            assert (
                name == "norm.weight" and torch.equal(whole[name], start) and torch.equal(half[name], start)
            )
            continue
        assert not torch.equal(whole[name], start)
        torch.testing.assert_close(half[name] - start, (whole[name] - start) * part, rtol=1e-3, atol=1e-6)
