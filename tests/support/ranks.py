"""Real processes that form real worlds over gloo (or NCCL, a GPU each), kept between tests.

A function given to :meth:`Ranks.run` runs in every member as ``function(world, *arguments)``; it must be
importable.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from elastic.plan.layout import Layout
from tests.support.budgets import WORLD, add, begin, taken
from tests.support.patience import PATIENCE_S
from tests.support.warm import MODULES

SECRET = b"known to the members only"


class Ranks:
    """``count`` processes, each a fork of one that has torch.  ``environment`` is added to theirs, which is
    that of the first pool.
    """

    def __init__(
        self, count: int, device: str = "cpu", environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*MODULES, __name__])
        self.pipes: list[Connection] = []
        self.processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, device, number, dict(environment)), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.generation = 0
        self.store: Any = None

    def run(
        self, layout: Layout, function: Callable[..., Any], *arguments: Any, nodes: Sequence[str] = ()
    ) -> list[Any]:
        """Runs the function in every member, and returns the results by world rank.  ``nodes`` are the
        members' nodes, if not all one.

        Raises :class:`AssertionError` with the traceback of a member that raised, and :class:`TimeoutError`
        if a member does not answer.
        """
        self.start(layout, range(layout.world), function, *arguments, nodes=nodes)
        answers = [self._answer(process) for process in range(layout.world)]
        return [_value(*answer) for answer in answers]

    def run_each(
        self,
        layout: Layout,
        function: Callable[..., Any],
        cases: Sequence[tuple[Any, ...]],
        *,
        nodes: Sequence[str] = (),
    ) -> list[list[Any]]:
        """Runs the function with the arguments of each case, one after the other in one world.  Returns
        results by case and world rank.
        """
        members = self.run(layout, _each, function, cases, nodes=nodes)
        return [list(results) for results in zip(*members, strict=True)]

    def start(
        self,
        layout: Layout,
        processes: Sequence[int],
        function: Callable[..., Any],
        *arguments: Any,
        nodes: Sequence[str] = (),
    ) -> None:
        """Begins to run the function in these processes, which get the world ranks 0, 1, …, and returns at
        once.
        """
        from elastic.engine.stores import host_store

        sys.audit(WORLD)
        self.generation += 1
        self.store = host_store("127.0.0.1", PATIENCE_S)
        for rank, process in enumerate(processes):
            self.pipes[process].send(
                (layout, rank, self.generation, self.store.port, tuple(nodes), function, arguments)
            )

    def answer(self, process: int) -> Any:
        """Returns the result of the function in one process."""
        return _value(*self._answer(process))

    def _answer(self, process: int) -> tuple[int, bool, Any]:
        if not self.pipes[process].poll(PATIENCE_S):
            raise TimeoutError(f"process {process} did not answer within {PATIENCE_S} s")
        failed, value, counted = self.pipes[process].recv()
        add(counted)
        return process, failed, value

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(10)


def _each(world: Any, function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(world, *arguments) for arguments in cases]


def _value(process: int, failed: bool, value: Any) -> Any:
    if failed:
        raise AssertionError(f"process {process}:\n{value}")
    return value


def _serve(pipe: Connection, kind: str, number: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    begin()
    if kind == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)  # one device, as Ray shows it to a worker
    from elastic.engine.stores import join_store
    from elastic.engine.world import World
    from elastic.job import Job
    from elastic.train.session import prepare_process
    from tests.support.toy_axes import registered

    device = prepare_process(Job(name="ranks", bucket="/nowhere", workers={"gpus": int(kind == "cuda")}))
    # as a worker does after its warm-up: to look at all modules takes half a second, and no test measures
    # what is here by now
    gc.freeze()
    while (task := pipe.recv()) is not None:
        layout, rank, generation, port, nodes, function, arguments = task
        world = None
        try:
            with registered() if layout.more else nullcontext():
                store = join_store("127.0.0.1", port, SECRET, PATIENCE_S)
                world = World.form(
                    store,
                    generation=generation,
                    layout=layout,
                    rank=rank,
                    device=device,
                    form_s=PATIENCE_S,
                    nodes=nodes,
                )
                world.connect(PATIENCE_S, 60)
                answer = False, function(world, *arguments)
            pipe.send((*answer, taken()))
        except Exception:  # the process boundary: raised again in the test
            pipe.send((True, traceback.format_exc(), taken()))
        finally:
            if world is not None:
                world.close()
            del world
            # as a worker does between worlds: until its last cycle is collected, gloo's threads of an aborted
            # world spin
            gc.collect()
