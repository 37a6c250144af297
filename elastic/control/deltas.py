"""Deltas: the differences between two values as JSON, no larger than what changed.

A fence of N members brings N records.  If each repeated all N answers, the journal of one fence would grow with N squared; so a record
holds only what it adds.  A delta is one of:

    5, "text", [..], {"$": "Forming", ..}     the new value: a number, a text, a tuple, a dataclass
    {"=": {..}}                               the new value, if that is a dictionary
    {"~": {"step": .., "plan": ..}}           these fields changed, each by a delta; also entries of a dictionary, by key
    {"~": {..}, "-": ["w3"]}                  and these entries of the dictionary are gone
    {"~": {"4": ..}}                          these items of a tuple changed, by position
    {"at": 4, "cut": 1, "put": [..]}          of a tuple, ``cut`` items from position ``at`` on were replaced by ``put``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

Json = Any
Encode = Callable[[object], Json]
SAME: Json = object()
"""The delta between equal values; it is never written."""


class Misfit(ValueError):
    """A delta does not fit the value that it is applied to, so it was made from another value."""


def delta(before: object, after: object, encode: Encode, whole: tuple[type, ...] = ()) -> Json:
    """Returns the delta that turns ``before`` into ``after``, or :data:`SAME`.  A changed value of a ``whole`` type is written in full."""
    if before is after:
        return SAME
    if is_dataclass(after) and type(before) is type(after) and not isinstance(after, whole):
        fields = {name: delta(old, getattr(after, name), encode, whole) for name, old in vars(before).items()}
        changed = {name: each for name, each in fields.items() if each is not SAME}
        return {"~": changed} if changed else SAME
    if isinstance(before, dict) and isinstance(after, dict):
        return _of_dictionaries(before, after, encode, whole)
    if isinstance(before, tuple) and isinstance(after, tuple):
        return _of_tuples(before, after, encode, whole)
    if before == after:
        return SAME
    return {"=": encode(after)} if isinstance(after, dict) else encode(after)


def _of_dictionaries(before: dict[str, Any], after: dict[str, Any], encode: Encode, whole: tuple[type, ...]) -> Json:
    gone = [key for key in before if key not in after]
    if [key for key in before if key in after] + [key for key in after if key not in before] != list(after):
        return {"=": encode(after)}  # the order of entries counts, and a delta can only add at the end
    entries = {key: delta(before.get(key, SAME), each, encode, whole) for key, each in after.items() if before.get(key, SAME) is not each}
    changed = {key: each for key, each in entries.items() if each is not SAME}
    if not changed and not gone:
        return SAME
    return {"~": changed, "-": gone} if gone else {"~": changed}


def _of_tuples(before: tuple[Any, ...], after: tuple[Any, ...], encode: Encode, whole: tuple[type, ...]) -> Json:
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] is not after[i] and before[i] != after[i]), shorter)
    if start == len(before) == len(after):
        return SAME
    left = shorter - start
    end = next((i for i in range(left) if before[-1 - i] is not after[-1 - i] and before[-1 - i] != after[-1 - i]), left)
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if len(old) == len(new) and all(map(is_dataclass, new)):
        items = {str(start + i): delta(*pair, encode, whole) for i, pair in enumerate(zip(old, new, strict=True))}
        return {"~": {place: each for place, each in items.items() if each is not SAME}}
    return {"at": start, "cut": len(old), "put": [encode(each) for each in new]}


def patched(known: Json, change: Json) -> Json:
    """Returns ``known`` changed by ``change``; ``known`` itself stays as it is.  Raises :class:`Misfit`."""
    if not isinstance(change, Mapping) or "$" in change:
        return change
    if "=" in change:
        return change["="]
    if "at" in change:
        at = change["at"]
        if not isinstance(known, list) or at + change["cut"] > len(known):
            raise Misfit(f"{change['cut']} items from position {at} on cannot be replaced in {str(known)[:80]}")
        return [*known[:at], *change["put"], *known[at + change["cut"] :]]
    if isinstance(known, list):
        if absent := [key for key in change["~"] if not key.isdigit() or int(key) >= len(known)]:
            raise Misfit(f"items {', '.join(absent)} cannot be changed in a list of {len(known)} items")
        return [patched(each, change["~"][str(i)]) if str(i) in change["~"] else each for i, each in enumerate(known)]
    if not isinstance(known, Mapping):
        raise Misfit(f"{', '.join(change['~'])} cannot be changed in {str(known)[:80]}, which has no fields")
    gone = frozenset(change.get("-", ()))
    kept = {key: each for key, each in known.items() if key not in gone}
    return {**kept, **{key: patched(kept.get(key), each) for key, each in change["~"].items()}}
