"""Two tools for immutable values: the same value with some fields replaced, and a value as the key of a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def evolve(value: T, **changes: Any) -> T:
    """Returns ``value`` with some fields replaced, as ``dataclasses.replace`` does, but five times as fast
    for a value with many fields.

    The new value keeps cached properties of the old one, so ``value`` must have none.
    """
    assert changes.keys() <= value.__dict__.keys(), (
        f"{type(value).__name__} has no {', '.join(changes.keys() - value.__dict__.keys())}"
    )
    new: T = object.__new__(type(value))
    new.__dict__.update(value.__dict__, **changes)
    return new


@dataclass(frozen=True)
class Same:
    """Makes a value that is never changed the key of a cache, compared by identity, which costs nothing."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value
