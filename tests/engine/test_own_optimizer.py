"""An optimizer of one's own is one file: this one.  A job names it, and its state is saved, resumed, reshaped
and healed like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Optimizer, Part, Rule, rule_of
from elastic.engine.optim.trial import check_rule
from elastic.errors import CodeError, JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from tests.support.carried import hash_after_healing
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train, train_here
from tests.support.toys import small_job
from tests.support.worlds import STEPS


def update(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """SGD with momentum (Sutskever and others 2013), bias-corrected by a scalar, and a learning rate that
    falls from row to row.
    """
    momentum = hyper.settings.args["momentum"]
    assert isinstance(momentum, float)
    decay = hyper.scalars["decay"]
    decay.copy_(1 - (1 - decay) * momentum)
    for part, grad in zip(parts, grads, strict=True):
        velocity = part.moments["velocity"]
        velocity.mul_(momentum).add_(grad, alpha=1 - momentum)
        rows = torch.cat([torch.arange(box.start[0], box.stop[0]) for box in part.boxes])
        rates = (hyper.lr / float(decay) / (1 + rows / 8)).view(-1, *(1 for _ in grad.shape[1:]))
        part.values.sub_(velocity * rates)


MOMENTUM = Rule(("velocity",), update, scalars=("decay",))


def without_place(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """The mistake that :class:`Rule` warns of: it takes a slice for the whole."""
    there = [
        tuple(replace(box, start=(0, *box.start[1:]), stop=part.values.shape) for box in part.boxes)
        for part in parts
    ]
    update([replace(part, boxes=boxes) for part, boxes in zip(parts, there, strict=True)], grads, hyper)


WITHOUT_PLACE = Rule(MOMENTUM.moments, without_place, scalars=MOMENTUM.scalars)


SMALL = {"vocab": 29, "dim": 32, "layers": 2, "heads": 2, "dropout": 0.1}


def own_job(bucket: Path, rule: str = "MOMENTUM", momentum: float = 0.9) -> Job:
    return small_job(
        bucket,
        model_args=SMALL,
        optim={"lr": 1.0, "kind": f"tests.engine.test_own_optimizer:{rule}", "args": {"momentum": momentum}},
    )


@pytest.fixture(scope="module")
def job_alone(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return own_job(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def alone(job_alone: Job) -> Trained:
    """Trains with one worker; ``test_covering.py`` has the worlds."""
    return train_here(job_alone, STEPS)


def test_the_hash_sees_the_optimizer(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Negative control: another momentum; and an optimizer to which it matters how a tensor is cut."""
    assert train_here(own_job(tmp_path / "momentum", momentum=0.8), STEPS).hash != alone.hash
    assert train_here(own_job(tmp_path / "whole", "WITHOUT_PLACE"), STEPS).hash == alone.hash
    assert train(ranks, own_job(tmp_path / "cut", "WITHOUT_PLACE"), Layout(1, 2), STEPS).hash != alone.hash


def test_its_moment_and_its_scalar_are_saved(job_alone: Job, alone: Trained) -> None:
    stored = {
        (tensor.kind, tensor.name) for tensor in Run.open(job_alone).checkpoints.open(alone.version).tensors()
    }
    assert {kind for kind, _ in stored} == {"parameter", "moment.velocity", "scalar"}
    assert {name for kind, name in stored if kind == "scalar"} == {"updates", "decay"}
    assert alone.outcomes[-1].loss < 0.9 * alone.outcomes[0].loss, "it learns"


def test_its_state_is_healed_from_members(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Promise 4: from memory, to a member that had nothing."""
    assert hash_after_healing(ranks, own_job(tmp_path), STEPS) == alone.hash


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "tests.engine.test_own_optimizer:STEPS",
            "names a int; name a Rule of elastic.engine.optim.base, or one of adamw",
        ),
        (
            "tests.engine.test_own_optimizer:MOMENTUN",
            "did you mean 'tests.engine.test_own_optimizer:MOMENTUM'?",
        ),
    ],
)
def test_what_is_no_optimizer_is_refused(tmp_path: Path, kind: str, said: str) -> None:
    job = small_job(tmp_path, optim={"kind": kind})
    with pytest.raises(CodeError, match=rf"^optim\.kind = '{kind}'.*{said.replace('?', '[?]')}"):
        rule_of(job)


BAD = "tests.support.own_optimizers"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "NORMALISED",
            (
                r"gives values of matrix other bits if the tensor is cut in two \(they differ by .*: "
                r"make the rule elementwise"
            ),
        ),
        ("NAN", "makes 'momentum' of a matrix that are not finite, from finite gradients"),
        (
            "MIS_SHAPED",
            (
                r"failed with RuntimeError: .* \(in .*own_optimizers\.py, line \d+\) on parameters "
                r"of shapes"
            ),
        ),
        ("REPLACES", "puts another tensor in the place of 'momentum' of matrix; update.. must change"),
        (
            "Torchs",
            (
                r"names a torch.optim.Optimizer, which needs whole tensors, .* as update\(parts, "
                r"grads, hyper\)"
            ),
        ),
    ],
)
def test_l13_an_optimizer_that_cannot_work_is_refused_before_a_worker_starts(
    tmp_path: Path, rule: str, said: str
) -> None:
    """L13: the controls are the good ones, with their scalars, their place in the tensor, and moments in
    bfloat16.
    """
    with pytest.raises(CodeError, match=rf"^optim\.kind = '{BAD}:{rule}' {said}"):
        preflight(small_job(tmp_path, optim={"kind": f"{BAD}:{rule}"}))
    for good in (
        own_job(tmp_path),
        small_job(tmp_path, optim={"kind": f"{BAD}:LION"}),
        small_job(tmp_path, optim={"kind": "elastic.engine.optim.muon:MUON"}),
    ):
        check_rule(good, rule_of(good))
    rounded = small_job(tmp_path, optim={"kind": "elastic.engine.optim.adamw:ADAMW", "moments": "bf16"})
    check_rule(rounded, rule_of(rounded))
    with pytest.raises(CodeError, match="WITHOUT_PLACE' gives values of matrix other bits"):
        check_rule(wrong := own_job(tmp_path, "WITHOUT_PLACE"), rule_of(wrong))


@pytest.mark.fast
def test_groups_of_parameters_have_no_place_for_a_scalar(tmp_path: Path) -> None:
    """The control: a rule without one."""
    groups = [{"names": ["*norm*"], "lr_scale": 2.0}]
    with pytest.raises(
        CodeError,
        match=(r"optim\.groups have different learning rates, but optim\.kind = .* has one scalar 'decay'"),
    ):
        rule_of(small_job(tmp_path, optim={"kind": f"{__name__}:MOMENTUM", "groups": groups}))
    rule_of(small_job(tmp_path, precision="fp16", optim={"kind": f"{BAD}:LION", "groups": groups}))


@pytest.mark.fast
def test_l13_lion_in_a_users_file_is_lion(tmp_path: Path) -> None:
    """L13: against the paper's pseudocode, in float64 and with numpy alone."""
    job = small_job(
        tmp_path,
        optim={
            "kind": f"{BAD}:LION",
            "lr": 1e-2,
            "betas": [0.9, 0.99],
            "weight_decay": 0.3,
            "clip_norm": 1e9,
        },
    )
    value = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w, m = value.numpy().copy(), np.zeros((7, 5))
    optimizer = Optimizer(job, rule_of(job), {"w": value}, {"w": ()}, frozenset({"w"}))
    for step in range(1, 11):
        grad = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        g = grad.numpy() / 3
        lr = optimizer.apply({"w": grad.clone()}, Outcome(step, 1, 1.0, (1.0,), (3,), ((0,),), finite=True))
        w, m = w - lr * (np.sign(0.9 * m + 0.1 * g) + 0.3 * w), 0.99 * m + 0.01 * g
    np.testing.assert_allclose(value.numpy(), w, rtol=1e-12)


@pytest.mark.fast
def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        JobError,
        match=(
            r"^Job: optim\.kind = 'adam' must be 'adamw', 'sgd', 'adagrad', "
            r"'rmsprop' or 'muon', or"
        ),
    ):
        small_job(tmp_path, optim={"kind": "adam"})


@pytest.mark.fast
def test_the_digest_knows_an_optimizer_only_where_it_is_not_the_first_releases(tmp_path: Path) -> None:
    """A run that began before the setting existed goes on."""
    digests = {
        small_job("/b", optim={"lr": 1e-2, **optim}).digest for optim in ({}, {"kind": "adamw"}, {"args": {}})
    }
    assert digests == {small_job("/b").digest}
    others = {
        own_job(Path("/b")).digest,
        own_job(Path("/b"), momentum=0.8).digest,
        small_job("/b", optim={"lr": 1.0}).digest,
    }
    assert len(others) == 3
