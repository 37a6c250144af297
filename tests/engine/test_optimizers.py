"""Every optimizer computes what torch.optim does, does not notice how its tensors are cut, and keeps its
state through reshapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elastic.config.optimizers import OPTIMIZERS
from elastic.config.sections import Optim
from elastic.engine.optim import base
from elastic.engine.optim.base import Hyper, Optimizer, Part, rule_of
from elastic.engine.optim.schedule import learning_rate_of
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome
from elastic.runs.run import Run
from tests.engine.test_bits import plain_training
from tests.support.live import Live
from tests.support.ranks import Ranks
from tests.support.segments import finish, member, train, train_here
from tests.support.toys import small_job
from tests.support.worlds import STEPS

ROWS, COUNT, LR, PENALTY = 23, 50, 1e-2, 0.1
KINDS = sorted({*OPTIMIZERS} - {"muon"})
"""The optimizers that need no whole matrices; test_muon has the other one."""


def job_of(kind: str, bucket: Path | str = "/nowhere", **optim: Any) -> Job:
    return small_job(
        bucket, optim={"kind": kind, "lr": LR, **optim}, schedule={"warmup_steps": 2}, steps=COUNT
    )


def test_a_row_names_a_rule_and_settings_and_a_trial_compares_what_torch_has_too() -> None:
    rows = {kind: rule_of(job_of(kind)) for kind in OPTIMIZERS}
    assert {kind for kind, rule in rows.items() if rule.in_torch is not None} == {"adamw", "sgd"}
    assert all({*each.reads} <= {*Optim.model_fields} for each in OPTIMIZERS.values())


def outcome(step: int, norm: float = 0.5) -> Outcome:
    """Returns the outcome of a step with one token, so that the mean gradient is the sum; a norm of 0.5 is
    not clipped.
    """
    return Outcome(step, 1, norm**2, (1.0,), (1,), ((0,),), True)


def gradients(steps: int, dtype: torch.dtype = torch.float64) -> Iterator[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield {
            "matrix": torch.randn(ROWS, 5, generator=draw, dtype=dtype),
            "vector": torch.randn(13, generator=draw, dtype=dtype),
        }


def begun() -> dict[str, Tensor]:
    return next(gradients(1))


def pieces(whole: dict[str, Tensor], cuts: Sequence[int]) -> dict[str, Tensor]:
    """Returns the rows of the matrix in pieces, and the vector."""
    found = {f"matrix {a:04}": whole["matrix"][a:b].clone() for a, b in pairwise((0, *cuts, ROWS))}
    return found | {"vector": whole["vector"].clone()}


def trained(job: Job, steps: int, cuts: Sequence[int] = (), then: Sequence[int] = ()) -> dict[str, Tensor]:
    """Trains the matrix and the vector, cut at ``cuts``, and from the middle on at ``then``, to which the
    state moves.

    Returns values and moments of the whole matrix, and the values of the vector.
    """
    mine = Optimizer(
        job,
        rule_of(job),
        (first := pieces(begun(), cuts)),
        dict.fromkeys(first, ()),
        frozenset(first) - {"vector"},
    )
    for step, grads in enumerate(gradients(steps), 1):
        if step == steps // 2 + 1:
            mine, cuts = moved(job, mine, then), then
        mine.apply(pieces(grads, cuts), outcome(step))
    return whole_of(mine)


def moved(job: Job, old: Optimizer, cuts: Sequence[int]) -> Optimizer:
    """Returns an optimizer with the values and the moments of another one, cut anew."""
    whole = whole_of(old)
    values = pieces({"matrix": whole["values"], "vector": whole["vector"]}, cuts)
    new = Optimizer(job, old.rule, values, dict.fromkeys(values, ()), frozenset(values) - {"vector"})
    new.updates.copy_(old.updates)
    for kind in old.rule.moments:
        cut = pieces({"matrix": whole[kind], "vector": old.parts["vector"].moments[kind]}, cuts)
        for name, part in new.parts.items():
            part.moments[kind].copy_(cut[name])
    return new


def whole_of(mine: Optimizer) -> dict[str, Tensor]:
    parts = [mine.parts[name] for name in sorted(mine.parts) if name != "vector"]
    moments = {kind: torch.cat([part.moments[kind] for part in parts]) for kind in mine.rule.moments}
    return {
        "values": torch.cat([part.values for part in parts]),
        "vector": mine.parts["vector"].values,
        **moments,
    }


def judge(job: Job, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns torch's optimizer; what torch.optim.AdamW decouples, the others add to the gradient."""
    optim = job.optim
    matrices, vectors = (
        [value for value in parameters.values() if (value.dim() > 1) is many] for many in (True, False)
    )
    groups: Any = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors}]
    match optim.kind:
        case "adamw" if optim.decay == "decoupled":
            groups[1]["weight_decay"] = 0.0
            return torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
        case "adamw":
            return torch.optim.Adam(groups, betas=optim.betas, eps=optim.eps)
        case "sgd":
            return torch.optim.SGD(groups, momentum=optim.momentum)
        case "adagrad":
            return torch.optim.Adagrad(groups, eps=optim.eps)
        case "rmsprop":
            return torch.optim.RMSprop(groups, alpha=optim.betas[1], eps=optim.eps)
    raise AssertionError(f"torch has no judge for {optim.kind!r}")


@pytest.mark.fast
@pytest.mark.parametrize(("kind", "decay"), [("adamw", "decoupled"), *((kind, "l2") for kind in KINDS)])
def test_fifty_steps_are_torchs(kind: str, decay: str) -> None:
    """A4: in float64, whole and in pieces whose cuts change after 25 steps.  The control: one step fewer
    gives another result.
    """
    job = job_of(kind, decay=decay, weight_decay=PENALTY)
    parameters = {name: torch.nn.Parameter(value) for name, value in begun().items()}
    theirs = judge(job, parameters)
    for step, grads in enumerate(gradients(COUNT), 1):
        for name, parameter in parameters.items():
            parameter.grad = grads[name].clone()
        for group in theirs.param_groups:
            group["lr"] = learning_rate_of(job, step)
        theirs.step()
    for cuts, then in (((), ()), ((3, 4, 17), (9,))):
        ours = trained(job, COUNT, cuts, then)
        torch.testing.assert_close(ours["values"], parameters["matrix"].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(ours["vector"], parameters["vector"].detach(), rtol=0, atol=1e-12)
    assert not torch.allclose(trained(job, COUNT - 1)["values"], parameters["matrix"], rtol=0, atol=1e-7)


@pytest.mark.fast
@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(KINDS),
    *[st.sets(st.integers(1, ROWS - 1), max_size=4).map(sorted)] * 2,
    st.sampled_from(("decoupled", "l2")),
)
def test_the_bits_do_not_depend_on_the_cuts(kind: str, cuts: list[int], then: list[int], decay: str) -> None:
    job = job_of(kind, decay=decay, weight_decay=PENALTY)
    whole, cut = trained(job, 6), trained(job, 6, cuts, then)
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.fast
@pytest.mark.parametrize("kind", ["adagrad", "rmsprop"])
def test_an_update_needs_little_memory_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F8: what fits in the memory model must fit in an update.  The control: in one turn the roots take as
    much as the squares.
    """
    job, values = job_of(kind), {f"{n:02}": torch.ones(50, 2) for n in range(40)}

    def taken(turn: int) -> tuple[int, Tensor]:
        monkeypatch.setattr(base, "TURN", turn)
        parts = {name: value.clone() for name, value in values.items()}
        mine = Optimizer(job, rule_of(job), parts, dict.fromkeys(parts, ()), frozenset())
        grads = {name: torch.full_like(value, 0.3) for name, value in parts.items()}
        with Live() as live:
            mine.apply(grads, outcome(1))
        return live.peak_bytes, torch.cat([*parts.values()])

    (few, found), (all_of_them, same) = taken(300), taken(40 * 100)
    assert few <= 4 * 300 + 64 and all_of_them >= 4 * 40 * 100 and torch.equal(found, same)


@pytest.mark.fast
@pytest.mark.parametrize("turn", [1, 20, 100])
@pytest.mark.parametrize("kind", ["adagrad", "rmsprop"])
def test_tensors_of_each_turn_get_their_own_gradients(
    kind: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor has another value, gradient and square.  The control: all in one turn, which torch judges
    above.
    """
    job = job_of(kind)
    whole = trained(job, 4, range(1, ROWS))
    monkeypatch.setattr(base, "TURN", turn)
    turns = trained(job, 4, range(1, ROWS))
    assert all(torch.equal(whole[name], turns[name]) for name in whole)


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["decoupled", "l2"])
def test_nor_do_they_in_16_bits(kind: str, decay: str) -> None:
    """Promise 1, for a model whose parameters are bfloat16: torch's kernels for CPUs round the end of a
    tensor in another way.
    """
    job, rows = job_of(kind, decay=decay, weight_decay=PENALTY), 1003

    def drawn(seed: int) -> Tensor:
        return torch.randn(rows, 1, generator=torch.Generator().manual_seed(seed)).bfloat16()

    def ended(*cuts: int) -> Tensor:
        places = {f"{a:04}": slice(a, b) for a, b in pairwise((0, *cuts, rows))}
        values = {name: drawn(0)[place].clone() for name, place in places.items()}
        mine = Optimizer(job, rule_of(job), values, dict.fromkeys(values, ()), frozenset(values))
        for step in range(1, 5):
            mine.apply(
                {name: drawn(step)[place].clone() for name, place in places.items()}, outcome(step, 2.0)
            )
        return torch.cat([mine.parts[name].values for name in sorted(places)])

    assert all(torch.equal(ended(), ended(*cuts)) for cuts in ((1,), (52,), (33, 70), (26, 52, 78)))


@pytest.mark.fast
def test_momentum_is_the_recurrence_to_the_bit() -> None:
    """A3: v ← μ·v + g and w ← w - lr·v in float64, bitwise, in pieces that change.  The control: another μ."""
    job = job_of("sgd", momentum=0.875, weight_decay=0.0)
    value, velocity = begun()["matrix"], torch.zeros(ROWS, 5, dtype=torch.float64)
    for step, grads in enumerate(gradients(20), 1):
        velocity = 0.875 * velocity + grads["matrix"]
        value = value - learning_rate_of(job, step) * velocity
    found = trained(job, 20, (2, 11), (5,))
    assert torch.equal(found["velocity"], velocity)
    torch.testing.assert_close(found["values"], value, rtol=0, atol=1e-15)
    assert not torch.equal(trained(job_of("sgd", momentum=0.75, weight_decay=0.0), 20)["velocity"], velocity)


@pytest.mark.fast
def test_the_two_forms_of_weight_decay() -> None:
    """A6: each config has its own update, by hand; what does not decay has the same in both.

    The first step of AdaGrad is lr × the sign of the gradient, so a penalty in it only matters where it turns
    the sign.
    """
    lr, weight_decay = 0.25, 0.5
    values, grads = torch.tensor([[4.0, -4.0, 4.0]]), torch.tensor([[1.0, 1.0, -1.0]])
    expected = {
        "decoupled": [[4.0 * 0.875 - 0.25, -4.0 * 0.875 - 0.25, 4.0 * 0.875 + 0.25]],
        "l2": [[3.75, -3.75, 3.75]],
    }
    for decay, want in expected.items():
        optim = {"kind": "adagrad", "lr": lr, "eps": 1e-30, "decay": decay, "weight_decay": weight_decay}
        job = small_job("/nowhere", optim=optim, schedule={"kind": "constant"})
        mine = Optimizer(
            job,
            rule_of(job),
            {"w": values.clone(), "b": values.clone()},
            {"w": (), "b": ()},
            frozenset({"w"}),
        )
        mine.apply({"w": grads.clone(), "b": grads.clone()}, outcome(1))
        assert mine.parts["w"].values.tolist() == want
        assert mine.parts["b"].values.tolist() == [[3.75, -4.25, 4.25]], (
            "what does not decay is the same in both"
        )


EXACT: dict[str, Any] = {
    "model": "tests.engine.test_bits:double",
    "model_args": {"vocab": 29, "dim": 16, "layers": 1, "heads": 2},
    "loss": "tests.engine.test_bits:exact_next_token",
    "data": {"dataset": "tests.support.toys:Sums", "args": {"masked": False}},
    "global_batch": 4,
}
"""A small model in float64."""


OTHERS = [pytest.param(kind, "l2", marks=pytest.mark.full) for kind in ("adamw", "adagrad", "rmsprop")]


@pytest.mark.parametrize(("kind", "decay"), [("adamw", "decoupled"), *OTHERS])
def test_fifty_steps_of_worlds_that_share_their_state_are_torchs(
    ranks: Ranks, tmp_path: Path, kind: str, decay: str
) -> None:
    """A4: two workers share the moments (ZeRO-1) and save at step 25; three go on from there, to what
    torch.optim does in a plain loop.

    torch's clipping adds 1e-6 to the norm, so nothing is clipped.  The control: torch is one step behind.
    """
    job = job_of(kind, tmp_path, decay=decay, weight_decay=PENALTY, clip_norm=1e9).replace(
        **EXACT, parallel={"zero": 1}
    )
    first = train(ranks, job, Layout(1, 2), COUNT // 2)
    last = train(ranks, job, Layout(1, 3), COUNT, first.version).version
    reader = Run.open(job).checkpoints.open(last)
    stored = {tensor.name: tensor for tensor in reader.tensors() if tensor.kind == "parameter"}

    def furthest(steps: int) -> float:
        expected, _ = plain_training(job, steps, judge)
        assert expected["parameter"].keys() == stored.keys()
        distances = []
        for name, value in expected["parameter"].items():
            ((_, raw),) = reader.read([stored[name].whole()])
            distances.append(
                (torch.frombuffer(bytearray(raw), dtype=torch.float64).view(value.shape) - value)
                .abs()
                .max()
                .item()
            )
        return max(distances)

    assert furthest(COUNT) <= 1e-7 < 1e-5 < furthest(COUNT - 1)


def recurrence(world: World, job: Job, version: Version, last: int, mu: float) -> tuple[bool, Any]:
    """Trains to ``last``.  Returns whether all velocities are those of v ← μ·v + g, to the bit, and what was
    saved.
    """
    with member(world, job, version) as me:
        optimizer, holds = me.state.optimizer, []
        update = optimizer.rule.update

        def watched(parts: list[Part], grads: list[Tensor], hyper: Hyper) -> None:
            expected = [mu * part.moments["velocity"] + grad for part, grad in zip(parts, grads, strict=True)]
            update(parts, grads, hyper)
            holds.append(
                all(
                    torch.equal(part.moments["velocity"], value)
                    for part, value in zip(parts, expected, strict=True)
                )
            )

        optimizer.rule = replace(optimizer.rule, update=watched)
        while me.state.shard.version.step < last:
            me.step()
        assert {part.values.dtype for part in optimizer.parts.values()} == {torch.float64} and len(
            holds
        ) == last - version.step
        return all(holds), me.save()


def test_momentum_is_the_recurrence_in_shards_and_after_a_reshape(ranks: Ranks, tmp_path: Path) -> None:
    """A3: in float64, in 2×2, and from the bucket in 1×3, with the bits of one worker.  The control: another
    μ.
    """
    job, alone = (
        job_of("sgd", tmp_path / name, momentum=0.875).replace(**EXACT) for name in ("run", "alone")
    )
    told = ranks.run(Layout(2, 2), recurrence, job, Version(0, 0), 3, 0.875)
    saved = Version(3, ranks.generation)
    finish(job, Layout(2, 2), [receipt for _, receipt in told], saved)
    after, control = ranks.run_each(
        Layout(1, 3), recurrence, [(job, saved, STEPS, 0.875), (job, saved, STEPS, 0.75)]
    )
    assert all(holds for holds, _ in (*told, *after))
    assert finish(
        job,
        Layout(1, 3),
        [receipt for _, receipt in after],
        Version(STEPS, ranks.generation),
        ((saved.generation, 3),),
    ) == (train_here(alone, STEPS).hash)
    assert not any(holds for holds, _ in control)
