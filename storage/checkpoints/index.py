"""The index of a checkpoint says which file has which box of which tensors.

A checkpoint of many writers has millions of slices, but few ways to cut a tensor: with 1,024 writers, all
tensors of one shape are cut at the same places.  So the index has one line of JSON for each *group* of
tensors that are cut alike: the tensors once, and then the boxes, each with its file.  It grows with writers
times shapes, not with writers times tensors.

Where a slice lies inside its file, and its digest, is in the header of that file
(:mod:`storage.checkpoints.shards`).  The first line of the index has the length and the digest of every
header.  So a reader fetches the index, the headers of the files that it needs, and the bytes that it wants.

    {"files": [["shard-00000-of-00002.safetensors", 1480, "<blake3>"], ..]}
    {"shape": [8192, 8192], "tensors": [["layers.0.wq", "parameter", "F32"], ..], "boxes": [[0, [0, 0], [4096, 8192]], ..]}
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from storage.checkpoints.cover import Key, check_exact_cover, describe
from storage.documents import File
from storage.errors import Damaged, Incomplete
from storage.slices import Slice, Tensor

Corners = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop of a box."""


@dataclass(frozen=True)
class Cut:
    """One box of several tensors of one shape.  ``tensors`` is their list as text (:func:`text_of`), the same
    text for the same tensors.
    """

    tensors: str
    start: tuple[int, ...]
    stop: tuple[int, ...]


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are cut alike, sorted, and their boxes.  Each box has the name of the file that holds this
    box of all these tensors.
    """

    tensors: tuple[Tensor, ...]
    boxes: tuple[tuple[str, Corners], ...]


Part = tuple[str, Slice, Slice]
"""A file, the slice that is stored in it, and the part of the wanted slice that the stored slice supplies."""


@dataclass(frozen=True)
class Index:
    """``headers`` has the length and the digest of the header of each file."""

    groups: tuple[TensorGroup, ...]
    headers: Mapping[str, File]
    _meeting: dict[tuple[int, Corners], list[tuple[str, Corners, Corners]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @cached_property
    def tensors(self) -> dict[Key, Tensor]:
        """Every tensor of the state, by name and kind, sorted."""
        return {
            (tensor.name, tensor.kind): tensor
            for tensor in sorted(tensor for group in self.groups for tensor in group.tensors)
        }

    @cached_property
    def _group_of(self) -> dict[Key, int]:
        return {
            (tensor.name, tensor.kind): number
            for number, group in enumerate(self.groups)
            for tensor in group.tensors
        }

    @property
    def slices(self) -> int:
        """The number of slices."""
        return sum(len(group.tensors) * len(group.boxes) for group in self.groups)

    @cached_property
    def _in_file(self) -> dict[str, list[tuple[TensorGroup, Corners]]]:
        found: dict[str, list[tuple[TensorGroup, Corners]]] = defaultdict(list)
        for group in self.groups:
            for file, corners in group.boxes:
                found[file].append((group, corners))
        return found

    def slices_in(self, file: str) -> list[tuple[Tensor, Slice]]:
        """Returns the slices that ``file`` must have."""
        return [
            (tensor, Slice(tensor.name, tensor.kind, *box))
            for group, box in self._in_file.get(file, ())
            for tensor in group.tensors
        ]

    def covering(self, wanted: Slice) -> list[Part]:
        """Returns the stored slices that supply ``wanted``.  Raises :class:`Incomplete` if an element of it
        is in no file.
        """
        number, corners = self._group_of.get((wanted.name, wanted.kind)), (wanted.start, wanted.stop)
        if number is None:
            found = []
        elif (number, corners) in self._meeting:
            found = self._meeting[number, corners]
        else:
            found = self._meeting[number, corners] = _meeting(self.groups[number].boxes, corners)
        there = sum(_count(part) for _, _, part in found)
        if there != wanted.count:
            raise Incomplete(describe(wanted), f"{there} of {wanted.count} elements are stored")
        name, kind = wanted.name, wanted.kind
        return [(file, Slice(name, kind, *stored), Slice(name, kind, *part)) for file, stored, part in found]

    def check(self) -> None:
        """Raises :class:`Incomplete`, naming a tensor, unless the files hold each element of each tensor
        exactly once.
        """
        seen: dict[Key, Tensor] = {}
        for group in self.groups:
            for tensor in group.tensors:
                if (other := seen.setdefault((tensor.name, tensor.kind), tensor)) != tensor:
                    raise Incomplete(
                        describe(tensor.whole()),
                        f"two writers describe it differently: {other} and {tensor}",
                    )
            first = group.tensors[0]
            check_exact_cover(
                [(first, Slice(first.name, first.kind, *corners)) for _, corners in group.boxes]
            )

    def to_bytes(self) -> bytes:
        """Returns the index as text, one line for its files and one for each group: the same for the same
        cuts in any order.
        """
        files = sorted(self.headers.values())
        number = {file.name: n for n, file in enumerate(files)}
        lines: list[object] = [{"files": [[file.name, file.size, file.blake3] for file in files]}]
        for group in self.groups:
            boxes = [[number[file], start, stop] for file, (start, stop) in group.boxes]
            tensors = [[tensor.name, tensor.kind, tensor.dtype] for tensor in group.tensors]
            lines.append({"shape": group.tensors[0].shape, "tensors": tensors, "boxes": boxes})
        return "".join(f"{_text(line)}\n" for line in lines).encode()

    @classmethod
    def from_bytes(cls, raw: bytes, object: str) -> Index:
        """Returns the index.  Raises :class:`Damaged` if ``raw``, whose digest was checked before, is no
        index.
        """
        try:
            head, *lines = map(json.loads, raw.splitlines())
            files = [File(*each) for each in head["files"]]
            groups = []
            for line in lines:
                shape = tuple(map(int, line["shape"]))
                tensors = tuple(Tensor(name, kind, dtype, shape) for name, kind, dtype in line["tensors"])
                corners = (
                    (number, tuple(map(int, start)), tuple(map(int, stop)))
                    for number, start, stop in line["boxes"]
                )
                boxes = tuple((files[number].name, (start, stop)) for number, start, stop in corners)
                groups.append(TensorGroup(tensors, boxes))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise Damaged(object, "an index of slices", f"{len(raw)} bytes that are no index") from None
        return cls(tuple(groups), {file.name: file for file in files})


def cuts_of(slices: Iterable[tuple[Tensor, Slice]]) -> tuple[Cut, ...]:
    """Returns the slices of one file as cuts."""
    alike: dict[tuple[tuple[int, ...], Corners], list[Tensor]] = defaultdict(list)
    for tensor, part in slices:
        alike[tensor.shape, (part.start, part.stop)].append(tensor)
    return tuple(
        Cut(text_of(tensors), *corners)
        for (_, corners), tensors in sorted(alike.items(), key=lambda each: each[0])
    )


def grouped(cuts: Iterable[tuple[str, Cut]]) -> tuple[TensorGroup, ...]:
    """Returns the cuts of all files as groups: two tensors are in the same group if exactly the same boxes of
    both are in the same files.

    The work grows with the number of *different* lists of tensors, of which there are few, and with the
    number of boxes.
    """
    places: dict[str, list[tuple[str, Corners]]] = defaultdict(list)
    for file, cut in cuts:
        places[cut.tensors].append((file, (cut.start, cut.stop)))
    lists: dict[Tensor, list[str]] = defaultdict(list)
    for text in sorted(places):
        for tensor in tensors_of(text):
            lists[tensor].append(text)
    alike: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    for tensor in sorted(lists):
        alike[tuple(lists[tensor])].append(tensor)
    return tuple(
        TensorGroup(tuple(tensors), tuple(sorted(each for text in texts for each in places[text])))
        for texts, tensors in alike.items()
    )


def text_of(tensors: Iterable[Tensor]) -> str:
    """Returns a text that names these tensors and no others."""
    return _text([[tensor.name, tensor.kind, tensor.dtype, tensor.shape] for tensor in sorted(tensors)])


@lru_cache(maxsize=4096)
def tensors_of(text: str) -> tuple[Tensor, ...]:
    """Returns the tensors that :func:`text_of` named."""
    return tuple(Tensor(name, kind, dtype, tuple(shape)) for name, kind, dtype, shape in json.loads(text))


def _meeting(boxes: Sequence[tuple[str, Corners]], wanted: Corners) -> list[tuple[str, Corners, Corners]]:
    """Returns the boxes that have elements of ``wanted``, each with its file and the common part."""
    found = []
    for file, stored in boxes:
        start, stop = tuple(map(max, stored[0], wanted[0])), tuple(map(min, stored[1], wanted[1]))
        if all(a < b for a, b in zip(start, stop, strict=True)):
            found.append((file, stored, (start, stop)))
    return found


def _count(corners: Corners) -> int:
    return prod(b - a for a, b in zip(*corners, strict=True))


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
