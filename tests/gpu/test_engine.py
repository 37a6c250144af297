"""Layouts give the same bits on GPUs, too, whatever the engine does; with compiled blocks and FlexAttention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

MODEL = {"vocab": 32, "dim": 256, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 512}
STEPS = 4


@pytest.fixture(scope="module")
def gpus() -> Iterator[Ranks]:
    pool = Ranks(2, "cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": {"zero": 2}},
        {"parallel": {"zero": 3}},
        {"precision": "fp8"},
        {"precision": "fp8", "parallel": {"zero": 2}, "recompute": "selective"},
        {"precision": "fp8", "parallel": {"zero": 3}},
        {"precision": "fp8-rowwise"},
        {"precision": "fp8-rowwise", "parallel": {"zero": 2}},
        {"precision": "fp16"},
        {"recompute": "block"},
        {"recompute": "sqrt"},
        {"recompute": 0.5},
        {"activations": "offload"},
        {"activations": "offload", "recompute": "block", "compile": False},
        {"activations": "int8"},
        {"activations": "fp8", "parallel": {"zero": 2}},
        {"optim": {"kind": "muon", "momentum": 0.95}},
        {"optim": {"moments": "bf16"}, "parallel": {"zero": 2}},
    ],
    ids=str,
)
def test_layouts_have_the_same_bits(gpus: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """One member, two that share the state, two replicas, and a change between them.  The control: another seed gives other bits."""
    settings: dict[str, Any] = {"precision": "bf16", "compile": True, "workers": {"gpus": 1}, "model_args": MODEL, **changes}
    one = train(gpus, toy_job(tmp_path / "one", **settings), Layout(1, 1), STEPS)
    assert train(gpus, toy_job(tmp_path / "shards", **settings), Layout(1, 2), STEPS).hash == one.hash
    moved = toy_job(tmp_path / "moved", **settings)
    half = train(gpus, moved, Layout(2, 1), STEPS // 2)
    assert train(gpus, moved, Layout(1, 2), STEPS, half.version).hash == one.hash
    assert train(gpus, toy_job(tmp_path / "other", seed=1, **settings), Layout(1, 1), STEPS).hash != one.hash
    assert one.outcomes[-1].loss < one.outcomes[0].loss
