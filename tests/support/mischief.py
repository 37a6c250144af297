"""Loss functions of a user whose code does what it should not, in a worker on the cluster: the harder half of
chaos.

They look into the worker that runs them, and replace functions of the product there, as no user's code
should.  No file of the product knows of them.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.engine.world import World
from elastic.errors import WorldBroken
from elastic.protocol.commit_record import BadRecord, CommitShape, Outcome, conclude
from elastic.state import snapshot
from elastic.state.streaming import _Threads
from elastic.train import loop
from elastic.train import step as steps
from elastic.train.loop import Trainer
from elastic.train.model import State
from elastic.train.next_world import NextWorld
from tests.support.patience import PATIENCE_S

STEP = 6
"""The step of generation 1 in which mischief is done."""
ASSERTED = (
    "CUDA error: device-side assert triggered\nIt may be reported by some other call than the one "
    "that failed."
)
TOUCHES = (
    (loop, "touch"),
    (World, "to_host"),
    (World, "to_device"),
    (World, "finish"),
    (World, "keep_up"),
    (snapshot._HostCopy, "fill"),
)
"""Functions of the product that use a worker's device."""
ABORT_S = 1.0
"""Time in seconds that the product waits for the abort that never returns, and that the abort of the control
takes.
"""
SEEN: set[tuple[str, int]] = set()
LAST: list[Outcome] = []


@cache
def trainer() -> Trainer:
    """Returns the trainer of this process."""
    (found,) = [each for each in gc.get_objects() if type(each) is Trainer]
    return found


def watched(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the usual loss.

    At the first step of each world and at every tenth step it writes the memory in use and the number of
    compiled graphs into the worker's log.
    """
    me = trainer()
    world, step = me.world, me.session.faults.step
    if world is None:  # warming up
        return next_token(model, batch)
    if _first("memory", world.generation) or (step % 10 == 0 and _first(f"memory {step}", world.generation)):
        used, kept, most = (
            (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated())
            if torch.cuda.is_available()
            else (0, 0, 0)
        )
        here = int(Path("/proc/self/statm").read_text().split()[1]) * PAGESIZE
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        amounts = f"allocated {used} reserved {kept} resident {here} peak {most} compiled {graphs}"
        print(f"memory: {me.worker} generation {world.generation} step {step} {amounts}", flush=True)
    return next_token(model, batch)


CLONE, CLONE_FILES = 56, 0x400
OUTLIVES_S = 8.0
"""Seconds for which the sockets of a worker stay open after its death, in :func:`outlived`."""


def outlived(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the usual loss.  Whoever dies leaves its sockets open for a while, as one does whose pinned
    memory the kernel lets go of.

    A process that shares its open files holds them.
    """
    if _first("files", 0):
        parent = os.getpid()
        if ctypes.CDLL(None).syscall(CLONE, CLONE_FILES | signal.SIGCHLD, 0, 0, 0, 0) == 0:
            while os.getppid() == parent:
                time.sleep(0.05)
            time.sleep(OUTLIVES_S)
            os._exit(0)
    return next_token(model, batch)


def early_abort(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Fences world rank 0, which aborts in the middle of the commit of ``STEP``, 0.3 s before anybody hears
    of it.

    To be used with a member that never contributes: ``Fault(point="before_commit", step=STEP, kind="SIGSTOP",
    world_rank=...)``.
    """
    if _due(0):
        threading.Thread(target=_abort_early, args=(trainer(),), daemon=True).start()
    return watched(model, batch)


def early_abort_believed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The control for the same fault: nobody looks at what a commit brings, so a member that sees the
    collective end takes the step for committed.
    """
    if _first("believes", 1):
        steps.conclude = partial(_believe, conclude)  # type: ignore[attr-defined]
    return early_abort(model, batch)


def _believe(genuine: Callable[..., Outcome], shape: CommitShape, step: int, gathered: bytes) -> Outcome:
    """Makes a commit of garbage look like the one before."""
    try:
        LAST[:] = [genuine(shape, step, gathered)]
    except BadRecord as bad:
        print(f"mischief: {trainer().worker} believed, at step {step}, what was none: {bad}", flush=True)
        return replace(LAST[0], step=step)
    return LAST[0]


def _abort_early(me: Trainer) -> None:
    world, report, held = me.world, me.report, list[tuple[Any, ...]]()
    assert world is not None
    deadline = time.monotonic() + PATIENCE_S
    while me.apply_fence.member.prepared != STEP and time.monotonic() < deadline:
        time.sleep(0.001)
    # part of the scenario, not a wait for an event: for this time all but one stand in the commit, unfenced
    time.sleep(1.0)
    me.report = lambda *event: held.append(event)
    with me.apply_fence as rules:
        rules.fence(world.generation)
    began = time.monotonic()
    world.abort()
    print(f"mischief: {me.worker} aborted early in {time.monotonic() - began:.3f} s", flush=True)
    time.sleep(max(0.3 - (time.monotonic() - began), 0.0))  # the others' time to see the collective end
    me.report = report
    for event in held:
        report(*event)


def roomless(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Finds no room on this worker's device for the groups of a second world."""

    def refuse(self: NextWorld) -> None:
        raise WorldBroken("the device has 0 bytes of free memory")

    NextWorld._leave_room = refuse  # type: ignore[method-assign]
    return next_token(model, batch)


def holding_the_gil(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Makes world rank 0 hold the GIL for 3 s in a C extension, at the beginning of ``STEP``."""
    if _due(0):
        ctypes.PyDLL(None).sleep(3)
    return watched(model, batch)


def device_lost(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Makes world rank 0 lose its device when ``STEP`` begins: every use of it raises, and so does every
    later call of this process.
    """
    if _due(0):
        for owner, name in TOUCHES:
            setattr(owner, name, _refuse)
    if loop.touch is _refuse:
        _refuse()
    return watched(model, batch)


def device_error(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The control for the same fault: only one call fails, and the device answers afterwards."""
    if _due(0):
        _refuse()
    return watched(model, batch)


def _refuse(*_: Any, **__: Any) -> None:
    raise torch.AcceleratorError(ASSERTED)


def bent_file(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Changes a byte of world rank 0's newest version in its file, while it computes ``STEP``."""
    if _due(0):
        snapshots = trainer().session.snapshots
        assert snapshots is not None
        region = snapshots.region
        _, slot = max((copy.age, slot) for slot, copy in enumerate(region.all_held()) if copy is not None)
        at = region.data_at(slot) + 2
        os.pwrite(region.descriptor, bytes([os.pread(region.descriptor, 1, at)[0] ^ 64]), at)
        print(f"mischief: {trainer().worker} has a file with another byte", flush=True)
    return watched(model, batch)


def bent_file_believed(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The control for the same fault: no update looks at what it has read."""
    _Threads.wrong = lambda self: []  # type: ignore[method-assign]
    return bent_file(model, batch)


def stuck_abort(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Makes the abort of generation 1 free world rank 0 from every collective, as it should, but never
    return.

    The product waits ``ABORT_S`` for it.  To be used with another member that dies in ``STEP``, later than
    this.
    """
    if _due(0):
        loop.ABORT_S = ABORT_S
        _delay_abort(threading.TIMEOUT_MAX)
    return watched(model, batch)


def late_abort(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The control for the same fault: the abort returns after ``ABORT_S``, and the product waits for it as
    long as usual.
    """
    if _due(0):
        _delay_abort(ABORT_S)
    return watched(model, batch)


def _delay_abort(longer_s: float) -> None:
    world = trainer().world
    assert world is not None
    genuine = world.abort

    def abort() -> int:
        count = genuine()
        threading.Event().wait(longer_s)
        return count

    world.abort = abort  # type: ignore[method-assign]


EACH_S = 0.03
"""Seconds for which every worker sleeps in a forward pass of a straggler's run, so that noise is small."""


def slow_by(factor: float, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Computes the usual loss.  The process that is world rank 1 of generation 1 takes ``factor`` times as long
    for it, in every world.
    """
    began = time.perf_counter()
    loss = next_token(model, batch)
    time.sleep(EACH_S)
    if _is_the_slow_one():
        time.sleep((factor - 1) * (time.perf_counter() - began))
    return loss


def twice_as_slow(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return slow_by(2.0, model, batch)


def five_times_as_slow(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return slow_by(5.0, model, batch)


def slow_in_exchanges(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The control: the same process is as slow, but only in each exchange of gradients."""
    if _is_the_slow_one() and _first("exchanges", 0):
        genuine = World.all_to_all

        def slow(*args: Any, **named: Any) -> Tensor:
            time.sleep(EACH_S)
            return genuine(*args, **named)

        World.all_to_all = slow  # type: ignore[method-assign]
    return slow_by(1.0, model, batch)


def _is_the_slow_one() -> bool:
    """Returns whether this process was world rank 1 of generation 1."""
    world = trainer().world
    if world is not None and (world.rank, world.generation) == (1, 1):
        SEEN.add(("slow", 0))
    return ("slow", 0) in SEEN


def flip(tensor: Tensor) -> None:
    """Flips one bit of the memory of ``tensor``, so that nobody notices: the highest bit of the mantissa of
    its middle element, a float32.
    """
    middle = tensor.data_ptr() + tensor.numel() // 2 * tensor.element_size()
    ctypes.c_uint8.from_address(middle + 2).value ^= 1 << 6
    print(f"mischief: {trainer().worker} has another bit", flush=True)


def bit_in_a_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Flips a bit of the weights of world rank 1 in the forward pass of the step before ``STEP``: its gradient
    is wrong from then on, and all members apply it.
    """
    if _due(1, STEP - 1):
        copies = trainer().session.snapshots
        if copies is not None and copies._under_way is not None:
            copies._under_way[0].result()  # a bit that flips before is in the copy, too
        flip(_weight())
    return watched(model, batch)


def bit_in_an_update(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Flips a bit of the weights of world rank 1 in the update of ``STEP``, before anybody copies them."""
    if _due(1):
        genuine = steps.update

        def update(*args: Any) -> None:
            genuine(*args)
            steps.update = genuine
            flip(_weight())

        steps.update = update
    return watched(model, batch)


def wrong_gradient(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Gives world rank 1 a wrong gradient once, in the first microbatch that it runs in ``STEP``; its loss is
    right.
    """
    return _with_a_wrong_gradient(model, batch, _due(1))


def wrong_gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Gives the process that is world rank 1 of generation 1 wrong gradients from ``STEP`` on, in every world."""
    if _due(1):
        SEEN.add(("wrong", 0))
    return _with_a_wrong_gradient(model, batch, ("wrong", 0) in SEEN)


def _with_a_wrong_gradient(model: nn.Module, batch: dict[str, Tensor], wrong: bool) -> tuple[Tensor, Tensor]:
    loss, count = watched(model, batch)
    if wrong:
        loss.register_hook(lambda grad: grad * (1 + 2**-20))
        print(f"mischief: {trainer().worker} has another bit", flush=True)
    return loss, count


def _weight() -> Tensor:
    """Returns the first weight of this worker's state."""
    state = next(each for each in gc.get_objects() if type(each) is State and each.world is trainer().world)
    return next(value for (kind, _), value in state.shard.values.items() if kind == "parameter")


def _due(rank: int, step: int = STEP) -> bool:
    """Returns True once, at the first microbatch of ``step`` in generation 1 on this rank."""
    me = trainer()
    if me.world is None:  # warming up
        return False
    return (me.world.rank, me.world.generation, me.session.faults.step) == (rank, 1, step) and _first(
        "mischief", 1
    )


def _first(what: str, generation: int) -> bool:
    """Returns whether this process asks for this pair for the first time."""
    seen = (what, generation) in SEEN
    SEEN.add((what, generation))
    return not seen
