"""The parameters of a wrapped model, as the rest of the engine knows them, whatever wraps the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from elastic.engine.parameters.order import Order


class Parameters(ABC):
    """A member's parts of all parameters, and of the sums of their gradients.  A step calls the methods in
    this order.
    """

    parts: Mapping[str, Tensor]
    """The parts by the name of the parameter.  Healing fills them, and the optimizer changes them."""
    trained: frozenset[str]
    """The names of the parameters that have gradients."""
    copies: Sequence[Tensor] = ()
    """Memory beside ``parts`` with which the model computes: copies in another dtype, whole copies, and
    copies that come from the host.
    """

    order: Order | None = None
    """The notes of what this member gathers and sums for single blocks; None if a pass of the model gathers
    nothing.
    """
    missing: frozenset[str] = frozenset()
    """The names of the trained parameters that the backward pass of the present round gave no gradient, once
    it has ended.
    """
    needs_every_pass: ClassVar[bool]
    """True if each round must run a forward and a backward pass.  If False, a round without them adds zeros
    to the sums.
    """
    current = False
    """True if a pass of the model has the values of the parts, or gathers them itself.  Whoever changes the
    parts makes it false.
    """

    @abstractmethod
    def refresh(self) -> None:
        """Gives the model the present values for a pass outside of a round.  Every member must call it."""

    @abstractmethod
    def begin_round(self, number: int, *, last: bool) -> None:
        """Prepares for the forward and backward pass of round ``number`` of a step.  ``last`` tells that it
        is the last round of the step.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Ends the forward pass of a round.  Other collectives may follow, because all gathers of parameters
        have begun.
        """

    @abstractmethod
    def end_round(self) -> None:
        """Sums what is not summed yet after the backward pass of a round."""

    @abstractmethod
    def grads(self) -> dict[str, Tensor]:
        """Returns this member's parts of the summed gradient, by name.  A parameter that was not used has
        zeros.
        """

    @abstractmethod
    def forget_grads(self) -> None:
        """Gives up the memory of the gradients."""

    def live_in(self, parts: Mapping[str, Tensor], fetch: Callable[[str], Tensor]) -> None:
        """Lets the parts be ``parts``, in memory of the host.  ``fetch(name)`` returns the values of one part
        on the device.

        Only a job that offloads its state calls this method, and :meth:`take` after it.
        """
        raise AssertionError(f"{type(self).__name__} cannot offload its parts")

    def take(self, name: str, values: Tensor) -> None:
        """Gives the model the values of this member's part of one parameter, which are on the device."""
        raise AssertionError(f"{type(self).__name__} cannot offload its parts")

    @abstractmethod
    def writes(self) -> Mapping[str, Hashable]:
        """Returns a mark for each parameter, by name.  The mark changes when other code writes to the tensor
        that the model finds there, gives it other memory, or puts a hook on its gradient.
        """

    @abstractmethod
    def is_own(self, name: str, found: object) -> bool:
        """Returns whether ``found`` is the tensor that this class has put in the place of the parameter
        ``name``.
        """


def in_place_of(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Returns a parameter with ``values`` that code of the model takes for ``parameter``: see
    :func:`take_over`.
    """
    made = nn.Parameter(values, requires_grad=parameter.requires_grad)
    take_over(made, parameter)
    return made


def take_over(made: nn.Parameter, parameter: nn.Parameter) -> None:
    """Gives ``made`` the class and the attributes of ``parameter``, and the hooks on its gradient."""
    if type(parameter) is not nn.Parameter:
        made.__class__ = type(parameter)
    made.__dict__.update(parameter.__dict__)
    if parameter._backward_hooks:
        made._backward_hooks = parameter._backward_hooks


def with_rows(whole: Tensor) -> Tensor:
    """Returns ``whole``, or a view with one row of a tensor without dimensions: members hold and cut rows."""
    return whole if whole.dim() else whole.view(1)


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter in the state: that of :func:`with_rows`."""
    return tuple(parameter.shape) or (1,)
