"""Weights in host memory that visit the device: how many are there at once, what comes while what runs, and
the bits.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from elastic.engine.blocks import sharding_table
from elastic.engine.host_memory import host_memory
from elastic.engine.optim.base import rule_of
from elastic.engine.parameters import visits
from elastic.engine.parameters.visits import Visits, parameters_of
from elastic.engine.parameters.whole import Whole
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.copy_budget import slots_a_worker
from elastic.plan.layout import Layout
from elastic.train import session
from elastic.train.checks.estimate import classes
from elastic.train.gauges.counters import Counters
from elastic.train.machine.device import need_of
from elastic.train.model import build_model, builder_of, bytes_of, tensors_of
from elastic.train.own_faults import Faults
from tests.engine.test_gathers import Sideways
from tests.engine.test_gathers import loss as sideways
from tests.engine.test_offload import LARGE, living
from tests.support.ranks import Ranks
from tests.support.segments import (
    Member,
    Trained,
    compute,
    here,
    member,
    segment,
    train,
    train_each,
    train_here,
)
from tests.support.toys import Own, small_job

LAYERS = 4


def visiting(folder: Path | str, zero: int = 2, **changes: Any) -> Job:
    return small_job(folder, **{"offload": "weights", "parallel": {"zero": zero}, **changes})


# ---- the bits


def stale(world: World, job: Job, last: int) -> Any:
    """Trains while the host's memory keeps the weights of the first step."""
    take = Whole.take

    def once(self: Whole, name: str, values: Tensor) -> None:
        if not self._fresh:
            take(self, name, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Whole, "take", once)
        return segment(world, job, Version(0, 0), last)


def test_the_losses_see_weights_that_an_update_has_not_written(
    ranks: Ranks, reference: Trained, tmp_path: Path
) -> None:
    """F3, the control: the second step computes with the weights of the first one."""
    found = ranks.run(Layout(1, 2), stale, visiting(tmp_path), 2)[0].outcomes
    assert found[0].loss == reference.outcomes[0].loss and found[1].loss != reference.outcomes[1].loss


class Adapted(Own):
    """A model of which only small matrices in its blocks are trained, beside frozen layers (LoRA; Hu and
    others 2021).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter(self.mix.in_features) for _ in range(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)


class Adapter(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.layer, self.adapter = (
            nn.LayerNorm(dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.norm(x))) + self.adapter(x)


ADAPTED: dict[str, Any] = {"model": f"{__name__}:Adapted", "model_args": {}}


@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": "block", **ADAPTED},
        pytest.param({"recompute": "selective", **ADAPTED}, marks=pytest.mark.full),
        pytest.param({"recompute": "sqrt", **ADAPTED}, marks=pytest.mark.full),
        pytest.param({"reproducible": False}, marks=pytest.mark.full),
        pytest.param({"compile": True, "recompute": "none"}, marks=pytest.mark.full),
        pytest.param({"compile": True, "recompute": "block", "precision": "bf16"}, marks=pytest.mark.full),
        pytest.param({"compile": True, "recompute": "sqrt"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_whatever_a_block_keeps_the_bits_are_the_same(
    ranks: Ranks, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A block that is computed again needs its weights again; other hooks of autograd are round those for
    weights.

    ``test_covering.py`` has what is not here, in every layout.
    """
    jobs = [
        small_job(tmp_path / "resident", parallel={"zero": 2}, **changes),
        visiting(tmp_path / "visiting", **changes),
    ]
    resident, found = train_each(ranks, jobs, Layout(1, 2), 2)
    assert found.hash == resident.hash and [each.loss for each in found.outcomes] == [
        each.loss for each in resident.outcomes
    ]


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_is_there_wherever_it_is_used(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """The model calls none of its blocks, reads weights of one in another's place, and some in the loss."""
    place = "tests.engine.test_gathers"
    own: dict[str, Any] = {
        "model": f"{place}:Sideways",
        "model_args": {},
        "loss": f"{place}:loss",
        "precision": precision,
    }
    resident = train_here(small_job(tmp_path / "resident", **own), 3)
    assert train_here(visiting(tmp_path / "one", **own), 3).hash == resident.hash
    assert train(ranks, visiting(tmp_path / "two", **own), Layout(1, 2), 3).hash == resident.hash


# ---- memory


class Observed:
    """Notes which groups come, which blocks run, and how many bytes of weights are on the device then.

    Each visit is new memory; it counts as long as anybody has it.
    """

    def __init__(self, model: nn.Module, held: Visits) -> None:
        self.order, self.living, self._memory = (
            list[str](),
            dict[str, list[int]](),
            dict[StorageWeakRef, int](),
        )
        self._numbers = {group.host.data_ptr(): number for number, group in enumerate(held._groups)}
        for number, name in enumerate(sharding_table(model).blocks, 1):
            inner = next(
                module for module in model.get_submodule(name).modules() if isinstance(module, nn.Linear)
            )
            inner.register_forward_hook(partial(self._ran, number))

    def bring(self, host: Tensor, device: torch.device) -> Any:
        memory, event = BRING(host, device)
        self._memory[StorageWeakRef(memory.untyped_storage())] = memory.nbytes
        self.order.append(f"bring {self._numbers[host.data_ptr()]}")
        return memory, event

    def _ran(self, number: int, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.note(f"block {number}")
        output.register_hook(lambda _: self.note(f"back {number}"))

    def note(self, what: str) -> None:
        self.order.append(what)
        self.living.setdefault(what, []).append(self.there())

    def there(self) -> int:
        return sum(size for memory, size in self._memory.items() if not memory.expired())


BRING = visits.bring


@contextmanager
def observed(me: Member) -> Iterator[Observed]:
    """Watches the weights of a member."""
    assert isinstance(me.state.parameters, Whole) and me.state.parameters._visits is not None
    found = Observed(me.state.model, me.state.parameters._visits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(visits, "bring", found.bring)
        yield found


def seen(world: World, job: Job, broken: str) -> tuple[list[str], dict[str, list[int]], list[int], list[int]]:
    """Runs a step of one round.  Returns the order of events, the bytes of weights on the device at each,
    those between the passes and after the update, and the bytes of each group.

    ``broken``: "kept" lets autograd keep weights, and "late" lets nothing come ahead.
    """
    with pytest.MonkeyPatch.context() as patch, member(world, job, Version(0, 0), prefetch=0) as me:
        if broken == "kept":
            patch.setattr(Visits, "_pack", lambda self, outer, tensor: tensor.detach())
        if broken == "late":
            need = Visits.need
            patch.setattr(Visits, "need", lambda self, number, step: need(self, number, 0))
            patch.setattr(Visits, "turn", lambda self: setattr(self, "_backward", True))
        me.step()
        with observed(me) as found:
            end = Whole.end_forward
            patch.setattr(Whole, "end_forward", lambda self: (found.note("forward ends"), end(self)))
            me.step()
            after = found.there()
        assert isinstance(me.state.parameters, Whole) and me.state.parameters._visits is not None
        sizes = [group.bytes for group in me.state.parameters._visits._groups]
        return found.order, found.living, [*found.living["forward ends"], after], sizes


ONE_ROUND: dict[str, Any] = {"global_batch": 4, "microbatch": 4, "model_args": LARGE}


@pytest.mark.parametrize(
    ("members", "recompute"),
    [
        (2, "none"),
        *(
            pytest.param(1, policy, marks=pytest.mark.full)
            for policy in ("none", "block", "sqrt", "selective")
        ),
    ],
)
def test_c6_weights_are_on_the_device_only_while_their_block_runs(
    ranks: Ranks, tmp_path: Path, members: int, recompute: str
) -> None:
    """C6, F3: the rest and two blocks, of which one is on its way; only the rest between the passes, and
    nothing after the update.

    The control: where autograd keeps weights, those of all blocks live when the forward pass ends.
    """
    job = visiting(tmp_path, **ONE_ROUND | {"global_batch": 4 * members}, recompute=recompute)
    cases = [(job, ""), (job, "kept")][: 2 if recompute == "none" else 1]
    (_, at, between, sizes), *control = (
        found[0] for found in ranks.run_each(Layout(1, members), seen, cases)
    )
    rest, block = sizes[0], sizes[1]
    assert sizes[1:] == [block] * LAYERS and block > 4 * LARGE["dim"] ** 2 * 4
    assert between == [rest, 0]
    for number in range(1, LAYERS + 1):
        assert at[f"block {number}"][0] == rest + block * (2 if number < LAYERS else 1)
        assert (len(at[f"block {number}"]) > 1) == (recompute != "none") and at[f"back {number}"]
    assert max(size for found in at.values() for size in found) <= rest + 2 * block
    assert all(kept[0] == rest + LAYERS * block for _, _, kept, _ in control)


def test_c6_the_weights_of_the_next_block_come_before_a_block_runs(tmp_path: Path) -> None:
    """C6, F3: transfers are begun one block ahead in both passes.  In the control each begins when its block
    needs it.
    """
    job = visiting(tmp_path, **ONE_ROUND)
    order, *_ = here(seen, job, "")
    forward = [word for n in range(1, LAYERS) for word in (f"bring {n + 1}", f"block {n}")]
    backward = [word for n in range(LAYERS, 1, -1) for word in (f"bring {n - 1}", f"back {n}")]
    turn = [f"block {LAYERS}", "forward ends", f"bring {LAYERS}"]
    assert order == ["bring 0", "bring 1", *forward, *turn, *backward, "back 1"]
    order, *_ = here(seen, job, "late")
    forward = [word for n in range(1, LAYERS + 1) for word in (f"bring {n}", f"block {n}")]
    backward = [word for n in range(LAYERS, 0, -1) for word in (f"bring {n}", f"back {n}")]
    assert order == ["bring 0", *forward, "forward ends", *backward]


def taken(world: World, job: Job) -> tuple[int, int, int]:
    """Returns the bytes of tensors on the device beyond those before the run, before a commit and after an
    update, and of copies of weights on the host."""
    before = living(None) - sum(len(each) for each in spare())
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        pieces = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in me.state.parameters.copies
        }
        host = sum(pieces.values())
        before += host + sum(len(each) for each in spare())
        after = living(me.session.snapshots) - before
        compute(me.session, me.state, 2)
        return living(me.session.snapshots) - before, after, host


def spare() -> list[Tensor]:
    """Returns the pieces of host memory that no world uses."""
    return [piece for pieces in host_memory(pinned=False).free.values() for piece in pieces]


@pytest.mark.parametrize("members", [pytest.param(1, marks=pytest.mark.full), 2])
def test_f3_the_device_has_only_sums_of_gradients_between_steps(
    fresh_ranks: Ranks, tmp_path: Path, members: int
) -> None:
    """F3: of a parameter the device has the sum of its gradients before a commit, its own part, and nothing
    after the update.

    Beside the state the host has 2 bytes in bf16.  ``test_offload.py`` has the control, where the device has
    them.
    """
    job = visiting(tmp_path, precision="bf16", model_args=LARGE)
    count = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    computing, updated, host = fresh_ranks.run(Layout(1, members), taken, job)[0]
    assert (computing / count, updated / count) == pytest.approx((4 / members, 0), rel=0.05, abs=0.02)
    assert host / count == pytest.approx(2, rel=0.02)


def pieces(world: World, job: Job) -> int:
    """Returns the number of pieces of host memory that are free once this member's world is over."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
    del me
    gc.collect()
    return len(spare())


def test_worlds_use_the_same_memory_of_the_host(tmp_path: Path) -> None:
    found = [here(pieces, visiting(tmp_path / str(n), **ONE_ROUND)) for n in range(3)]
    assert found[0] == found[1] == found[2] >= LAYERS + 1


# ---- one block


class Twin(nn.Module):
    """Two layers, of which the second multiplies by the weight of the first, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x)) @ self.first.weight.t()))


class Tied(nn.Module):
    """Blocks of which two share a weight, and one is frozen; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Twin() for _ in range(4))
        self.layers[3].first.weight = self.layers[0].first.weight
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 2, 3):
            x = self.layers[number](x)
        return x.square().sum()


def visitor(plain: nn.Module) -> tuple[nn.Module, Visits, dict[str, nn.Parameter]]:
    """Returns a copy of a model whose weights are on the host, and its parameters."""
    model = copy.deepcopy(plain)
    held, own = (
        Visits(model, sharding_table(model).blocks, torch.device("cpu")),
        dict(model.named_parameters()),
    )
    for parameter in own.values():
        parameter.data = visits.absent(parameter.shape, parameter.dtype, parameter.device)
    for name, host in held.hold(model, own).items():
        host.copy_(plain.get_parameter(name))
    return model, held, own


def same(plain: nn.Module, own: Mapping[str, nn.Parameter]) -> bool:
    """Returns whether all gradients are the same."""
    pairs = [(parameter.grad, own[name].grad) for name, parameter in plain.named_parameters()]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def test_gradients_are_those_of_plain_torch_where_blocks_share_weights() -> None:
    """A weight that two blocks share is of the rest.  A parameter that is away is NaN, and reads as it is
    where it is asked for.

    The control: with a weight of another block in a block's place, gradients differ.
    """
    torch.manual_seed(0)
    plain, x = Tied(), torch.randn(5, 8)
    model, held, own = visitor(plain)
    assert held.names(own)[0] == ["layers.0.first.weight"]
    for _ in range(2):
        plain(x).backward()
        held.begin()
        loss = model(x)
        held.turn()
        loss.backward()
        held.end(last=True)
        assert all(
            each.isnan().all() and each.untyped_storage().nbytes() == 4 for each in parameters_of(model)
        )
    assert torch.equal(loss, plain(x)) and same(plain, own) and own["layers.1.first.weight"].grad is None
    assert torch.equal(model.layers[2].second.weight, plain.layers[2].second.weight)
    held._groups[2].host.copy_(held._groups[3].host)
    held.begin()
    model(x).backward()
    assert not same(plain, own)


def test_gradients_are_those_of_plain_torch_where_no_block_is_called() -> None:
    """Its weights are read one by one, also in other blocks' places, by an LSTM from a list of its own, and
    in the loss.

    The control: one that nobody brings is NaN.
    """
    torch.manual_seed(0)
    plain, batch = Sideways(), {"tokens": torch.randint(0, 29, (2, 9))}
    plain.init_weights()
    model, held, own = visitor(plain)
    sideways(plain, batch)[0].backward()
    held.begin()
    loss, _ = sideways(model, batch)
    held.turn()
    loss.backward()
    held.end(last=True)
    assert torch.equal(loss, sideways(plain, batch)[0]) and same(plain, own)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Visits, "_hide", lambda *_: None)
        model, held, _ = visitor(plain)
        held.begin()
        assert sideways(model, batch)[0].isnan()


def held_by(world: World, job: Job) -> dict[str, int]:
    """Returns the bytes of each class that a member holds after a step."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        assert me.session.meter.held is not None
        return me.session.meter.held


def test_the_log_and_the_estimate_say_that_weights_are_on_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """C6: both have the same bytes in each class; only gradients and buffers are on the device."""
    job = visiting(tmp_path, precision="bf16", model_args=LARGE)
    tensors = tensors_of(build_model(job, builder_of(job)), rule_of(job))
    found, expected = ranks.run(Layout(1, 2), held_by, job)[0], classes(job, tensors, 2)
    assert found == pytest.approx(expected, rel=0.01)
    assert {name for name, size in found.items() if size and not name.endswith("in host memory")} <= {
        "gradients",
        "buffers",
    }
    assert found["computing copies in host memory"] > 0 < found["gradients"]


@pytest.mark.fast
def test_weights_on_the_host_need_room_beside_the_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is refused where slots fit alone; the control offloads the optimizer's state alone, and is
    not.
    """
    changes: dict[str, Any] = {
        "precision": "bf16",
        "copies": {"buddy_every": 0},
        "workers": {"min": 1, "max": 1},
    }
    job = visiting(tmp_path)
    tensors = tensors_of(build_model(job, builder_of(job)), rule_of(job))
    room = slots_a_worker(1, 0, offload=True) * bytes_of(tensors) + bytes_of(tensors) // 100
    monkeypatch.setattr(session, "free_memory", lambda: (room, "the node"))
    monkeypatch.setattr(session, "copies_here", lambda: (0, 0))

    def start(job: Job) -> None:
        session.make_snapshots(
            job, tensors, torch.device("cpu"), Counters(tmp_path / job.offload, create=True), Faults(())
        )

    start(small_job(tmp_path, offload="optimizer", parallel={"zero": 0}, **changes))
    with pytest.raises(
        JobError,
        match=(
            r"the node, less [\d.]+ kB for weights with which the model "
            r"computes, leaves only"
        ),
    ):
        start(visiting(tmp_path, 0, **changes))


@pytest.mark.fast
@pytest.mark.parametrize("changes", [{"parallel": {"zero": 3}}, {"copies": {"copy_every": 2}}], ids=str)
def test_what_cannot_work_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"with offload = 'weights': "):
        visiting("/nowhere", **changes)


@pytest.mark.fast
def test_the_estimate_knows_that_weights_are_on_the_host() -> None:
    """C6: beside sums of gradients the device has room for the rest and two of four blocks, and the host has
    all, 2 bytes each.
    """
    job = visiting("/nowhere", precision="bf16", model_args={**LARGE, "tied": False})
    model = build_model(job, builder_of(job))
    need = need_of(job, tensors_of(model, rule_of(job)))
    count = sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(parameter.numel() for parameter in model.get_submodule("layers").parameters())
    assert need.hosted == 2 * count
    assert need.held(1) == 4 * count + 2 * (count - blocks // 2) and need.held(2) == 4 * count // 2 + 2 * (
        count - blocks // 2
    )
