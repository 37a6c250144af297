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
        {"offload": "weights", "parallel": {"zero": 2}},
        {"offload": "weights", "parallel": {"zero": 1}, "precision": "fp8", "recompute": "block"},
        {"offload": "weights", "parallel": {"zero": 2}, "recompute": "sqrt", "compile": False},
        {"activations": "offload", "recompute": "block", "compile": False},
        {"activations": "int8"},
        {"activations": "fp8", "parallel": {"zero": 2}},
        {"optim": {"kind": "muon", "momentum": 0.95}},
        {"optim": {"moments": "bf16"}, "parallel": {"zero": 2}},
    ],
    ids=str,
)
def test_layouts_have_the_same_bits(gpus: Ranks, tmp_path: Path, changes: dict[str, Any]) -> None:
    """One member, two that share the state, two replicas, and a change between them.  The control: another
    seed gives other bits.
    """
    settings: dict[str, Any] = {
        "precision": "bf16",
        "compile": True,
        "workers": {"gpus": 1},
        "model_args": MODEL,
        **changes,
    }
    one = train(gpus, toy_job(tmp_path / "one", **settings), Layout(1, 1), STEPS)
    assert train(gpus, toy_job(tmp_path / "shards", **settings), Layout(1, 2), STEPS).hash == one.hash
    moved = toy_job(tmp_path / "moved", **settings)
    half = train(gpus, moved, Layout(2, 1), STEPS // 2)
    assert train(gpus, moved, Layout(1, 2), STEPS, half.version).hash == one.hash
    assert train(gpus, toy_job(tmp_path / "other", seed=1, **settings), Layout(1, 1), STEPS).hash != one.hash
    assert one.outcomes[-1].loss < one.outcomes[0].loss


def test_a13_the_norms_of_layers_have_the_same_bits(gpus: Ranks, tmp_path: Path) -> None:
    """A13: on every member of two layouts, in each step; they are those of which the global norm is made.
    The control: another seed.
    """

    def of(name: str, layout: Layout, **changes: Any) -> list[list[Any]]:
        job = toy_job(
            tmp_path / name,
            precision="bf16",
            workers={"gpus": 1},
            model_args=MODEL,
            watch={"every": 1},
            **changes,
        )
        parts = train(gpus, job, layout, 2).parts
        for outcome in parts[0].outcomes:
            assert sum(norm**2 for norm in outcome.layer_norms.values()) == pytest.approx(
                outcome.norm**2, rel=1e-12
            )
        return [[outcome.layers for outcome in part.outcomes] for part in parts]

    (one,) = of("one", Layout(1, 1))
    assert len(one[0]) > 3 and of("shards", Layout(1, 2)) == of("replicas", Layout(2, 1)) == [one, one]
    assert of("other", Layout(1, 1), seed=1) != [one]


@pytest.mark.parametrize(
    "changes",
    [{"compile": True}, {"compile": True, "parallel": {"zero": 3}}, {"reproducible": False}],
    ids=str,
)
def test_l1_validations_have_the_same_bits_and_change_none(
    gpus: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """L1: thirty samples in microbatches of two, so that the device falls behind; nothing is compiled again
    for the training.
    """
    held_out = {
        "every": 2,
        "samples": 61,
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 100, "seq_len": 16},
    }
    settings: dict[str, Any] = {"precision": "bf16", "workers": {"gpus": 1}, "model_args": MODEL, **changes}
    without = train(gpus, toy_job(tmp_path / "without", **settings), Layout(1, 1), STEPS)
    found = {
        layout: train(gpus, toy_job(tmp_path / str(layout), validation=held_out, **settings), layout, STEPS)
        for layout in (Layout(1, 1), Layout(1, 2), Layout(2, 1))
    }
    told = {layout: [each.validated for each in trained.outcomes] for layout, trained in found.items()}
    assert all(each is not None for each in (told[Layout(1, 1)][2], told[Layout(1, 2)][2]))
    if changes.get("reproducible", True):
        assert {each.hash for each in found.values()} == {without.hash}
        assert told[Layout(1, 1)] == told[Layout(1, 2)] == told[Layout(2, 1)]
