"""Notices changes of the state that a pass of the model, or the loss, makes by other means than a gradient.

A parameter that is written to in place, or gets other memory, would part the replicas, and is lost where
weights are gathered or copied; a buffer would depend on which worker computed which microbatch; a parameter
that is frozen later would still be trained.  So each of them ends the run at the step where it happens.
Torch counts the writes of each tensor, so a check costs a fraction of a microsecond for each tensor.  It does
not count writes through ``.data``, nor those of ``F.batch_norm``: values of buffers are compared once, in the
first microbatch of each world, and writes to parameters are watched in the trial of a new run (``trial.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from elastic.engine.parameters.base import Parameters
from elastic.engine.world import World
from elastic.errors import StateChanged

WRITTEN = (
    "forward, backward, the loss or the loop changed the parameter {name!r} of {model!r} directly, "
    "not by its gradient.  This change is lost when weights are gathered or copied, and workers would "
    "differ.  Compute a new tensor from the parameter, as w = nn.functional.normalize(self.weight); "
    "do not use max_norm, and do not clamp the parameter in place.  For an average of all weights set "
    "optim.average; a teacher model inside forward is not possible yet"
)
REPLACED = (
    "forward, backward, the loss or the loop replaced the parameter {name!r} of {model!r} by another "
    "tensor; build the parameter in the constructor, and do not replace it"
)
FROZEN = (
    "requires_grad of the parameter {name!r} of {model!r} is {now} now, but was {before} when the "
    "model was built, and the engine does not follow this change; freeze or unfreeze the parameter in "
    "the constructor or in build()"
)
ADDED = (
    "forward, backward or the loss added {what} to {where} of {model!r}: no checkpoint and no other "
    "worker would have it; register it in the constructor"
)
GRADIENT = (
    "the loop uses or changes parameter.grad of {model!r}, but only the engine may do so: it adds the "
    "gradients of all workers and updates the weights.  In place of an optimizer or clip_grad_norm_ "
    "in the loop, set optim, optim.clip_norm and schedule in the job; to change a gradient, give the "
    "parameter a hook (register_hook); the norm is in the outcome of step.commit()"
)
HOST, NORMS = "guard", "guard's norms"
"""Keys of the host memory for comparisons."""
BUFFER = (
    "forward or backward changed the buffer {name!r} of {model!r}.  Its value would depend on which "
    "worker computed which microbatch, so the result would depend on the number of workers.  Keep "
    "this value out of the model.  In place of a norm that keeps its own statistics use "
    "nn.BatchNorm1d, 2d or 3d, whose statistics the engine keeps, or a LayerNorm, RMSNorm or "
    "GroupNorm; in place of nn.utils.parametrizations.spectral_norm use weight_norm"
)


class Trap(Tensor):
    """Stands in for a missing gradient while the user's loop runs: any operation on it raises
    :class:`StateChanged`.
    """

    model: str
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        trap = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Trap))
        raise StateChanged(GRADIENT.format(model=trap.model))


class Guard:
    """Looks at the parameters and buffers of one wrapped model before and after something runs that must not
    change them.
    """

    def __init__(
        self, model: nn.Module, parameters: Parameters, world: World, named: str, *, compiles: bool = False
    ) -> None:
        """``named`` is the setting ``model`` of the job.  With ``compiles`` no :class:`Trap` is set, because
        compiled code looks at missing gradients.
        """
        self._parameters, self._member_of, self._named, self._compiles = parameters, world, named, compiles
        modules = [*model.named_modules()]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._zero = torch.zeros((), device=world.device)
        self._slots = [
            (names[id(parameter)], module, key)
            for _, module in modules
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        self._buffers = [(name, model.get_submodule(owner), key) for name, owner, key in _places(model)]
        self._saved_empty = [
            (".".join(filter(None, (where, key))), module, key)
            for where, module in modules
            for key, buffer in module._buffers.items()
            if buffer is None and key not in module._non_persistent_buffers_set
        ]
        """Buffers that a checkpoint would have, if they had values.  A non-persistent buffer without values
        may be filled later, for example with a table that is computed once.
        """
        self._sizes = [
            (where, module, len(module._parameters), len(module._modules), len(module._buffers))
            for where, module in modules
        ]
        self._written: Mapping[str, Hashable] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        self._values: dict[str, Tensor] = {}
        self._norms: Tensor | None = None
        self._grads: list[object] | None = None
        self._traps: dict[str, Trap] = {}
        self._trapped: list[Tensor] = []

    def begin(self, *, values: bool = False, loop: bool = False) -> None:
        """Remembers the present state; with ``values``, the values of the buffers, too.  The parameters must
        be those of the present round.

        ``loop`` means that the user's loop runs next: then writes through ``.data`` and to gradients are also
        noticed.
        """
        self._written, self._marks = self._parameters.writes(), self._buffer_marks()
        self._values = self._buffer_values() if values else {}
        self._let_go()
        self._norms, self._grads = (self._own_norms(), self._own_grads()) if loop else (None, None)
        if loop and not self._compiles:
            self._trap()

    def reserve(self) -> None:
        """Reserves the host memory of comparisons before anything is launched that may hang."""
        self._member_of.reserve(HOST, torch.empty(max(len(self._buffers), 1), dtype=torch.bool))
        self._member_of.reserve(NORMS, torch.empty(len(self._slots), dtype=torch.bool))

    def check(self, *, buffers: bool = True, given_up: Callable[[], bool] = lambda: False) -> None:
        """Raises :class:`StateChanged` unless the state is as it was at :meth:`begin`.

        It must be called outside of a pass.  If values are compared, the host waits for the device until
        ``given_up()``.
        """
        self._let_go()
        self._check_parameters()
        if self._grads is not None and self._own_grads() != self._grads:
            self._refuse(GRADIENT)
        if (norms := self._norms) is not None:
            alike = torch.isclose(self._own_norms(), norms, rtol=0, atol=0, equal_nan=True)
            if False in (found := self._member_of.to_host(alike, given_up=given_up, key=NORMS).tolist()):
                self._refuse(WRITTEN, self._slots[found.index(False)][0])
        if not buffers:
            return
        if (now := self._buffer_marks()) != self._marks:
            self._refuse(BUFFER, next(name for name in now if now[name] != self._marks.get(name)))
        for name, module, key in self._saved_empty:
            if module._buffers.get(key) is not None:
                self._refuse(ADDED, what=f"the buffer {name!r}", where="a buffer that was None")
        before, self._values = self._values, {}
        if before:
            values = self._buffer_values()
            changed = torch.stack([(values[name] != before[name]).any() for name in before])
            for name, differs in zip(
                before, self._member_of.to_host(changed, given_up=given_up, key=HOST).tolist(), strict=True
            ):
                if differs:
                    self._refuse(BUFFER, name)

    def _check_parameters(self) -> None:
        for name, module, key in self._slots:
            found = dict.get(module._parameters, key)  # without waiting for its values: see :class:`Old`
            if not self._parameters.is_own(name, found):
                self._refuse(REPLACED, name)
            elif found is not None and found.requires_grad != (name in self._parameters.trained):
                self._refuse(FROZEN, name, now=found.requires_grad, before=name in self._parameters.trained)
        if (now := self._parameters.writes()) != self._written:
            self._refuse(WRITTEN, next(name for name in now if now[name] != self._written.get(name)))
        for where, module, parameters, modules, buffers in self._sizes:
            if (
                len(module._buffers) > buffers
                and (key := [*module._buffers][-1]) not in module._non_persistent_buffers_set
            ):
                self._refuse(ADDED, what=f"the buffer {key!r}", where=repr(where) if where else "the model")
            if len(module._parameters) != parameters or len(module._modules) != modules:
                what = (
                    f"the parameter {[*module._parameters][-1]!r}"
                    if len(module._parameters) > parameters
                    else "a module"
                )
                self._refuse(ADDED, what=what, where=repr(where) if where else "the model")

    def _refuse(self, said: str, name: str = "", **more: object) -> None:
        raise StateChanged(said.format(name=name, model=self._named, **more))

    def _own_norms(self) -> Tensor:
        """Returns the norm of what this member has of each parameter in its place: other values hardly have
        the same norm.
        """
        there = [dict.get(module._parameters, key) for _, module, key in self._slots]
        values = [each._local_tensor if isinstance(each, DTensor) else each for each in there]
        with torch.no_grad():
            return torch.stack(
                [each.detach().float().norm() if each is not None else self._zero for each in values]
            )

    def _trap(self) -> None:
        """Puts a :class:`Trap` in the place of each missing gradient, since a loop would not notice that the
        gradient is missing.
        """
        for name, module, key in self._slots:
            each = dict.get(module._parameters, key)
            if (
                each is not None
                and each.requires_grad
                and each.grad is None
                and not isinstance(each, DTensor)
            ):
                if name not in self._traps:
                    self._traps[name] = Tensor._make_wrapper_subclass(
                        Trap, each.shape, dtype=each.dtype, device=each.device
                    )
                    self._traps[name].model = self._named
                each.grad = self._traps[name]
                self._trapped.append(each)

    def _let_go(self) -> None:
        for each in self._trapped:
            if isinstance(each.grad, Trap):
                each.grad = None
        self._trapped = []

    def _own_grads(self) -> list[object]:
        """Returns a mark of each parameter's gradient: mostly None, since the engine takes gradients away."""
        grads = (
            each.grad if (each := dict.get(module._parameters, key)) is not None else None
            for _, module, key in self._slots
        )
        return [
            None
            if each is None
            else (id(each), (each._local_tensor if isinstance(each, DTensor) else each)._version)
            for each in grads
        ]

    def _buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Returns, by name, the address of each buffer, and how often it was written to, as far as torch
        counts that.
        """
        found = ((name, module._buffers.get(key)) for name, module, key in self._buffers)
        return {
            name: (buffer.data_ptr(), buffer._version) if buffer is not None else (0, 0)
            for name, buffer in found
        }

    def _buffer_values(self) -> dict[str, Tensor]:
        """Returns copies of the bytes of all buffers by name."""
        found = (
            (name, buffer)
            for name, module, key in self._buffers
            if (buffer := module._buffers.get(key)) is not None
        )
        return {
            name: buffer.detach().clone().flatten().view(torch.uint8)
            for name, buffer in found
            if buffer.numel()
        }


def _places(model: nn.Module) -> list[tuple[str, str, str]]:
    """Returns the name of each buffer, that of its module, and its name there."""
    return [(name, *name.rpartition(".")[::2]) for name, _ in model.named_buffers()]
