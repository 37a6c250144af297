"""The norms of the gradients of single layers: plain torch is the judge, and what is wrong with a layer is
said with its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.journal import codec
from elastic.models import gpt2
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import StepDone
from elastic.report.metrics import metrics
from elastic.report.replay import tell
from elastic.report.story import Line, Sentence, StepLine
from elastic.train.alone.local import run_local
from elastic.train.model import builder_of
from tests.control.play import stepping
from tests.support.ranks import Ranks
from tests.support.segments import member, train, train_here
from tests.support.toys import Own, small_job

FREE_OF_DROPOUT = {"vocab": 29, "dim": 32, "layers": 3, "heads": 2}


class Amplified(torch.autograd.Function):
    """Multiplies the gradient, and leaves the value as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class Ailing(Own):
    """A model in which something is wrong with ``layers.1``: from microbatch ``since`` on, its gradient is
    multiplied by ``factor``.

    With ``alone``, the layers before it do not see that.
    """

    def __init__(self, factor: float | str, since: int = 0, alone: bool = True) -> None:
        super().__init__()
        self.factor, self.since, self.alone, self.seen = float(factor), since, alone, 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.mix(x)
        for number, layer in enumerate(self.layers):
            ill = number == 1 and self.seen >= self.since
            x = x + Amplified.apply(layer(x.detach() if self.alone else x), self.factor if ill else 1.0)
        self.seen += self.training  # the loss is tried before the run, too
        return self.head(x)


def ailing(**args: Any) -> nn.Module:
    return Ailing(**args)


def multiplied_by_zero() -> nn.Module:
    """A model whose ``layers.1`` counts for nothing."""

    class Idle(Own):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) * self.scale
            for number, layer in enumerate(self.layers):
                x = x + layer(x) * (number != 1)
            return self.head(x + self.mix(x))

    return Idle()


def told(folder: Path, **changes: Any) -> list[Line]:
    """Trains with one worker in this process, and returns the lines of its story."""
    lines = list[Line]()
    job = small_job(folder, **{"steps": 6, "trial": False, **changes})  # the ailing model counts its calls
    assert run_local(job, lines.append)[0] == "Finished"
    return lines


def warnings_of(lines: list[Line]) -> dict[int, str]:
    """Returns what was said of gradients and the loss, by the step after which it was said, also if it
    follows the word that this step is skipped.
    """
    found, step = dict[int, str](), 0
    for line in lines:
        step = line.step if isinstance(line, StepLine) else step
        if isinstance(line, Sentence) and (
            said := re.search(
                (
                    r"(^|^step \d+ is skipped .*; )(the (gradient "
                    r"of|loss) .*)"
                ),
                line.text,
            )
        ):
            assert step not in found
            found[step] = said[2]
    return found


# ---- the norms


def of_plain_torch(world: World, job: Job) -> tuple[Outcome, dict[str, float], dict[str, float]]:
    """Returns the outcome of the first step, and the norms of the mean gradient by plain torch in float32: by
    layer, and by tensor.
    """
    with member(world, job, Version(0, 0)) as me:
        model = builder_of(job)(**job.model_args)
        model.load_state_dict(
            {
                name: value.clone()
                for (kind, name), value in me.state.shard.values.items()
                if kind == "parameter"
            },
            strict=False,
        )
        total, terms = torch.zeros(()), 0
        for number in range(job.microbatches):
            loss, count = next_token(
                model, me.session.loader.read(me.session.cursor.microbatch_ids(1, number, job.microbatch))
            )
            total, terms = total + loss, terms + int(count)
        (total / terms).backward()
        layers = {
            name: list(module.parameters())
            for name, module in model.named_modules()
            if name.startswith("layers.") and name.count(".") == 1
        }
        inside = {parameter for parameters in layers.values() for parameter in parameters}
        layers |= {
            name: [p]
            for name, p in (
                (name.removesuffix(".weight"), p) for name, p in model.named_parameters() if p not in inside
            )
        }
        norms = {
            name: torch.nn.utils.get_total_norm([p.grad.double() for p in parameters]).item()
            for name, parameters in layers.items()
        }
        return me.step(), norms, {name: p.grad.norm().item() for name, p in model.named_parameters()}


def test_a13_the_norms_are_those_of_plain_torch(tmp_path: Path) -> None:
    """A13, first half.  The control: another block has another norm by far more than the tolerance, as has a
    part of the block.
    """
    job = small_job(tmp_path, model_args=FREE_OF_DROPOUT, watch={"every": 1})
    world = World.alone(torch.device("cpu"), generation=1)
    try:
        outcome, layers, tensors = of_plain_torch(world, job)
    finally:
        world.close()
    assert set(outcome.layer_norms) == set(layers) and {
        "layers.0",
        "layers.1",
        "layers.2",
        "embedding",
    } <= set(layers)
    assert outcome.layer_norms == pytest.approx(layers, rel=1e-5)
    assert sum(norm**2 for norm in outcome.layer_norms.values()) == pytest.approx(outcome.norm**2, rel=1e-12)
    assert metrics(outcome) | {
        "norm/layers.1": outcome.layer_norms["layers.1"],
        "loss": outcome.loss,
    } == metrics(outcome)
    assert layers["layers.0"] != pytest.approx(layers["layers.1"], rel=1e-3)
    assert all(layers["layers.0"] != pytest.approx(norm, rel=1e-3) for norm in tensors.values())


def test_the_sum_of_the_library_gives_other_bits(ranks: Ranks, tmp_path: Path) -> None:
    """The control of the equal bits in ``test_covering.py``: they come from the ordered reduction.  The norms
    are near all the same.

    Norms are told in each second step, and differ from record to record.
    """
    alone = train_here(small_job(tmp_path / "alone", watch={"every": 2}), 4).outcomes
    assert [len(each.layers) > 3 for each in alone] == [False, True, False, True] and alone[
        1
    ].layers != alone[3].layers
    found = train(
        ranks, small_job(tmp_path, watch={"every": 2}, reproducible=False), Layout(1, 2), 2
    ).outcomes[1]
    assert found.layers != alone[1].layers
    assert found.layer_norms == pytest.approx(alone[1].layer_norms, rel=1e-4)


# ---- what is said


def test_a13_a_layer_without_a_gradient_is_named_within_the_patience(tmp_path: Path) -> None:
    """A13, second half: its output is multiplied by zero, and three records later that is said once.  The
    control: a healthy model.
    """
    watch = {"every": 1, "patience": 3}
    own = {"model_args": {}, "watch": watch}
    found = warnings_of(told(tmp_path / "idle", model="tests.engine.test_layers:multiplied_by_zero", **own))
    assert [*found] == [3]
    assert found[3].startswith(
        "the gradient of layers.1 (0) is zero in 3 records in a row, the last of step 3: the loss "
        "does not depend on this layer"
    )
    assert warnings_of(told(tmp_path / "own", model="tests.support.toys:own", **own)) == {}


@pytest.mark.parametrize(
    ("args", "step", "says"),
    [
        (
            {"factor": 1e-8},
            3,
            (
                r"the gradient of layers\.1 \(\d\S+\) is less than watch.vanishing = 1e-06 of that of \w+, .* 3 "
                r"records in a row"
            ),
        ),
        (
            {"factor": 1e4, "since": 4 * 4},
            5,
            (
                r"the gradient of layers\.1 \(\S+\) is more than watch.exploding = 100 times its usual one at "
                r"step 5"
            ),
        ),
        (
            {"factor": "nan", "since": 4 * 4 + 3},
            5,
            (
                r"the gradient of layers\.1 is the first one in the backward pass of step 5 that is not finite "
                r"\(nan\)"
            ),
        ),
        (
            {"factor": "nan", "since": 4 * 4, "alone": False},
            5,
            r"the gradient of layers\.1 is the first one in the backward pass of step 5 ",
        ),
        ({"factor": 1.0}, 0, ""),
    ],
    ids=str,
)
def test_a13_what_is_wrong_with_a_layer_is_said_once(
    tmp_path: Path, args: dict[str, Any], step: int, says: str
) -> None:
    """A13.  What is not finite is told although no record is due, and the step in which it began is skipped.
    The last is the control.
    """
    watch = {"every": 100 if args["factor"] == "nan" else 1, "patience": 3}
    found = warnings_of(told(tmp_path, model="tests.engine.test_layers:ailing", model_args=args, watch=watch))
    assert [*found] == ([step] if step else [])
    if step:
        assert re.match(says, found[step]), found


def test_a_scaled_loss_has_the_norms_of_any_other(tmp_path: Path) -> None:
    """The scale of fp16 is taken out."""
    settings: Any = {"model_args": FREE_OF_DROPOUT, "watch": {"every": 2}, "steps": 2}
    changes = {}, {"precision": "fp16", "loss_scale": 64.0}
    runs = [told(tmp_path / str(number), **settings, **each) for number, each in enumerate(changes)]
    plain, scaled = ([line.layers for line in lines if isinstance(line, StepLine)] for lines in runs)
    assert len(scaled[1]) > 4 and scaled[1] == pytest.approx(plain[1], rel=0.02)


def test_a_dynamic_scale_that_is_too_large_is_no_matter_of_a_layer(tmp_path: Path) -> None:
    """Its steps are skipped and tell nothing.  The control: a scale of the user's own, which stays as it is."""
    ill = {
        "model": "tests.engine.test_layers:ailing",
        "model_args": {"factor": 1e4, "alone": False},
        "precision": "fp16",
    }
    lines = told(tmp_path / "dynamic", **ill, watch={"every": 1})
    assert not next(line.layers for line in lines if isinstance(line, StepLine))
    assert not any("finite" in text for text in warnings_of(lines).values())
    found = warnings_of(told(tmp_path / "fixed", **ill, loss_scale=1024.0, watch={"every": 1}))
    assert [*found] == [1] and found[1].startswith(
        "the gradient of layers.1 is the first one in the backward pass of step 1 that"
    )


# ---- depth


def deep(norm: str, layers: int) -> nn.Module:
    """A deep model at Xavier's initialisation."""
    model = gpt2.build(vocab=29, dim=32, layers=layers, heads=4, length=16, norm=norm)
    plain = model.init_weights

    def init_weights() -> None:
        plain()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.startswith("layers."):
                nn.init.xavier_normal_(parameter)

    model.init_weights = init_weights
    return model


def profile(folder: Path, norm: str) -> tuple[float, str]:
    """Returns the norm of the second to fifth blocks over that of the last four, in the first step, and what
    a replay shows of the step.
    """
    job = small_job(
        folder,
        model="tests.engine.test_layers:deep",
        model_args={"norm": norm, "layers": 24},
        watch={"every": 1},
    )
    world = World.alone(torch.device("cpu"), generation=1)
    try:
        with member(world, job, Version(0, 0)) as me:
            outcome = me.step()
    finally:
        world.close()
    play = stepping(1)
    begun, before, event = codec.snapshot(play.run), play.run, StepDone(play.plan.members[0], 1, outcome)
    play.tell(event)
    (_, line) = tell([(begun, [codec.record(1, 0.0, event, before, play.last)])], layers=True)
    blocks = [outcome.layer_norms[f"layers.{number}"] for number in range(24)]
    return sum(blocks[1:5]) / sum(blocks[-4:]), line.strip()


def test_a9_the_log_of_deep_runs_shows_what_the_place_of_norms_does(tmp_path: Path) -> None:
    """A9: with norms before the parts, the gradient becomes smaller the deeper the block; with norms after
    the sums it hardly does (Xiong and others 2020).  Each is the other's control.
    """
    falls, said = profile(tmp_path / "pre", "pre")
    stays, _ = profile(tmp_path / "post", "post")
    assert falls > 3 and 1 / 1.5 < stays < 1.5
    assert said.startswith("norms of step 1: embedding ") and said.count("layers.") == 24
    assert [each.split()[0] for each in said.split(": ")[1].split(", ")][-2:] == ["layers.23", "norm"]
