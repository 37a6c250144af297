"""Finds what a module keeps from one microbatch to the next outside of parameters and buffers: a counter, a
statistic, a generator.

Such state depends on which worker computed which microbatch, and is in no checkpoint.  But a model may also
write an attribute in each forward pass and read it only in the same pass, such as the loss of an auxiliary
head; that is no state.  A write alone does not tell the two apart.  If the same microbatch is computed twice
in a row, state changes, and an attribute of one pass has the same value again.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

OWN = frozenset(vars(nn.Module())) - {"training"}
"""The attributes that torch itself gives every module."""
DEEP = 3
"""Number of levels of nested containers and objects that are looked into."""
MANY = 256
"""Number of elements of a container that are looked at."""
LARGE = 1 << 22
"""Number of elements of a tensor up to which its values are looked at."""


def attributes_of(model: nn.Module, *, exact: bool) -> dict[str, Hashable]:
    """Returns a mark of each attribute of each module of ``model``, by its path, and of each buffer but those
    of norms.

    Without ``exact`` a kernel may round differently the next time, so floating-point numbers are left out.
    """
    found = dict[str, Hashable]()
    for where, module in model.named_modules():
        at = f"{where}." if where else ""
        for name, value in vars(module).items():
            if name not in OWN and (mark := _mark(value, exact, DEEP)) is not None:
                found[f"{at}{name}"] = mark
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, buffer in module._buffers.items():
                found[f"{at}{name}"] = _mark(buffer, exact, DEEP)
    return found


def changed(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> str:
    """Returns the name of the first attribute that is not as it was, or ""."""
    return next((name for name in (*after, *before) if before.get(name) != after.get(name)), "")


def _mark(value: Any, exact: bool, deep: int) -> Hashable:
    """Returns something that changes with ``value``; None for what cannot be state, or is not looked at."""
    match value:
        case None | bool() | int() | str():
            return type(value).__name__, value
        case float():
            return ("float", value if value == value else "nan") if exact else None
        case Tensor():
            if (
                (not exact and value.is_floating_point())
                or value.numel() > LARGE
                or value.is_meta
                or value.layout is not torch.strided
            ):
                return "tensor", tuple(value.shape)
            raw = value.detach().contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
            return "tensor", tuple(value.shape), hashlib.blake2b(raw, digest_size=8).digest()
        case torch.Generator():
            return "generator", value.get_state().numpy().tobytes()
        case random.Random():
            return "generator", value.getstate()
        case numpy.random.Generator():
            return "generator", repr(value.bit_generator.state)
        case numpy.random.RandomState():
            return "generator", repr(value.get_state(legacy=False))
        case numpy.ndarray():
            return (
                "array",
                value.shape,
                hashlib.blake2b(numpy.ascontiguousarray(value).tobytes(), digest_size=8).digest(),
            )
        case nn.Module() | type():
            return None
        case list() | tuple() | deque() if deep:
            return (
                "list",
                len(value),
                *(_mark(each, exact, deep - 1) for each, _ in zip(value, range(MANY), strict=False)),
            )
        case dict() if deep:
            return (
                "dict",
                len(value),
                *(
                    (str(key), _mark(each, exact, deep - 1))
                    for (key, each), _ in zip(value.items(), range(MANY), strict=False)
                ),
            )
        case set() | frozenset():
            return "set", len(value)
    if deep and hasattr(value, "__dict__") and not callable(value):
        return "object", *((key, _mark(each, exact, deep - 1)) for key, each in [*vars(value).items()][:MANY])
    return None
