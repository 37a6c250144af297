"""Deltas: the differences between two values as JSON, no larger than what changed.

A fence of N members brings N records.  If each repeated all N answers, the journal of one fence would grow
with N squared; so a record holds only what it adds.  A delta is one of:

    5, "text", [..], {"$": "Forming", ..}     the new value: a number, a text, a tuple, a dataclass
    {"=": {..}}                               the new value, if that is a dictionary
    {"~": {"step": .., "plan": ..}}           these fields changed, each by a delta; also entries of a dictionary, by key
    {"~": {..}, "-": ["w3"]}                  and these entries of the dictionary are gone
    {"~": {"4": ..}}                          these items of a tuple changed, by position
    {"without": [2, 5]}                       these items of a tuple are gone, by position
    {"at": 4, "cut": 1, "put": [..]}          of a tuple, ``cut`` items from position ``at`` on were replaced by ``put``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import compress, count
from operator import is_not
from typing import Any

Json = Any
Encode = Callable[[object], Json]
SAME: Json = object()
"""The delta between equal values; it is never written."""


class Misfit(ValueError):
    """A delta does not fit the value that it is applied to, so it was made from another value."""


def delta(before: object, after: object, encode: Encode, whole: tuple[type, ...] = ()) -> Json:
    """Returns the delta that turns ``before`` into ``after``, or :data:`SAME`.  A changed value of a
    ``whole`` type is written in full.
    """
    if before is after:
        return SAME
    if is_dataclass(after) and type(before) is type(after) and not isinstance(after, whole):
        both = [(name, getattr(before, name), getattr(after, name)) for name in _names(after.__class__)]
        pairs = {name: delta(old, new, encode, whole) for name, old, new in both if old is not new}
        changed = {name: each for name, each in pairs.items() if each is not SAME}
        return {"~": changed} if changed else SAME
    if isinstance(before, dict) and isinstance(after, dict):
        return _of_dictionaries(before, after, encode, whole)
    if isinstance(before, tuple) and isinstance(after, tuple):
        return _of_tuples(before, after, encode, whole)
    if before == after:
        return SAME
    return {"=": encode(after)} if isinstance(after, dict) else encode(after)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


def _of_dictionaries(
    before: dict[str, Any], after: dict[str, Any], encode: Encode, whole: tuple[type, ...]
) -> Json:
    """Compares by identity first, in loops of the interpreter: a dictionary of 10,000 workers changes with
    each of their answers.
    """
    old, new = list(before), list(after)
    gone = _gone(old, new)
    if gone:
        without = before.copy()
        for key in gone:
            del without[key]
        old, before = list(without), without
    if new[: len(old)] != old:
        return {"=": encode(after)}  # the order of entries counts, and a delta can only add at the end
    pairs = zip(new, before.values(), after.values(), strict=False)
    entries = {
        key: delta(was, each, encode, whole)
        for key, was, each in compress(pairs, map(is_not, before.values(), after.values()))
    }
    entries.update({key: delta(SAME, after[key], encode, whole) for key in new[len(old) :]})
    changed = {key: each for key, each in entries.items() if each is not SAME}
    if not changed and not gone:
        return SAME
    return {"~": changed, "-": gone} if gone else {"~": changed}


def _gone(old: list[str], new: list[str]) -> list[str]:
    """Returns the keys in ``old`` that are not in ``new``, at the least cost if there is none or one."""
    if new[: len(old)] == old:
        return []
    first = next(compress(count(), map(is_not, old, new)), len(new))
    if (
        first < len(old)
        and old[first + 1 :] == new[first : len(old) - 1]
        and old[first] not in new[len(old) - 1 :]
    ):
        return [old[first]]
    there = frozenset(new)
    return [key for key in old if key not in there]


def _first_difference(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Returns the first position at which the two differ, or the length of the shorter one."""
    different = (i for i in compress(count(), map(is_not, before, after)) if before[i] != after[i])
    return next(different, min(len(before), len(after)))


def _of_tuples(
    before: tuple[Any, ...], after: tuple[Any, ...], encode: Encode, whole: tuple[type, ...]
) -> Json:
    start = _first_difference(before, after)
    if start == len(before) == len(after):
        return SAME
    if gone := _left_out(before, after, start):
        return {"without": gone}
    left = min(len(before), len(after)) - start
    end = _first_difference(before[: -left - 1 : -1], after[: -left - 1 : -1]) if left else 0
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if len(old) == len(new) and all(map(is_dataclass, new)):
        items = {
            str(start + i): delta(*pair, encode, whole) for i, pair in enumerate(zip(old, new, strict=True))
        }
        return {"~": {place: each for place, each in items.items() if each is not SAME}}
    return {"at": start, "cut": len(old), "put": [encode(each) for each in new]}


def _left_out(before: tuple[Any, ...], after: tuple[Any, ...], start: int) -> list[int]:
    """Returns the positions of several items, ``start`` the first of them, without which ``before`` is
    ``after``; [] if that is not so.
    """
    number = len(before) - len(after)
    if number < 2:
        return []
    gone, at = list[int](), start
    for place in range(start, len(before)):
        if at < len(after) and (before[place] is after[at] or before[place] == after[at]):
            at += 1
        elif len(gone) < number:
            gone.append(place)
        else:
            return []
    return gone if gone[-1] - gone[0] >= number else []  # else they are neighbours, which are cut out as one


def patched(known: Json, change: Json) -> Json:
    """Returns ``known`` changed by ``change``; ``known`` itself stays as it is.  Raises :class:`Misfit`."""
    if not isinstance(change, Mapping) or "$" in change:
        return change
    if "=" in change:
        return change["="]
    if "at" in change:
        at = change["at"]
        if not isinstance(known, list) or at + change["cut"] > len(known):
            raise Misfit(
                f"{change['cut']} items from position {at} on cannot be replaced in {str(known)[:80]}"
            )
        return [*known[:at], *change["put"], *known[at + change["cut"] :]]
    if "without" in change:
        if not isinstance(known, list) or change["without"][-1] >= len(known):
            raise Misfit(
                f"items {', '.join(map(str, change['without']))} cannot be left out of {str(known)[:80]}"
            )
        gone = frozenset(change["without"])
        return [each for place, each in enumerate(known) if place not in gone]
    if isinstance(known, list):
        if absent := [key for key in change["~"] if not key.isdigit() or int(key) >= len(known)]:
            raise Misfit(f"items {', '.join(absent)} cannot be changed in a list of {len(known)} items")
        return [
            patched(each, change["~"][str(i)]) if str(i) in change["~"] else each
            for i, each in enumerate(known)
        ]
    if not isinstance(known, Mapping):
        raise Misfit(f"{', '.join(change['~'])} cannot be changed in {str(known)[:80]}, which has no fields")
    gone = frozenset(change.get("-", ()))
    kept = {key: each for key, each in known.items() if key not in gone}
    return {**kept, **{key: patched(kept.get(key), each) for key, each in change["~"].items()}}
