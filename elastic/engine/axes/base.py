"""The parameters of a wrapped model, as the rest of the engine knows them, whatever wraps the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from torch import Tensor

from elastic.engine.axes.order import Order


class Parameters(ABC):
    """A member's parts of all parameters, and of the sums of their gradients.  A step calls the methods in this order."""

    parts: Mapping[str, Tensor]
    """The parts by the name of the parameter.  Healing fills them, and the optimizer changes them."""
    trained: frozenset[str]
    """The names of the parameters that have gradients."""
    copies: Sequence[Tensor] = ()
    """The copies of parameters with which the model computes all the time, if it does so in another dtype, or that come from the host."""

    order: Order | None = None
    """The notes of what this member gathers and sums for single blocks; None if a pass of the model gathers nothing."""
    current = False
    """True if a pass of the model has the values of the parts, or gathers them itself.  Whoever changes the parts makes it false."""

    @abstractmethod
    def refresh(self) -> None:
        """Lets a pass of the model have the present values outside of a round.  Every member must do so."""

    @abstractmethod
    def begin_round(self, number: int, *, last: bool) -> None:
        """Prepares for the forward and backward pass of round ``number`` of a step, whose ``last`` one it may be."""

    @abstractmethod
    def end_forward(self) -> None:
        """Ends the forward pass of a round.  Collectives that are not the parameters' own may follow: these have all begun."""

    @abstractmethod
    def end_round(self) -> None:
        """Sums what is not summed yet after the backward pass of a round."""

    @abstractmethod
    def grads(self) -> dict[str, Tensor]:
        """Returns this member's parts of the summed gradient, by name.  A parameter that was not used has zeros."""

    @abstractmethod
    def forget_grads(self) -> None:
        """Gives up the memory of the gradients."""
