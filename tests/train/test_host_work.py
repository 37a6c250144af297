"""Counts what a step of ours asks of the host beside a plain loop with the same model: calls of operators and
of Python functions.

Such counts are exact, where times are not; ``tests/benchmarks/host_time.py`` measures the time.  The judge is
a loop that anybody would write.  Counts of several sizes tell what a parameter, a unit (a block, or the rest
of the model) and a microbatch cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elastic.data.loader import LOOKED_AT
from elastic.engine.kernels import apply_kernels
from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.models.spec import ShardingTable
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from tests.support.opcodes import opcodes
from tests.support.segments import member
from tests.support.toys import Sums, toy_job

SETTLED = 2
"""Steps before the one that is counted: the first ones find out which gradient of a unit comes last."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads would wait for each other on a busy machine, in each of thousands of tiny operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Counts(NamedTuple):
    operators: int
    calls: int
    """Calls of Python functions, without comprehensions, which are functions in some versions of Python only.
    """

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that are called, also in the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], object]) -> Counts:
    """Returns the counts of one step, after ``SETTLED`` others."""
    for _ in range(SETTLED):
        step()
    with Operators() as operators:
        step()
    calls = 0

    def note(frame: Any, event: str, _argument: object) -> None:
        nonlocal calls
        name = frame.f_code.co_name
        calls += event == "call" and (not name.startswith("<") or name == "<lambda>")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return Counts(operators.count, calls)


def job_of(folder: Path, layers: int, microbatches: int, *, reproducible: bool) -> Job:
    sizes = {"vocab": 29, "dim": 32, "layers": layers, "heads": 2}
    return toy_job(
        folder, steps=100, global_batch=2 * microbatches, model_args=sizes, reproducible=reproducible
    )


@cache
def plain(layers: int, microbatches: int, reproducible: bool) -> Counts:
    """Counts the loop that anybody would write."""
    job = job_of(Path("/nowhere"), layers, microbatches, reproducible=reproducible)
    model, data = build(**job.model_args), Sums()
    apply_kernels(model, torch.device("cpu"), job)
    adamw = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        adamw.zero_grad()
        for microbatch in range(microbatches):
            loss, _ = next_token(model, data.read((2 * microbatch, 2 * microbatch + 1)))
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    return counted(step)


def ours(job: Job, world: World, *, hooked: bool = False) -> Counts:
    """Counts a step of ours.  ``hooked``: with a hook on each parameter, which looks at it."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        for _ in range(LOOKED_AT):
            me.session.loader.read((0,))  # with more work for each of the first reads
        for parameter in me.state.model.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(looks_at)
        return counted(me.step)


def looks_at(parameter: torch.Tensor) -> None:
    parameter.detach()


def extra(folder: Path, layers: int, microbatches: int, **how: bool) -> Counts:
    """Returns what ours has more than the plain loop."""
    hooked = how.pop("hooked", False)
    job, world = job_of(folder, layers, microbatches, **how), World.alone(torch.device("cpu"))
    try:
        return ours(job, world, hooked=hooked) - plain(layers, microbatches, **how)
    finally:
        world.close()


def of_a_microbatch(few: Counts, more: Counts) -> Counts:
    """Returns what each of the two microbatches costs that ``more`` has more than ``few``."""
    between = more - few
    return Counts(between.operators // 2, between.calls // 2)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("reproducible", [False, True], ids=["free", "reproducible"])
def test_a_step_asks_little_more_of_the_host_than_a_plain_loop(
    tmp_path: Path, reproducible: bool, layers: int
) -> None:
    """A microbatch: one operator for each parameter, two for each unit and three.  Of a parameter torch takes
    over a gradient and the unit takes a view of it, where the plain loop adds it up.  Of Python calls only a
    unit and a block have some, for sums and for seeds, and a parameter none.  There are three units, however
    many blocks: small blocks are joined where nothing travels, the rest of the model is another, and the weight
    of the head has a second sum.  Of the three operators one copies the
    tokens, which a loss may change, and one compares them with the vocabulary; where something reads ahead,
    its thread does that.

    A step: what the norm in a fixed order and the commit have more; the update has fewer.  The control, of
    one block: one operator for each parameter more.
    """
    parameters, units = 9 * layers + 2, 3
    extra(
        tmp_path / "before", layers, 2, reproducible=reproducible
    )  # what is known of a layout is found again
    few, more = (extra(tmp_path / f"{many}", layers, many, reproducible=reproducible) for many in (2, 4))
    each = of_a_microbatch(few, more)
    assert each.operators == parameters + 2 * units + 3
    # of which four note what is read, for the case that the process dies of it
    assert each.calls <= 181 + 6 * layers
    assert few.operators - 2 * each.operators <= parameters + 185
    # torch's optimizer makes as many calls for each parameter as all of ours
    assert few.calls - 2 * each.calls <= 12

    if layers > 1:
        return
    few, more = (
        extra(tmp_path / f"{many} hooked", layers, many, reproducible=reproducible, hooked=True)
        for many in (2, 4)
    )
    hooked = of_a_microbatch(few, more)
    assert hooked.operators == each.operators + parameters
    assert hooked.calls >= each.calls + parameters - 1


# ---- many tensors


class Gone(tuple[str, ...]):
    """Names that count how many of them were gone through."""

    count = 0

    def __iter__(self) -> Iterator[str]:
        Gone.count += len(self)
        return super().__iter__()


class Many(nn.Module):
    """A model of many small blocks, each with two tensors."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(blocks))
        self.head = nn.Linear(4, 29)

    def sharding(self) -> ShardingTable:
        return ShardingTable(Gone(f"layers.{number}" for number in range(len(self.layers))))

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "sizes", [(2, 3, 12, 48), pytest.param((2, 15, 60, 240), marks=pytest.mark.full)], ids=str
)
def test_the_work_from_the_command_to_a_save_grows_as_the_number_of_tensors_does(
    tmp_path: Path, sizes: Sequence[int]
) -> None:
    """The checks, the comparison with plain torch, the initialisation, two steps and a save.

    From each of three sizes to the next there are 4 times the tensors.  A loop over all of them for each one
    would be 16 times the work.
    """
    work, gone = list[int](), list[int]()
    for blocks in sizes:
        many = {"model": f"{__name__}:Many", "model_args": {"blocks": blocks}, "steps": 2, "global_batch": 4}
        job = toy_job(
            tmp_path / str(blocks), **many, optim={"kind": "muon", "lr": 1e-2}, schedule={"warmup_steps": 0}
        )
        Gone.count = 0
        work.append(
            opcodes(partial(preflight, job, local=True)) + opcodes(partial(run_local, job, lambda line: None))
        )
        gone.append(Gone.count)
    for counts in (work, gone):
        _, few, some, most = counts  # the first one also imports modules
        assert 0 < some - few < most - some < 4.5 * (some - few), counts
