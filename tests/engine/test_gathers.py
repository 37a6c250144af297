"""Whole weights that are gathered while the model runs: what overlaps, that no weight is an old one, and the
memory that it takes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from elastic.engine.parameters import gathers
from elastic.engine.parameters.gathers import Gathers
from elastic.engine.parameters.whole import Whole
from elastic.engine.precision import PRECISIONS
from elastic.engine.sync.ordered import Ordered, OrderedReduction
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.batch import deal_of
from elastic.plan.layout import Layout
from tests.support.patience import PATIENCE_S
from tests.support.ranks import Ranks
from tests.support.segments import Part, Trained, compute, finish, member, segment, shard_hash, train_here
from tests.support.toys import small_job
from tests.support.worlds import STEPS

PAIR, LAYERS = Layout(1, 2), 4
DEEP = {"vocab": 29, "dim": 16, "layers": LAYERS, "heads": 2, "dropout": 0.1}


def staged(folder: Path, **changes: Any) -> Job:
    return small_job(folder, **{"parallel": {"zero": 2}, **changes})


@contextmanager
def ahead_by(number: int) -> Iterator[None]:
    before, gathers.AHEAD = gathers.AHEAD, number
    try:
        yield
    finally:
        gathers.AHEAD = before


class Observed:
    """Notes when gathers of a world begin and are waited for, and how much memory of their results lives at
    once.
    """

    def __init__(self, world: World, ahead: int) -> None:
        self.order, self.most, self.ahead = list[str](), 0, ahead
        self._begin, self._results = world.begin_all_gather, list[StorageWeakRef]()
        world.begin_all_gather = self.begin  # type: ignore[method-assign]

    def begin(self, output: Tensor, mine: Tensor) -> Callable[[], None]:
        number, until = len(self._results), time.monotonic() + PATIENCE_S
        while (living := sum(not each.expired() for each in self._results)) >= max(
            self.ahead, 1
        ) and time.monotonic() < until:
            time.sleep(0.001)  # gloo's threads forget a collective a moment after it has been waited for
        self.most = max(self.most, living + 1)
        self._results.append(StorageWeakRef(output.untyped_storage()))
        self.order.append(f"begin {number}")
        wait = self._begin(output, mine)

        def waits() -> None:
            wait()
            self.order.append(f"wait {number}")

        return waits


def observed(world: World, job: Job, ahead: int, holds: bool) -> tuple[Observed, list[list[str]]]:
    """Computes a step.  Returns what was observed, and the collectives in flight when a block of the first
    round begins.

    With ``holds`` rank 1 waits before each block until rank 0 runs it; so nothing that rank 0 gathers for a
    later block can have ended.
    """
    seen: list[list[str]] = []
    with ahead_by(ahead), member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        found = Observed(world, ahead)

        def begins(number: int) -> None:
            if len(seen) == LAYERS:
                return
            if world.rank == 0 or not holds:
                found.order.append(f"block {number}")
                seen.append(world.in_flight())
                world.store.set(f"block {number}", "")
            else:
                world.store.wait([f"block {number}"], datetime.timedelta(seconds=PATIENCE_S))
                seen.append([])

        for number, layer in enumerate(me.state.model.layers):
            layer.register_forward_pre_hook(lambda *_, number=number: begins(number), prepend=world.rank == 1)
        compute(me.session, me.state, 2)
        del found._begin
        found._results.clear()
    return found, seen


def test_c6_a_block_runs_while_the_weights_of_the_next_one_come(ranks: Ranks, tmp_path: Path) -> None:
    """C6, B13: torch's flight recorder shows a gather in flight in each block but the last, which the other
    member has not begun yet.

    All are waited for in the first of two rounds; the memory is that of one group.  The control gathers
    nothing ahead.
    """
    cases = [
        (staged(tmp_path / name, model_args=DEEP), ahead, name == "ahead")
        for name, ahead in (("ahead", 1), ("control", 0), ("two", 2))
    ]
    # each changes its world
    (found, seen), (late, _), (two, _) = (ranks.run(PAIR, observed, *case)[0] for case in cases)
    newest = [max(int(name.split("#")[1].split()[0]) for name in names) for names in seen[:-1]]
    assert all("all_gather" in names[-1] for names in seen[:-1]) and newest == [
        *range(newest[0], newest[0] + LAYERS - 1)
    ]
    middle = [word for n in range(LAYERS - 1) for word in (f"wait {n + 1}", f"begin {n + 2}", f"block {n}")]
    assert found.order == ["begin 0", "wait 0", "begin 1", *middle, f"wait {LAYERS}", f"block {LAYERS - 1}"]
    assert found.most == 1
    middle = [word for n in range(LAYERS) for word in (f"begin {n + 1}", f"wait {n + 1}", f"block {n}")]
    assert late.order == ["begin 0", "wait 0", *middle] and late.most == 1
    assert two.most == 2


def note_gradient(order: list[str], name: str, _block: nn.Module, _args: Any, output: Tensor) -> None:
    output.register_hook(lambda _: order.append(name))


def summed(world: World, job: Job, early: bool) -> tuple[list[str], list[str]]:
    """Trains two steps, and returns the hashes of this member's shard and, for the rounds of the second step,
    what came after what.

    Unless ``early``, gradients are summed when the whole backward pass is over.
    """
    order = list[str]()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if not early:
            patch.setattr(Whole, "_came", lambda *_: None)
        me = stack.enter_context(member(world, job, Version(0, 0), prefetch=0))
        me.step()
        hashes = [shard_hash(me.state.shard)]
        begin, reduce, end = Whole.begin_round, OrderedReduction.reduce, Whole.end_round
        patch.setattr(
            Whole,
            "begin_round",
            lambda self, *args, **named: (order.append("begins"), begin(self, *args, **named))[1],
        )
        patch.setattr(Whole, "end_round", lambda self: (order.append("ends"), end(self))[1])
        patch.setattr(
            OrderedReduction, "reduce", lambda self, grads: (order.append("sum"), reduce(self, grads))[1]
        )
        for number, layer in enumerate(me.state.model.layers):
            layer.register_forward_hook(partial(note_gradient, order, f"block {number}"))
        me.step()
        return [*hashes, shard_hash(me.state.shard)], order


def test_b12_gradients_of_a_block_are_summed_while_the_backward_pass_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    """B12: those of a block before the gradient comes to the block before the one before it; without that,
    the bits are the same.
    """
    cases = [(staged(tmp_path / name, model_args=DEEP), name == "early") for name in ("early", "late")]
    ((hashes, order), _), ((plain, later), _) = ranks.run_each(PAIR, summed, cases)
    rounds = small_job(tmp_path).microbatches // PAIR.world
    blocks = [f"block {number}" for number in reversed(range(LAYERS))]
    assert (
        later == ["begins", *blocks, "ends", *["sum"] * (LAYERS + 2)] * rounds
    )  # the rest, and the second sum of the weight of the head
    assert sorted(order) == sorted(later) and hashes == plain and hashes[0] != hashes[1]
    for round_ in range(rounds):
        found = order[round_ * len(order) // rounds :][: len(order) // rounds]
        for number in range(1, LAYERS):
            before = found.index(f"block {number - 1}")
            assert found[:before].count("sum") >= LAYERS - 1 - number, found


# ---- no weight is an old one


class Sideways(nn.Module):
    """A model whose blocks are never called: it uses their weights by itself, not in their order, and some in
    the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 18)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(18), "mix": nn.LSTM(18, 18, batch_first=True), "out": nn.Linear(18, 18)}
            )
            for _ in range(3)
        )
        self.head = nn.Linear(18, 29)

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers[:2]:
            x = x + layer["out"](layer["norm"](layer["mix"](x)[0]))
            x = F.linear(x, self.layers[2]["out"].weight) + self.layers[2]["norm"].bias
        return self.head(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    tokens = batch["tokens"]
    total = F.cross_entropy(
        model(tokens[:, :-1].clamp(min=0)).float().flatten(0, 1),
        tokens[:, 1:].flatten(),
        ignore_index=-1,
        reduction="sum",
    )
    count = (tokens[:, 1:] >= 0).sum()
    return total + 1e-3 * count * sum(
        parameter.square().sum() for parameter in model.get_submodule("layers.2").parameters()
    ), count


class Plain(dict[str, Any]):
    """A dictionary in which old values can be read."""

    def __init__(self, own: dict[str, Any], _need: Callable[[], None]) -> None:
        super().__init__(own)
        self.own = own


BREAKS: dict[str, dict[str, Any]] = {
    "": {},
    "steps": {},
    "blocks": {"before_calls": lambda *_: None, "Old": Plain},
    "elsewhere": {"Old": Plain},
}
"""Controls, and changes to the product: every other step gathers nothing; nobody waits; only blocks that are
called wait.
"""


def trained(world: World, job: Job, last: int, ahead: int, broken: str) -> Part:
    """Trains from the initialisation.  All weights of the first step are there in any case, so a control
    computes with older ones.
    """
    with ahead_by(ahead), pytest.MonkeyPatch.context() as patch:
        for name, value in BREAKS[broken].items():
            patch.setattr(gathers, name, value)
        begin, begun = Gathers.begin, [0]

        def begins(self: Gathers) -> None:
            begun[0] += 1
            if broken != "steps" or begun[0] % 2:
                begin(self)
            if begun[0] == 1:
                self.finish()

        patch.setattr(Gathers, "begin", begins)
        return segment(world, job, Version(0, 0), last)


def hash_of(job: Job, layout: Layout, parts: list[Part], last: int) -> str:
    return finish(
        job, layout, [part.receipt for part in parts], Version(last, parts[0].outcomes[-1].generation)
    )


def shows(broken: str, ranks: Ranks, job: Job, expected: str) -> bool:
    """Returns whether a control gives other bits, or autograd notices that a weight changed after it was
    used.
    """
    try:
        return hash_of(job, PAIR, ranks.run(PAIR, trained, job, 3, 1, broken), 3) != expected
    except AssertionError as error:
        return "modified by an inplace operation" in str(error)


@pytest.mark.parametrize(
    "layout", [Layout(1, 2), pytest.param(Layout(1, 3), marks=pytest.mark.full), Layout(2, 2)], ids=str
)
def test_b12_the_bits_are_those_of_one_worker_whatever_is_gathered_ahead(
    ranks: Ranks, reference: Trained, tmp_path: Path, layout: Layout
) -> None:
    """B12: nothing ahead, one block, all of them.  The control: a prefetch that leaves the weights of an
    older step gives other bits.
    """
    cases = [
        (staged(tmp_path / f"{ahead}{broken}"), STEPS, ahead, broken)
        for ahead, broken in ((0, ""), (1, ""), (99, ""), (1, "steps"))
    ]
    found = [
        hash_of(case[0], layout, parts, STEPS)
        for case, parts in zip(cases, ranks.run_each(layout, trained, cases), strict=True)
    ]
    assert found[:3] == [reference.hash] * 3 and found[3] != reference.hash


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_is_new_wherever_it_is_used(ranks: Ranks, tmp_path: Path, precision: str) -> None:
    """B12: also where no block is called.  Each control leaves one kind of wait out."""
    own: dict[str, Any] = {
        "model": f"{__name__}:Sideways",
        "model_args": {},
        "loss": f"{__name__}:loss",
        "precision": precision,
    }
    one, two = train_here(staged(tmp_path / "one", **own), 3).hash, staged(tmp_path / "two", **own)
    assert hash_of(two, PAIR, ranks.run(PAIR, trained, two, 3, 1, ""), 3) == one
    assert shows("elsewhere", ranks, staged(tmp_path / "elsewhere", **own), one)
    small: dict[str, Any] = {
        "model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2},
        "precision": precision,
    }
    plain = train_here(staged(tmp_path / "plain", **small), 3).hash
    assert shows("blocks", ranks, staged(tmp_path / "blocks", **small), plain)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo looks at what is no leaf
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["calls", "forward", "control"])
def test_a_compiled_block_is_compiled_once(monkeypatch: pytest.MonkeyPatch, way: str, precision: str) -> None:
    """Its code looks at parameters before it runs, so it must not see those of a step that is over.  In the
    control it does.
    """
    if way == "control":
        monkeypatch.setattr(gathers, "before_calls", lambda *_: None)
    torch.compiler.reset()
    compiled, seen, model = [], list[int](), Stack()

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for layer in model.layers:
        if way == "forward":
            layer.forward = torch.compile(layer.forward, fullgraph=True, backend=backend)
        else:
            layer.compile(fullgraph=precision == "fp32" and way == "calls", backend=backend)
    world = World.imagined(PAIR, torch.device("cpu"))
    try:
        scheme = Ordered(world, deal_of(2, 1, world.layout, world.nodes))
        whole = Whole(
            model, world, ShardingTable(tuple(f"layers.{n}" for n in range(3))), PRECISIONS[precision], scheme
        )
        for _ in range(4):
            whole.begin_round(0, last=True)
            loss_ = model(torch.ones(2, 4))
            whole.end_forward()
            loss_.backward()
            whole.end_round()
            seen.append(len(compiled))
    finally:
        world.close()
        torch.compiler.reset()

    assert (seen == seen[:1] * 4) is (way != "control")
