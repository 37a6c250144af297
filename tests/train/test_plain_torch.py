"""U1: the engine does what plain torch does with a module, in every layout, or refuses it by a sentence that
names the tensor.

The oracle is plain torch in one process: the model, the loss and an optimizer of ``torch.optim``, on the
samples that Elastic draws.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from elastic.engine.world import World
from elastic.errors import ModelError, StateChanged
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.alone.local import run_local
from tests.support.plain_models import (
    ADAMW,
    CPU,
    HALVES,
    STEPS,
    TWO,
    WIDTH,
    WORDS,
    Assigned,
    Batch,
    Net,
    adamw,
    job_of,
    loss,
    plainly,
    sgd,
    values_of,
)
from tests.support.ranks import Ranks
from tests.support.segments import member, segment, train, train_here
from tests.support.toys import BatchNormed, Own, toy_job

HERE = "tests.train.test_plain_torch"

# ---- what is kept


class Scaled(nn.Parameter):
    """A parameter with a method of its own."""

    def doubled(self) -> Tensor:
        return 2 * self


def half_of_the_rows(grad: Tensor) -> Tensor:
    return grad * (torch.arange(WORDS, device=grad.device) >= 9)[:, None].to(grad.dtype)


class Kept(Net):
    """A hook that leaves rows alone, a class and an attribute of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Scaled(torch.empty(3))
        self.gain.factor = 0.25  # type: ignore[attr-defined]
        self.embed.weight.register_hook(half_of_the_rows)

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) * self.gain.doubled() * self.gain.factor  # type: ignore[attr-defined]


class Unhooked(Kept):
    """The control of :class:`Kept`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight._backward_hooks.clear()  # type: ignore[union-attr]


class Warm(Kept):
    """A temperature without dimensions, as the ``logit_scale`` of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.empty(()))

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) * self.temperature.exp()


class Unused(Net):
    """A pooler that the task does not use, and a head that only some microbatches do."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, t: Tensor) -> Tensor:
        out = super().forward(t)
        return out + self.second(self.embed(t)) if bool((t[:, 0] == 4).any()) else out


@pytest.mark.parametrize(
    ("kind", "layouts", "optimizer"),
    [
        (Kept, [(TWO, {}), (HALVES, {"zero": 3})], sgd),
        (Warm, [(TWO, {}), (HALVES, {"zero": 2})], sgd),
        (Unused, [(TWO, {}), (HALVES, {"zero": 2})], adamw),
    ],
)
def test_u1_every_layout_has_the_weights_of_plain_torch(
    ranks: Ranks, tmp_path: Path, kind: type[nn.Module], layouts: Any, optimizer: Any
) -> None:
    changes = {"optim": ADAMW} if optimizer is adamw else {}
    job = job_of(tmp_path / "one", kind, **changes)
    one, expected = train_here(job, STEPS), plainly(kind, optimizer)
    found = values_of(job)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].view(value.shape), value, rtol=1e-5, atol=1e-6)
    for number, (layout, parallel) in enumerate(layouts):
        assert (
            train(
                ranks, job_of(tmp_path / str(number), kind, parallel=parallel, **changes), layout, STEPS
            ).hash
            == one.hash
        )


def test_without_the_hook_the_weights_are_others() -> None:
    """Control: the comparison notices a hook that is thrown away."""
    kept, lost = plainly(Kept, sgd), plainly(Unhooked, sgd)
    assert not torch.allclose(kept["embed.weight"], lost["embed.weight"], rtol=1e-3)


def test_a_parameter_without_a_gradient_decayed_before_numerics_5(tmp_path: Path) -> None:
    """Control, and the rule of older runs, which go on with theirs."""
    begins, found = plainly(Unused, lambda ps: torch.optim.SGD(ps, lr=0.0)), []
    for numerics in (4, 5):
        job = job_of(tmp_path / str(numerics), Unused, optim=ADAMW, numerics=numerics)
        train_here(job, STEPS)
        found.append(torch.equal(values_of(job)["pooler.weight"], begins["pooler.weight"]))
    assert found == [False, True]


def test_a_parameter_without_dimensions_cannot_be_in_stage_3(tmp_path: Path) -> None:
    from elastic.train.checks.preflight import preflight

    with pytest.raises(ModelError, match=r"parallel\.zero = 3: 'temperature' of .* has no dimensions"):
        preflight(job_of(tmp_path, Warm, parallel={"zero": 3}, workers={"max": 2}))


# ---- what is refused in the step in which it happens


class Bounded(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, max_norm=0.9)


class Taught(Net):
    """A teacher that is averaged in the forward pass, as in MoCo and BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 3).requires_grad_(False)

    def before(self, t: Tensor) -> None:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
            self.teacher(self.embed(t))


class Replaced(Net):
    def before(self, t: Tensor) -> None:
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)

    def before(self, t: Tensor) -> None:
        self.embed.weight.requires_grad_(True)


class Grown(Net):
    def before(self, t: Tensor) -> None:
        if not hasattr(self, "more"):
            self.more = nn.Parameter(torch.zeros(3))


class Registered(Net):
    """It registers a statistic when it first runs."""

    def before(self, t: Tensor) -> None:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", t.float().mean())


class Filled(Net):
    """A statistic that a checkpoint would have, if it was there when the model was built."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", None)

    def before(self, t: Tensor) -> None:
        if self.centre is None:
            self.centre = t.float().mean()


class Flagged(Net):
    """Whole numbers beside a statistic, which is written to behind torch's back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(6))
        self.register_buffer("average", torch.zeros(()))

    def before(self, t: Tensor) -> None:
        self.average.data.lerp_(t.float().mean(), 0.1)


REFUSED: dict[type, str] = {
    Bounded: "changed the parameter 'embed.weight' of",
    Taught: r"changed the parameter 'teacher.weight' of.* set optim\.average",
    Assigned: ("changed the parameter 'head.weight' of|replaced the parameter 'head.weight'"),
    Replaced: "replaced the parameter 'head.weight' of",
    Thawed: (
        "requires_grad of the parameter 'embed.weight' of .* is True now, but was False|changed the "
        "parameter 'embed.weight'"
    ),
    Grown: "added the parameter 'more' to the model of",
    Registered: "added the buffer 'mean' to the model of",
    Filled: "added the buffer 'centre' to a buffer that was None",
    Flagged: "changed the buffer 'average' of",
}


def refusal(world: World, job: Job, version: Version, last: int) -> str:
    """Returns what a member says that trains, or "" if nothing is wrong."""
    try:
        segment(world, job, version, last)
    except StateChanged as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "zero"), [(TWO, 0), (HALVES, 2), (HALVES, 3)], ids=["two replicas", "stage 2", "stage 3"]
)
def test_u1_a_change_of_the_state_is_refused_by_name(
    ranks: Ranks, tmp_path: Path, layout: Layout, zero: int
) -> None:
    """The control is the model that none of them has changed."""
    # FSDP2 knows nothing of such a parameter
    kinds = [kind for kind in REFUSED if not (zero == 3 and kind in (Replaced, Grown))]
    jobs = [job_of(tmp_path / kind.__name__, kind, parallel={"zero": zero}) for kind in (*kinds, Net)]
    found = ranks.run_each(layout, refusal, [(job, Version(0, 0), 1) for job in jobs])
    assert found.pop() == ["", ""]
    for kind, said in zip(kinds, found, strict=True):
        assert all(re.search(REFUSED[kind], each) for each in said), (kind, said)


# ---- what init_weights() may do


class Freezing(Net):
    def init_weights(self) -> None:
        super().init_weights()
        self.embed.requires_grad_(False)


class Tying(Net):
    def init_weights(self) -> None:
        super().init_weights()
        self.layers[1][0].weight.data = self.layers[0][0].weight.data  # type: ignore[index, union-attr]


class Adding(Net):
    def init_weights(self) -> None:
        super().init_weights()
        self.register_buffer("table", torch.ones(3))


class Hooking(Net):
    def init_weights(self) -> None:
        super().init_weights()
        self.embed.weight.register_hook(half_of_the_rows)


class Overlapping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Parameter(self.head.weight.data)


class Late(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(3)  # type: ignore[assignment]


class Optimizing(Net):
    """An update within the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class Orthogonal(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.orthogonal(nn.Linear(WIDTH, 3))


class Reading(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Freezing, r"init_weights\(\) froze 'embed\.weight'; freeze it in the constructor or in build\(\)"),
        (
            Tying,
            (r"after init_weights\(\) 'layers\.0\.0\.weight' and 'layers\.1\.0\.weight' share memory"),
        ),
        (Adding, r"init_weights\(\) added 'table' to the model"),
        (Hooking, r"init_weights\(\) changed the hooks on the gradient of 'embed\.weight'"),
        (Overlapping, r"'head\.weight' and 'tied' of .* are two tensors that share memory"),
        (Late, r"'head\.weight' of .* has no shape before the first forward pass"),
        (Optimizing, r"'head\.weight' of .* has a hook of register_post_accumulate_grad_hook"),
        (
            Orthogonal,
            (
                r"the constructor makes 'head\.parametrizations\.weight\.0\.base' on a real "
                r"device.*use_trivialization=False"
            ),
        ),
        (
            Reading,
            (
                r"Tensor\.item\(\) cannot be called on meta tensors.*torch\.linspace\(0, 0\.3, 3, "
                r"device='cpu'\)"
            ),
        ),
    ],
)
def test_u1_a_model_is_what_its_constructor_made(tmp_path: Path, kind: type, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        train_here(job_of(tmp_path, kind), 1)


# ---- a loop of the user's


def clamping(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        with torch.no_grad():
            model.head.weight.clamp_(-0.1, 0.1)
        step.commit()


def clipping(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        step.commit()


def clamping_data(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        step.commit()
        model.head.weight.data.clamp_(-0.1, 0.1)


def clamping_later(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        step.run()
        step.commit()
        with torch.no_grad():
            model.head.weight.clamp_(-0.1, 0.1)


def thawing(ctx: Any) -> None:
    model = ctx.build().model
    for step in ctx.steps():
        if step.number == 2:
            model.head.requires_grad_(False)
        step.run()
        step.commit()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (clamping, r"changed the parameter 'head\.weight'"),
        (clipping, r"uses or changes parameter\.grad of"),
        (clamping_data, r"changed the parameter 'head\.weight'"),
        (clamping_later, r"changed the parameter 'head\.weight'"),
        (thawing, r"requires_grad of the parameter 'head\.weight' .* is False now, but was True"),
    ],
)
def test_a_loop_changes_no_parameter_either(tmp_path: Path, loop: Callable[[Any], None], said: str) -> None:
    with pytest.raises(StateChanged, match=said):
        run_local(job_of(tmp_path, Net, loop=f"{HERE}:{loop.__name__}", trial=False), lambda line: None)


def test_a_step_of_one_worker_is_guarded(tmp_path: Path) -> None:
    world = World.alone(CPU)
    try:
        for kind in (Bounded, Flagged, Own, BatchNormed):
            job = (
                job_of(tmp_path, kind)
                if kind in REFUSED
                else toy_job(tmp_path, model=f"tests.support.toys:{kind.__name__}", model_args={})
            )
            with member(world, job, Version(0, 0)) as me:
                if kind in REFUSED:
                    with pytest.raises(StateChanged, match=REFUSED[kind]):
                        me.step()
                else:
                    me.step()
    finally:
        world.close()


class Falling(Net):
    """Dropout, and a loss that leaves the model in evaluation."""

    def forward(self, t: Tensor) -> Tensor:
        return F.dropout(super().forward(t), 0.5, self.training)


def loss_that_evaluates(model: nn.Module, batch: Batch) -> Any:
    found = loss(model, batch)
    model.eval()
    with torch.no_grad():
        model(batch["t"])
    return found


def test_u1_each_microbatch_is_computed_in_training_mode(ranks: Ranks, tmp_path: Path) -> None:
    """It does not matter who computed the one before."""
    jobs = [job_of(tmp_path / str(n), Falling, loss=f"{HERE}:loss_that_evaluates") for n in range(2)]
    assert train_here(jobs[0], STEPS).hash == train(ranks, jobs[1], TWO, STEPS).hash
