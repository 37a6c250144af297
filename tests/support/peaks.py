"""The memory of real tensors that lives at once in a step, on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.config.sections import Workers
from elastic.engine.peak import peak_bytes
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.protocol.commit_record import GO_ON
from elastic.train.checks import estimate
from elastic.train.step import Step
from tests.support.segments import member


class Live(TorchDispatchMode):
    """Counts the bytes of the memory of real tensors that lives at once, that which FSDP2 gives a storage of
    before and takes away too.
    """

    def __init__(self, before: list[Tensor]) -> None:
        super().__init__()
        self.sizes = {
            StorageWeakRef(each.untyped_storage()): each.untyped_storage().nbytes() for each in before
        }
        self.most = 0
        self.resize: Any = None

    def __enter__(self) -> Any:
        resize = self.resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            self.sizes[StorageWeakRef(storage)] = size
            self.most = max(self.most, self.now())
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            StorageWeakRef(each.untyped_storage())
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor)
        }
        for each in tree_leaves(out):
            # not the host's, of before
            if isinstance(each, Tensor) and (memory := StorageWeakRef(each.untyped_storage())) not in given:
                self.sizes.setdefault(memory, each.untyped_storage().nbytes())
        self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        for memory in [memory for memory in self.sizes if memory.expired()]:
            del self.sizes[memory]
        return sum(self.sizes.values())


def measured(world: World, job: Job) -> int:
    """Returns the most bytes that live in the microbatches of the second step of a member."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        with me.fence as rules:
            rules.go(me.shape.generation)
        gc.collect()
        doing = Step(me.session, me.state, me.fence, me.shape, 2, lambda: GO_ON)
        with Live([*me.state.shard.values.values(), *me.state.parameters.copies]) as live:
            doing.run()
        doing.commit()
        return live.most


@contextmanager
def each_once() -> Iterator[None]:
    """Lets estimates ask for the peak of a step once for each job, which takes a second, though tests ask
    about many sizes of devices.

    What is kept are answers of :func:`peak_bytes` itself.  Names, places, and the number of workers and their
    memory do not count for it.
    """
    known: dict[object, int] = {}

    def ask(build: Callable[[], Any], job: Job, loss: Any, batch: Mapping[str, Tensor], *others: Any) -> int:
        same = job.model_copy(update={"name": "", "bucket": "", "workers": Workers(gpus=job.workers.gpus)})
        key = (
            repr(same),
            loss,
            repr({name: (value.shape, value.dtype) for name, value in batch.items()}),
            others,
        )
        if key not in known:
            known[key] = peak_bytes(build, job, loss, batch, *others)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "peak_bytes", ask)
        yield
