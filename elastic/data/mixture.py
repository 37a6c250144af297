"""A dataset of several datasets.  The samples of a part follow those of the parts before it.

``data.weights`` says how many samples of each part a run draws (``elastic/plan/mixture.py``).  The weights
are no argument of :class:`Mixture`: the samples, and so the fingerprint, do not depend on them, so a branch
may change the weights.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from elastic.code.imports import load, unknown_argument
from elastic.data.loader import Batch, Dataset, Ids
from elastic.data.rows import dataset_of
from elastic.errors import DataError

PART = {"dataset": "elastic.data.tokens:TokenDataset", "args": {}}
"""Settings of a part, with their defaults."""


class Mixture:
    """Reads the samples of several datasets.

    Each of ``parts`` is a table with ``dataset``, the class as ``pkg.module:Class`` (by default that of
    prepared tokens), and ``args``, its arguments.  All must give tensors of the same names and shapes.
    Raises :class:`DataError` without parts, and for a part that is no such table or has no samples.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        if not parts:
            raise DataError("data.args.parts is empty; name at least one dataset there")
        self.parts = [_opened(number, part) for number, part in enumerate(parts)]
        self.sizes = [len(part) for part in self.parts]
        """Number of samples of each part."""
        if 0 in self.sizes:
            raise DataError(
                f"data.args.parts[{self.sizes.index(0)}] has no samples; add samples, or remove this part"
            )
        self._firsts = list(accumulate(self.sizes, initial=0))
        vocabularies = [part.vocabulary for part in self.parts if hasattr(part, "vocabulary")]
        if vocabularies:
            self.vocabulary = max(vocabularies)
        self.documents = any(getattr(part, "documents", False) is True for part in self.parts)

    def __len__(self) -> int:
        return self._firsts[-1]

    def read(self, ids: Ids) -> Batch:
        """Returns the samples, each read from its part, in the order of ``ids``.

        Raises :class:`IndexError` if there is no such sample, and :class:`DataError` if the tensors of two
        parts differ in name, shape or type.
        """
        found = [(rows, self.parts[part].read(own)) for part, rows, own in self._by_part(ids)]
        if len(found) == 1:
            return found[0][1]
        shapes = [
            {name: (list(value.shape[1:]), str(value.dtype)) for name, value in batch.items()}
            for _, batch in found
        ]
        if other := next((shape for shape in shapes if shape != shapes[0]), None):
            raise DataError(
                f"data.args.parts: a sample of one part has {shapes[0]}, but a sample of another part "
                f"has {other}; give all parts the same shapes"
            )
        order = torch.tensor([row for rows, _ in found for row in rows]).argsort()
        return {name: torch.cat([batch[name] for _, batch in found])[order] for name in shapes[0]}

    def lengths(self, ids: Ids) -> list[int]:
        """Returns the length of each sample, as its part tells it.  Raises :class:`DataError` if a part does
        not tell it.
        """
        if silent := [
            number for number, part in enumerate(self.parts) if not callable(getattr(part, "lengths", None))
        ]:
            raise DataError(
                f"data.group_by_length = true, and data.args.parts[{silent[0]}] has no lengths(); add "
                "this method, or remove this part"
            )
        found = [0] * len(ids)
        for part, rows, own in self._by_part(ids):
            for row, length in zip(rows, self.parts[part].lengths(own), strict=True):  # type: ignore[attr-defined]
                found[row] = length
        return found

    def fingerprint(self) -> str:
        """Returns a digest of the fingerprints of all parts, in order."""
        told = json.dumps([part.fingerprint() for part in self.parts])
        return f"mixture-{hashlib.sha256(told.encode()).hexdigest()}"

    def _by_part(self, ids: Ids) -> list[tuple[int, list[int], Ids]]:
        """Returns each part that has some of ``ids``: its number, the places of its samples in ``ids``, and
        their ids in the part.
        """
        found: dict[int, list[int]] = {}
        for row, sample in enumerate(ids):
            if not 0 <= sample < len(self):
                raise IndexError(f"there is no sample {sample} in a mixture of {len(self)} samples")
            found.setdefault(bisect_right(self._firsts, sample) - 1, []).append(row)
        return [
            (part, rows, tuple(ids[row] - self._firsts[part] for row in rows))
            for part, rows in sorted(found.items())
        ]


def _opened(number: int, part: object) -> Dataset:
    if not isinstance(part, Mapping) or (unknown := sorted(part.keys() - PART.keys())):
        what = f"has {unknown[0]!r}" if isinstance(part, Mapping) else f"is {part!r}"
        hint = (
            "; the weights belong in data.weights, one number for each part"
            if isinstance(part, Mapping) and "weight" in part
            else ""
        )
        raise DataError(
            f"data.args.parts[{number}] {what}; a part is a table with {' and '.join(PART)}{hint}"
        )
    kind, args = (part.get(name, value) for name, value in PART.items())
    named = f"data.args.parts[{number}]"
    try:
        return dataset_of(code := load(kind, f"{named}.dataset"), args, f"{named}.dataset = {kind!r}")
    except DataError as error:
        raise DataError(str(error) if str(error).startswith(named) else f"{named}: {error}") from error
    except TypeError as error:
        if sentence := unknown_argument(f"{named}.args", f"{named}.dataset = {kind!r}", code, args, error):
            raise DataError(sentence) from error
        raise
