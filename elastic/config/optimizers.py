"""The optimizers that have a short name.  A row here, and a file of code in ``elastic/engine/optim``, make
one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple


class BuiltIn(NamedTuple):
    """An optimizer that has a short name."""

    rule: str
    """Place of its rule, as ``pkg.module:NAME``."""
    reads: tuple[str, ...]
    """The settings of ``[optim]`` that it reads, of those that only some optimizers read.  An optimizer that
    reads ``eps`` divides by it and the root of a moment.
    """


OPTIMIZERS: Mapping[str, BuiltIn] = {
    "adamw": BuiltIn("elastic.engine.optim.adamw:ADAMW", ("betas", "eps", "moments")),
    "sgd": BuiltIn("elastic.engine.optim.sgd:SGD", ("momentum",)),
    "adagrad": BuiltIn("elastic.engine.optim.adagrad:ADAGRAD", ("eps",)),
    "rmsprop": BuiltIn("elastic.engine.optim.rmsprop:RMSPROP", ("betas", "eps")),
    "muon": BuiltIn("elastic.engine.optim.muon:MUON", ("betas", "momentum", "eps")),
}
"""The optimizers by their short names.  Any other one is named as ``pkg.module:NAME``."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]  # pydantic reads the names from here
