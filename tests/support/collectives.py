"""Records the collectives that a member really calls, with their bytes.

They are recorded below torch.distributed, as operators of ``c10d``: every call ends there, whatever library
or attribute it came through.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Call:
    """One collective.  ``name`` is the operator without its underscore; ``bytes`` counts all tensors among
    the arguments.

    ``sent`` has the bytes for each member if it is an all-to-all with sizes.  ``dtypes`` are those of the
    tensors, and ``members`` the world ranks of the group.
    """

    name: str
    bytes: int
    sent: tuple[int, ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    members: tuple[int, ...] = ()


class Calls(list[Call]):
    """Collectives in the order of their calls."""

    def named(self, *names: str) -> list[Call]:
        return [call for call in self if call.name in names]

    def bytes(self, *names: str) -> int:
        return sum(call.bytes for call in self.named(*names))


@contextmanager
def counting() -> Iterator[Calls]:
    """Yields a list of every collective that this thread calls meanwhile."""
    calls = Calls()
    with _Mode(calls):
        yield calls


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            leaves = tree_leaves((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            size = sum(tensor.nbytes for tensor in tensors)
            name, sent = func._opname.strip("_"), ()
            if name == "alltoall_base":
                # output, input, group, sizes of the output, sizes of the input
                _, mine, _, _, sizes, *_ = args
                sent = tuple(count * mine.itemsize for count in sizes)
            groups = [
                leaf
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in leaf._type().qualified_name()
            ]
            members = [
                tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))) for group in groups
            ]
            self.calls.append(Call(name, size, sent, frozenset(tensor.dtype for tensor in tensors), *members))
        return func(*args, **(kwargs or {}))
