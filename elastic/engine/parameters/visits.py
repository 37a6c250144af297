"""Weights that live in the host's memory and visit the device: the weights of the block that runs, and of one
more block that are on their way.

GeePS (Cui and others 2016) and ZeRO-Infinity (Rajbhandari and others 2021) do the same.  A group is the
weights of one block, and lies in one piece of pinned memory.  It comes over a stream of its own while the
block before it runs, in the backward pass while the block after it does.  It leaves when the block has run,
and in the backward pass when all its gradients came, or when another block needs weights.  A group with
frozen weights leaves only when another block needs weights, because no gradient tells that the frozen ones
are no longer used.  Group 0 is the rest: weights outside of blocks, and those that several blocks share.  It
comes once a step, and leaves after the last backward pass.

Values in the host's memory do not change within a step.  So a visit is new memory each time, and whoever
still has a tensor of an earlier visit has the right values.  Only memory is at stake, and two things would
keep it:

* Autograd keeps weights for the backward pass.  It gets a :class:`_SavedWeight` in their place, and the
  weights come when it reads that.  The hooks for this are the innermost; any other tensor goes on to the
  hooks around them, those of ``recomputed_groups.py`` or ``activations.py``.
* A weight that is read outside of a call of its block comes then, and stays until the backward pass is over,
  because its reader is not known.

While a group is away its parameters are NaN, in memory that all of them share.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from elastic.engine.host_memory import host_memory
from elastic.engine.parameters.gathers import COLLECTIVES, Old
from elastic.engine.streams import stream, wait_for

ALIGNED = 512
"""Bytes to which a weight is aligned, as torch's allocator does: kernels, and so the bits, may depend on it.
"""
WEIGHTS = "weights"
"""Purpose of the stream over which weights come."""


@dataclass
class _BlockWeights:
    """A group: the weights of one block, or the rest of the weights."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    absent: list[Tensor] = field(default_factory=list)
    """The values of the parameters while the group is away."""
    offsets: list[int] = field(default_factory=list)
    """The place of each of them in the memory of the group, in bytes."""
    bytes: int = 0
    host: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    owners: list[nn.Module] = field(default_factory=list)
    """The modules that have parameters in this group, and in no later group."""

    def add(self, parameter: nn.Parameter) -> None:
        self.parameters.append(parameter)
        self.absent.append(parameter.data)
        self.offsets.append(self.bytes)
        self.bytes += -(-parameter.numel() * parameter.element_size() // ALIGNED) * ALIGNED

    def views(self, memory: Tensor) -> list[Tensor]:
        """Returns the weights in ``memory``, uint8 [bytes]."""
        places = zip(self.parameters, self.offsets, strict=True)
        return [memory[at:][: p.numel() * p.element_size()].view(p.dtype).view(p.shape) for p, at in places]


class _SavedWeight(NamedTuple):
    """A weight that autograd keeps, or a view of one, in the place of the tensor."""

    visits: Visits
    number: int
    dtype: torch.dtype
    place: tuple[Any, ...]
    """Its offset, shape and strides in the memory of the group."""


class _Other(NamedTuple):
    """A tensor that is no weight, as the outer hooks keep it."""

    kept: Any
    unpack: Callable[[Any], Tensor]


class Visits:
    """Brings the weights of a model to the device, those of a block for each run of the block."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], device: torch.device) -> None:
        """Wraps ``forward`` of the blocks.  A later wrapper calls this one, also to run a block again."""
        self.device = device
        self._blocks = [model.get_submodule(name) for name in blocks]
        for number, block in enumerate(self._blocks, 1):
            block.forward = partial(self._run, number, block.forward)
        self._groups = [_BlockWeights() for _ in range(len(blocks) + 1)]
        self._ready: Callable[[int], None] = lambda number: None
        self._here = dict[int, Tensor]()
        """The memory of the groups that are on the device."""
        self._coming = dict[int, tuple[Tensor, torch.cuda.Event | None]]()
        self._number_of = dict[int, int]()
        """The groups on the device by the address of their storage."""
        self._open = Counter[int]()
        """The number of calls of each block that have not ended."""
        self._stay = set[int]()
        """The groups that stay until the backward pass is over."""
        self._backward = False

    def hold(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Takes over the parameters with which ``model`` computes, and returns the memory of the host for
        their values, by name.

        The values that the parameters have now will be their values while they are away.
        """
        inside = [{id(each) for each in block.parameters()} for block in self._blocks]
        within = {id(module) for block in self._blocks for module in block.modules()}
        outside = {
            id(each)
            for module in model.modules()
            if id(module) not in within
            for each in module.parameters(recurse=False)
        }
        times = Counter(each for ids in inside for each in ids) + Counter(outside)
        numbers = {each: number for number, ids in enumerate(inside, 1) for each in ids if times[each] == 1}
        for parameter in parameters.values():
            self._groups[numbers.get(id(parameter), 0)].add(parameter)
        for module in model.modules():
            if own := [numbers.get(id(each), 0) for each in module.parameters(recurse=False)]:
                self._groups[max(own)].owners.append(module)
        if self.device.type == "cuda":  # an earlier world may still write to that memory
            wait_for(stream(COLLECTIVES, self.device).record_event())
        memory, places = host_memory(pinned=self.device.type == "cuda"), dict[int, Tensor]()
        for group in self._groups:
            group.host = memory.take(group.bytes)
            weakref.finalize(self, memory.give, group.host)
            places |= {
                id(parameter): value
                for parameter, value in zip(group.parameters, group.views(group.host), strict=True)
            }
        return {name: places[id(parameter)] for name, parameter in parameters.items()}

    def names(self, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
        """Returns the names of each group's parameters, in the order in which the groups are needed."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        return [[names[id(parameter)] for parameter in group.parameters] for group in self._groups]

    def after(self, ready: Callable[[int], None]) -> None:
        """Calls ``ready(number)`` before a group is read from the host's memory: its values may be on their
        way there.
        """
        self._ready = ready

    # ---- a step

    def begin(self) -> None:
        """Begins a round.  The present stream has the rest of the weights afterwards."""
        self._backward = False
        for number, group in enumerate(self._groups):
            if number not in self._here:
                self._hide(number, group)
        self.need(0, 1)

    def turn(self) -> None:
        """Begins the backward pass: the last block comes first."""
        self._backward = True
        self._begin(len(self._groups) - 1)

    def release(self, parameters: Collection[nn.Parameter]) -> None:
        """Lets the groups of ``parameters``, whose gradients have all come, leave, except groups with a
        frozen parameter.

        The backward pass may still need a frozen parameter: torch's checkpoint keeps the parameter itself,
        and its values would become NaN.
        """
        ids = {id(each) for each in parameters}
        for number in [*self._here]:
            group = self._groups[number].parameters
            if (
                number
                and self._may_leave(number)
                and ids & {id(each) for each in group}
                and all(each.requires_grad for each in group)
            ):
                self._leave(number)

    def end(self, *, last: bool) -> None:
        """Ends the backward pass of a round.  ``last`` tells that it is the last round of its step."""
        self._backward = False
        self._stay.clear()
        for number in [*self._here, *self._coming]:
            if number or last:
                self._leave(number)

    def need(self, number: int, step: int) -> None:
        """Lets the present stream have a group, and begins to bring the one that is ``step`` further.  The
        host waits for nothing.
        """
        # a mode of a repeated run must not see these operations, which are not the block's
        with torch.no_grad(), _disable_current_modes():
            if number not in self._here:
                for other in [*self._here, *self._coming]:
                    if other not in (0, number, number + step) and self._may_leave(other):
                        self._leave(other)
                self._begin(number)
                self._arrive(number)
            if number + step > 0:
                self._begin(number + step)

    def _may_leave(self, number: int) -> bool:
        return number not in self._stay and not self._open[number]

    def _begin(self, number: int) -> None:
        if number >= len(self._groups) or number in self._here or number in self._coming:
            return
        self._ready(number)
        self._coming[number] = bring(self._groups[number].host, self.device)

    def _arrive(self, number: int) -> None:
        memory, group = self._came(number), self._groups[number]
        self._here[number] = memory
        self._number_of[memory.untyped_storage()._cdata] = number
        for parameter, value in zip(group.parameters, group.views(memory), strict=True):
            parameter.data = value
        for module in group.owners:
            if isinstance(module._parameters, Old):
                module.__dict__["_parameters"] = module._parameters.own

    def _came(self, number: int) -> Tensor:
        """Returns the memory of a group that was coming, for the present stream."""
        memory, event = self._coming.pop(number)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return memory

    def _leave(self, number: int) -> None:
        if number in self._coming:
            self._came(number)
            return
        memory, group = self._here.pop(number), self._groups[number]
        del self._number_of[memory.untyped_storage()._cdata]
        for parameter, values in zip(group.parameters, group.absent, strict=True):
            parameter.data = values
        self._hide(number, group)

    def _hide(self, number: int, group: _BlockWeights) -> None:
        """Makes each read of a parameter of the group bring the group first."""
        for module in group.owners:
            if not isinstance(module._parameters, Old):
                module.__dict__["_parameters"] = Old(module._parameters, partial(self._read, number))

    def _read(self, number: int) -> None:
        """Brings a group because code reads one of its parameters outside of a call of its block."""
        if not self._backward:
            self._stay.add(number)
        self.need(number, -1 if self._backward else 0)

    # ---- a run of a block

    def _run(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.need(number, 1)
        self._open[number] += 1
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, outer), _unpack):
                return forward(*args, **kwargs)
        finally:
            self._open[number] -= 1
            if not self._backward and self._may_leave(number):
                self._leave(number)

    def _pack(
        self, outer: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None, tensor: Tensor
    ) -> Any:
        if type(tensor) in (Tensor, nn.Parameter):
            number = self._number_of.get(tensor.untyped_storage()._cdata)
            if number:
                return _SavedWeight(
                    self, number, tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())
                )
        return tensor if outer is None else _Other(outer[0](tensor), outer[1])

    def again(self, saved: _SavedWeight) -> Tensor:
        """Returns a weight that autograd needs."""
        self.need(saved.number, -1)
        memory = self._here[saved.number].untyped_storage()
        return torch.empty(0, dtype=saved.dtype, device=self.device).set_(memory, *saved.place)


def bring(host: Tensor, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    """Begins to copy memory of the host to new memory of the device.  Returns that and, on a GPU, the end of
    the transfer.
    """
    memory = torch.empty(len(host), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return memory.copy_(host), None
    side = stream(WEIGHTS, device)
    # earlier users of this memory, and writers of the host's memory, come first
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        memory.copy_(host, non_blocking=True)
        return memory, side.record_event()


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _SavedWeight):
        return kept.visits.again(kept)
    if isinstance(kept, _Other):
        return kept.unpack(kept.kept)
    found: Tensor = kept
    return found


def absent(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns values that are not there: NaN (0 of an integer) in the memory of one element."""
    return torch.full((), math.nan if dtype.is_floating_point else 0, dtype=dtype, device=device).expand(
        shape
    )


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of ``module`` as they are, and brings none to the device."""
    for each in module.modules():
        yield from (parameter for parameter in dict.values(each._parameters) if parameter is not None)
