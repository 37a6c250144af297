"""Gathers whole weights from the parts of all shards once a step: a group of weights comes while the groups
before it are used.

A group is the weights of one bucket of blocks; the first group is those of the rest of the model.  Groups are
gathered one after the other in the order of the blocks, so all members call their collectives in the same
order, whatever their models use.  gloo sends in threads of its own, and NCCL on a stream of its own.  At most
``AHEAD`` groups are under way, which bounds the memory.

Nothing is asked of the model.  While the weights of a module are old, its dictionary of parameters is an
:class:`Old`, which waits for the new weights when code reads from it, as in DeepSpeed's ZeRO-3.  So code may
use a weight anywhere, also outside of its block, and never gets the values of an older step.  A block waits
for its weights before it runs, because compiled code reads the parameters of its modules in another way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Sequence, ValuesView
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic.engine.parameters.base import shape_of
from elastic.engine.streams import stream
from elastic.engine.world import World
from elastic.plan.layout import Layout
from elastic.plan.placement import most_rows

AHEAD = 1
"""Number of groups that are gathered before they are needed.  Each takes memory for its weights, and for this
member's part of them.
"""
COLLECTIVES = "collectives"
"""Purpose of the stream for all collectives of whole weights and of their gradients: in one stream no
collective overtakes another.
"""


class Weight(NamedTuple):
    """A weight with which the model computes, and this member's rows of it.  The model reads ``parameter``
    before it uses the weight.
    """

    parameter: nn.Parameter
    whole: Tensor
    part: Tensor


class Gathers:
    """The weights of a model that must be gathered in each step."""

    def __init__(
        self, model: nn.Module, world: World, groups: Sequence[Sequence[Weight]], blocks: Sequence[nn.Module]
    ) -> None:
        """``groups`` are in the order in which ``model`` needs them; the first one is needed before anything
        runs.  Without groups this class does nothing.
        """
        self.world = world
        # neither is this member's own work
        self._begin_next, self._take = world.pace.without(self._begin), world.pace.without(self._arrived)
        self._groups = [_by_dtype(group) for group in groups]
        self._here = len(groups)
        """The number of groups whose weights are those of the present step."""
        self._coming: deque[list[Callable[[], object]]] = deque()
        """The groups that are being gathered: calls after which the present stream has them."""
        self._owners: list[list[nn.Module]] = [[] for _ in groups]
        """The modules that have parameters in each group, and in no later group."""
        numbers = {id(weight.parameter): number for number, group in enumerate(groups) for weight in group}
        called = frozenset(blocks)
        for module in model.modules() if groups else ():
            if last := _last(module.parameters(recurse=False), numbers):
                self._owners[last].append(module)
            if module in called:
                before_calls(module, partial(self.need, _last(module.parameters(), numbers)))

    def begin(self) -> None:
        """Begins a step, for which the parts have their values.  The present stream has the first group
        afterwards.
        """
        if not self._groups:
            return
        self._here = 0
        for number, modules in enumerate(self._owners):
            for module in modules:
                module.__dict__["_parameters"] = Old(module._parameters, partial(self.need, number))
        if self.world.device.type == "cuda":
            self._stream.wait_stream(torch.cuda.current_stream())
        self.need(0)

    @torch.no_grad()
    def need(self, number: int) -> None:
        """Lets the present stream have the groups up to ``number``, and begins to gather the next.  On CUDA
        the host waits for nothing.

        Raises :class:`WorldBroken` if a collective fails.
        """
        while self._here <= number and self._here < len(self._groups):
            if not self._coming:
                self._begin_next()
            self._take()
        while len(self._coming) < AHEAD and self._here + len(self._coming) < len(self._groups):
            self._begin_next()

    def finish(self) -> None:
        """Gathers the groups that are left.  No other collective may begin before."""
        if self._groups:
            self.need(len(self._groups) - 1)

    def _arrived(self) -> None:
        """Waits for the next group, and shows it to the readers of parameters."""
        for arrive in self._coming.popleft():
            arrive()
        for module in self._owners[self._here]:
            module.__dict__["_parameters"] = module.__dict__["_parameters"].own
        self._here += 1

    def _begin(self) -> None:
        """Begins to gather the next group."""
        group = self._groups[self._here + len(self._coming)]
        if self.world.device.type != "cuda":
            self._coming.append([self._gather(alike) for alike in group])
            return
        with torch.cuda.stream(self._stream):
            for alike in group:
                self._gather(alike)()
            event = torch.cuda.Event()
            event.record()
        self._coming.append([lambda: torch.cuda.current_stream().wait_event(event)])

    def _gather(self, weights: Sequence[Weight]) -> Callable[[], None]:
        """Begins to gather weights of one dtype.  Returns a call that waits for them and writes them where
        the model has them.
        """
        whole, shards = [weight.whole for weight in weights], self.world.layout.shards
        ends = ends_of(whole, self.world.layout)
        mine = torch.empty(ends[-1], dtype=whole[0].dtype, device=self.world.device)
        places = [mine[first:][: weight.part.numel()] for weight, first in zip(weights, ends, strict=False)]
        # the parts may be in the host's memory
        torch._foreach_copy_(places, [weight.part.flatten() for weight in weights], non_blocking=True)
        everyone = mine.new_empty(shards * len(mine))
        wait = self.world.begin_all_gather(everyone, mine)

        def arrive() -> None:
            wait()
            rows = everyone.view(shards, -1)
            pairs = [
                pair
                for copy, (first, last) in zip(whole, pairwise(ends), strict=True)
                for pair in _pairs(copy, rows[:, first:last])
            ]
            with torch.autograd._unsafe_preserve_version_counter(tuple(whole)):  # it counts what others write
                torch._foreach_copy_(
                    [copy for copy, _ in pairs], [found for _, found in pairs], non_blocking=True
                )

        return arrive

    @property
    def _stream(self) -> torch.cuda.Stream:
        return stream(COLLECTIVES, self.world.device)


class Old(dict[str, Any]):
    """The parameters of a module while their values are old.  A read waits for the new values; then the
    module has its own dictionary again.
    """

    def __init__(self, own: dict[str, nn.Parameter | None], need: Callable[[], None]) -> None:
        super().__init__(own)
        self.own, self._need = own, need

    def __getitem__(self, name: str) -> Any:
        self._need()
        return self.own[name]

    def get(self, name: str, default: Any = None) -> Any:
        self._need()
        return self.own.get(name, default)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]  # the type of a dictionary's own view cannot be named
        self._need()
        return self.own.values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._need()
        return self.own.items()


def ends_of(whole: Sequence[Tensor], layout: Layout) -> list[int]:
    """Returns the places at which the parameters begin in the memory of one shard, and the place at which the
    last one ends.  A part takes as much memory as the longest part of its parameter; a member may have no row.
    """
    ends = [0]
    for parameter in whole:
        rows = shape_of(parameter)[0]
        ends.append(ends[-1] + most_rows(rows, layout) * (parameter.numel() // max(rows, 1)))
    return ends


def _pairs(whole: Tensor, found: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs (place in ``whole``, values to copy there).  ``found`` [shards, n] are the parts of
    ``whole``, of which the last ones may be short.
    """
    # the number of parts that are not short
    flat, full = whole.detach().flatten(), whole.numel() // found.shape[1]
    rest = flat[full * found.shape[1] :]
    pairs = [(flat[: full * found.shape[1]].view(full, -1), found[:full])] if full else []
    return [*pairs, (rest, found[full, : len(rest)])] if len(rest) else pairs


def _by_dtype(group: Sequence[Weight]) -> list[list[Weight]]:
    found: dict[torch.dtype, list[Weight]] = {}
    for weight in group:
        found.setdefault(weight.whole.dtype, []).append(weight)
    return [*found.values()]


def _last(parameters: Iterable[nn.Parameter], numbers: dict[int, int]) -> int:
    """Returns the largest number of a parameter's group; 0 if no parameter has one."""
    return max((numbers.get(id(each), 0) for each in parameters), default=0)


def before_calls(module: nn.Module, need: Callable[[], None]) -> None:
    """Calls ``need`` before each call of ``module``, and before the hooks that the module has by now.

    The call stays outside of compiled code, which looks at parameters before anything else.
    """
    compiled = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda _module, _args: need(), prepend=True)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        need()
        return compiled(*args, **kwargs)

    module._compiled_call_impl = call
