"""Counts the bytes that a step takes on the device beside the state, without computing anything.

Forward and backward run on fake tensors, which have shapes and a device but no memory.  So every setting of
``recompute`` can be tried before a world forms, in seconds, however large the model is.  Blocks are wrapped
as in a run (:func:`parallelize`), and a mode of torch sees each tensor that an operation makes, and whether
it still lives.

Compiled blocks are traced and split into forward and backward as for kernels, but no kernels are made.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.engine.blocks import sharding_table
from elastic.engine.fp8_weights import weights_of
from elastic.engine.host_memory import host_memory
from elastic.engine.parallelize import parallelize
from elastic.engine.precision import precision_of
from elastic.engine.world import World
from elastic.job import Job
from elastic.kernels.attention import causal_mask
from elastic.plan.layout import Layout

WITH_STATE = torch.ops.higher_order.run_and_save_rng_state
"""The operation that traced blocks use for dropout.  It returns the state of the generator too; kernels keep
a seed of 8 bytes instead.
"""
TRACED = "aot_eager_decomp_partition"
"""The backend of torch's compiler that splits a block as for kernels, and runs its operations one by one."""


def peak_bytes(
    build: Callable[[], nn.Module],
    job: Job,
    loss: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]],
    batch: Mapping[str, Tensor],
    device: torch.device,
    shards: int = 1,
) -> int:
    """Returns the largest number of bytes of a step's own tensors that live on the device at once.

    A member of a world with ``shards`` shards runs forward and backward on fake tensors, round after round,
    with the engine's own hooks.  So the number counts all that a step makes: what the forward pass leaves and
    the backward pass computes again, the gradients of activations, the weights that stage 3 of ZeRO gathers,
    the gradients of the parameters of a unit in the dtype in which the model computes, their flat copy, and
    the sums of all gradients, which stay from one round to the next.  It does not count the state and the
    copies of weights, which are there before the step, nor the host's memory to which ``activations =
    "offload"`` moves activations.

    Operations of compiled blocks run one by one, as the compiler has split them, and kernels fuse some: the
    number may be too large then.

    ``build()`` returns a new model of the job on the meta device; only shapes and dtypes of ``batch``, a
    microbatch, matter.  To compare settings, call it with ``job.replace(recompute=...)``.

    Call it while no world is there, best before the first one: it empties torch's compiler, and fake tensors
    stay in whatever cache the model's code keeps for the whole process.  Raises what the model or the loss
    raises, and torch's DataDependentOutputException if they ask for values of tensors.
    """
    (job, rounds), model = in_few_rounds(job.replace(offload="none")), build()
    with _imagined(device, shards) as world, _fake(gpu=job.workers.gpus > 0) as fake:
        model, parameters, scheme, statistics, _ = parallelize(model, world, job, backend=TRACED)
        model.train()
        watch = _Peak()
        host_memory(pinned=False).making = watch.elsewhere
        moved = {name: fake.from_tensor(value).to(device) for name, value in batch.items()}
        with watch:
            deal = scheme.begin_step(rounds * shards)
            for number in range(rounds):
                last = number + 1 == rounds
                parameters.begin_round(number, last=last)
                statistics.begin_round(number, deal)
                result = loss(model, moved)[0] if last or parameters.needs_every_pass else None
                parameters.end_forward()
                if result is not None:
                    result.backward()
                del result
                parameters.end_round()
                if job.compile:
                    gc.collect()  # the compiler leaves cycles with tensors
    return watch.most


def in_few_rounds(job: Job) -> tuple[Job, int]:
    """Returns a job, and a number of rounds after which its member holds as much as a member of ``job`` that
    runs all microbatches of a step.

    From the second round on a member holds the sum of its gradients during the forward pass.  If a block has
    several microbatches, the member also holds the sum of the earlier blocks, from the second microbatch of
    the second block on.
    """
    block = job.reduction.block if job.reproducible else 1
    rounds = 4 if block > 1 and job.microbatches > block + 1 else min(job.microbatches, 2)
    return job.replace(reduction=job.reduction.model_copy(update={"block": min(block, 2)})), rounds


class Calls(NamedTuple):
    """The calls of torch functions in a forward pass."""

    of_fp8: tuple[str, str] | None
    """A weight that is held in fp8 and that the model reads by itself, and the function that it calls; None
    if there is none.

    The model would get NaN from it (``fp8_weights.py``).
    """
    attention: bool
    """True if the model calls torch's attention where the setting ``recompute`` sees the call, within a block
    or not.  Calls by torch's own modules stay unseen.
    """


def calls_of(
    build: Callable[[], nn.Module],
    job: Job,
    loss: Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, Tensor]],
    batch: Mapping[str, Tensor],
) -> Calls:
    """Watches a forward pass.  The arguments are those of :func:`peak_bytes`, and it raises the same."""
    job = job.replace(activations="keep", offload="none", recompute="none", compile=False)
    model = build()
    with _imagined(torch.device("cpu")) as world, _fake(gpu=False) as fake:
        model, *_ = parallelize(model, world, job)
        held = {id(layer.weight): name for name, layer in weights_of(model, sharding_table(model)).items()}
        with _FirstCalls(held if precision_of(job).fp8 is not None else {}) as calls:
            loss(model, {name: fake.from_tensor(value) for name, value in batch.items()})
    return Calls(calls.found, calls.attention)


class _FirstCalls(TorchFunctionMode):
    """Notes the first call of a torch function on one of the parameters ``held``, by id, and whether
    attention is called.  The product of a layer with its own weight is no such call.
    """

    def __init__(self, held: Mapping[int, str]) -> None:
        super().__init__()
        self.held = held
        self.found: tuple[str, str] | None = None
        self.attention = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.attention |= func is F.scaled_dot_product_attention
        if self.held and func.__name__ != "__get__" and self.found is None:  # an attribute, such as the dtype
            names = (self.held.get(id(each)) for each in tree_leaves((args, kwargs)))
            self.found = next(((name, func.__name__) for name in names if name is not None), None)
        return func(*args, **(kwargs or {}))


@contextmanager
def _imagined(device: torch.device, shards: int = 1) -> Iterator[World]:
    """Yields a world of one replica, and leaves nothing of what is compiled or cached in it."""
    _forget()
    hook = sys.excepthook  # torch replaces it by one that says the rank of a process
    world = World.imagined(Layout(1, shards), device)
    try:
        if shards > 1:
            assert world.shard_mesh  # made now, while tensors have values
        yield world
    finally:
        world.close()
        sys.excepthook = hook
        _forget()


def _forget() -> None:
    """Drops compiled code and cached tensors, since fake and real tensors must not meet."""
    torch.compiler.reset()
    causal_mask.cache_clear()
    host_memory.cache_clear()


def _fake(*, gpu: bool) -> FakeTensorMode:
    """Returns a mode that makes tensors without memory; its attribute ``gpu`` says that they stand for those
    of a GPU, whose kernels need other memory (``cross_entropy.py``).  A class of our own would lack the rules
    that torch has for this one, such as for recomputation.
    """
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode.gpu = gpu
    found: FakeTensorMode = mode
    return found


class _Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that operations have made and that live at once."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        """The most bytes so far."""
        self._now = 0  # also counts dead memory, until _set() looks for it
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._counts = True
        self._resize: Any = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Says that blocks may be compiled in this mode; in others torch refuses it."""
        return True

    def __enter__(self) -> Any:
        resize = self._resize = torch.UntypedStorage.resize_

        def watched(storage: Any, size: int) -> Any:
            if storage._cdata in self._living:
                self._set(storage, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = watched  # type: ignore[assignment, method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._counts:
            return out
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        }
        for each in tree_leaves(out[1:] if func is WITH_STATE else out):
            if isinstance(each, Tensor) and (memory := each.untyped_storage())._cdata not in given:
                self._set(memory, memory.nbytes())
        return out

    def _set(self, memory: torch.UntypedStorage, size: int) -> None:
        known, before = self._living.get(memory._cdata, (None, 0))
        self._living[memory._cdata] = known or StorageWeakRef(memory), size
        self._now += size - before
        if self._now > self.most:
            for at in [at for at, (each, _) in self._living.items() if each.expired()]:
                self._now -= self._living.pop(at)[1]
            self.most = max(self.most, self._now)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leaves out the memory that is made meanwhile, which is not on the device."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True
