"""Packs what a commit says of each microbatch, so that the journal takes few bytes for it: base64 of arrays,
little end first.

    {"losses": "..", "counts": [8192, 4096], "samples": {"each": 1, "ids": "i.."}}

Losses are doubles.  Whole numbers are an array of the narrowest type that holds them, whose name comes first.
If all are the same they are [number, how many], and if one is longer than eight bytes {"all": [..]}.  Samples
are one list of ids with their number for each microbatch, which is one number if it is always the same.

What a commit says of each layer is packed likewise.  Names that end in consecutive numbers are one entry:
[what is before, the first number, how many].

    {"names": ["embedding", ["layers.", 0, 80], "norm"], "squares": ".."}
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

WIDTHS = "bhiq"
"""Types of whole numbers, from one byte to eight."""

Json = Any
Parts = tuple[tuple[float, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]


def pack(losses: Sequence[float], counts: Sequence[int], samples: Sequence[Sequence[int]]) -> Json:
    """Returns the JSON of the losses, token counts and sample ids of all microbatches of a step."""
    lengths = [len(each) for each in samples]
    each: Json = lengths[0] if lengths and 0 < min(lengths) == max(lengths) else _numbers(lengths)
    return {
        "losses": _text(array("d", losses)),
        "counts": _numbers(counts),
        "samples": {"each": each, "ids": _numbers([*chain(*samples)])},
    }


def sizes(json: Mapping[str, Json]) -> tuple[int, int]:
    """Returns the number of microbatches and of samples in what :func:`pack` has packed, without unpacking
    more than lengths.
    """
    microbatches, each = len(json["losses"]) * 3 // 4 // 8, json["samples"]["each"]
    return microbatches, each * microbatches if isinstance(each, int) else sum(_whole(each))


def unpack(json: Mapping[str, Json]) -> Parts:
    """Returns what :func:`pack` was given."""
    losses, counts, (each, ids) = (
        _array("d", json["losses"]),
        _whole(json["counts"]),
        (json["samples"]["each"], _whole(json["samples"]["ids"])),
    )
    if isinstance(each, int):
        samples = tuple(zip(*[iter(ids)] * each, strict=True))
    else:
        rest = iter(ids)
        samples = tuple(tuple(next(rest) for _ in range(length)) for length in _whole(each))
    return tuple(losses), tuple(counts), samples


def pack_layers(layers: Sequence[tuple[str, float]]) -> Json:
    """Returns the JSON of names with a number each."""
    names = list[Json]()
    for name, _ in layers:
        before, stem = names[-1] if names else "", name.rstrip("0123456789")
        number = name[len(stem) :]
        if not number or str(int(number)) != number:
            names.append(name)
        elif isinstance(before, list) and (before[0], before[1] + before[2]) == (stem, int(number)):
            before[2] += 1
        else:
            names.append([stem, int(number), 1])
    return {"names": names, "squares": _text(array("d", (square for _, square in layers)))}


def unpack_layers(json: Mapping[str, Json]) -> tuple[tuple[str, float], ...]:
    """Returns what :func:`pack_layers` was given."""
    names = list[str]()
    for each in json["names"]:
        names += (
            [each]
            if isinstance(each, str)
            else [f"{each[0]}{number}" for number in range(each[1], each[1] + each[2])]
        )
    return tuple(zip(names, _array("d", json["squares"]), strict=True))


def _numbers(numbers: Sequence[int]) -> Json:
    low, high = min(numbers, default=0), max(numbers, default=0)
    if low == high:
        return [low, len(numbers)]
    for width in WIDTHS:
        limit = 1 << 8 * array(width).itemsize - 1
        if -limit <= low and high < limit:
            return width + _text(array(width, numbers))
    return {"all": list(numbers)}


def _whole(json: Json) -> list[int]:
    if isinstance(json, dict):
        return list(json["all"])
    return _array(json[0], json[1:]) if isinstance(json, str) else [json[0]] * json[1]


def _text(values: array[Any]) -> str:
    if sys.byteorder == "big":
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode().rstrip("=")


def _array(kind: str, text: str) -> list[Any]:
    values = array(kind, base64.b64decode(text + "=" * (-len(text) % 4)))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
