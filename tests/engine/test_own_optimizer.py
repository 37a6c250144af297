"""An optimizer of one's own is one file: this one.  A job names it, and its state is saved, resumed, reshaped and healed like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic.engine.optim.base import Hyper, Part, Rule, rule_of
from elastic.errors import CodeError, JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs import Run
from tests.support.carried import hash_after_healing
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train
from tests.support.toys import toy_job
from tests.support.worlds import STEPS


def update(parts: Sequence[Part], grads: Sequence[Tensor], hyper: Hyper) -> None:
    """SGD with momentum (Sutskever and others 2013), bias-corrected by a scalar, and a learning rate that falls from row to row."""
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
    there = [tuple(replace(box, start=(0, *box.start[1:]), stop=part.values.shape) for box in part.boxes) for part in parts]
    update([replace(part, boxes=boxes) for part, boxes in zip(parts, there, strict=True)], grads, hyper)


WITHOUT_PLACE = Rule(MOMENTUM.moments, without_place, scalars=MOMENTUM.scalars)


def own_job(bucket: Path, rule: str = "MOMENTUM", momentum: float = 0.9) -> Job:
    return toy_job(bucket, optim={"lr": 1.0, "kind": f"tests.engine.test_own_optimizer:{rule}", "args": {"momentum": momentum}})


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(ranks, own_job(tmp_path_factory.mktemp("alone")), Layout(1, 1), STEPS)


@pytest.mark.parametrize("layout", [Layout(2, 2), Layout(1, 3)], ids=str)
def test_every_layout_gives_the_bits_of_one_worker(ranks: Ranks, alone: Trained, tmp_path: Path, layout: Layout) -> None:
    """Promise 1."""
    assert train(ranks, own_job(tmp_path), layout, STEPS).hash == alone.hash
    assert alone.outcomes[-1].loss < 0.9 * alone.outcomes[0].loss, "it learns"


def test_the_hash_sees_the_optimizer(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Negative control: another momentum; and an optimizer to which it matters how a tensor is cut."""
    assert train(ranks, own_job(tmp_path / "momentum", momentum=0.8), Layout(2, 2), STEPS).hash != alone.hash
    whole = train(ranks, own_job(tmp_path / "whole", "WITHOUT_PLACE"), Layout(1, 1), STEPS)
    assert whole.hash == alone.hash
    assert train(ranks, own_job(tmp_path / "cut", "WITHOUT_PLACE"), Layout(1, 2), STEPS).hash != alone.hash


def test_its_state_is_saved_and_resumed_in_another_layout(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Promise 4: from the bucket."""
    job = own_job(tmp_path)
    first = train(ranks, job, Layout(2, 2), 3)
    stored = {(tensor.kind, tensor.name) for tensor in Run.open(job).checkpoints.open(first.version).tensors()}
    assert {kind for kind, _ in stored} == {"parameter", "moment.velocity", "scalar"}
    assert {name for kind, name in stored if kind == "scalar"} == {"updates", "decay"}
    assert train(ranks, job, Layout(1, 3), STEPS, first.version).hash == alone.hash


def test_its_state_is_healed_from_members(ranks: Ranks, alone: Trained, tmp_path: Path) -> None:
    """Promise 4: from memory, to a member that had nothing."""
    assert hash_after_healing(ranks, own_job(tmp_path), STEPS) == alone.hash


@pytest.mark.fast
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("tests.engine.test_own_optimizer:STEPS", "names a int; name a Rule of elastic.engine.optim.base, or one of adamw"),
        ("tests.engine.test_own_optimizer:MOMENTUN", "did you mean 'tests.engine.test_own_optimizer:MOMENTUM'?"),
    ],
)
def test_what_is_no_optimizer_is_refused(tmp_path: Path, kind: str, said: str) -> None:
    job = toy_job(tmp_path, optim={"kind": kind})
    with pytest.raises(CodeError, match=rf"^optim\.kind = '{kind}'.*{said.replace('?', '[?]')}"):
        rule_of(job)


@pytest.mark.fast
def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"^Job: optim\.kind = 'adam' must be 'adamw', 'sgd', 'adagrad', 'rmsprop' or 'muon', or"):
        toy_job(tmp_path, optim={"kind": "adam"})


@pytest.mark.fast
def test_the_digest_knows_an_optimizer_only_where_it_is_not_the_first_releases(tmp_path: Path) -> None:
    """A run that began before the setting existed goes on."""
    digests = {toy_job("/b", optim={"lr": 1e-2, **optim}).digest for optim in ({}, {"kind": "adamw"}, {"args": {}})}
    assert digests == {toy_job("/b").digest}
    others = {own_job(Path("/b")).digest, own_job(Path("/b"), momentum=0.8).digest, toy_job("/b", optim={"lr": 1.0}).digest}
    assert len(others) == 3
