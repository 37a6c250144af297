"""Reads datasets that are defined by their rows: map-style datasets of torch, and datasets of Hugging Face's
``datasets``.

Such a dataset has ``len()`` and ``dataset[i]``.  :class:`SelectedRows` makes a batch of its rows as torch's
``DataLoader`` does: by the ``collate_fn`` that the dataset has as an attribute, or else by torch's
``default_collate``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from elastic.data.apart import apart
from elastic.data.loader import Batch, Dataset, Ids, batch_of
from elastic.errors import DataError

METHODS = {"__len__": "len()", "read": "read(ids)", "fingerprint": "fingerprint()"}
"""The methods that a dataset must have, and how each is called."""
WRONG_ROWS = (
    'let each row hold tensors, arrays or numbers alone, as with_format("torch", columns=[...]) of Hugging '
    "Face makes them, or give the "
    "dataset a collate_fn"
)
SAMPLED = 64
"""Number of rows in the digest that identifies a dataset without a fingerprint of its own: 64 images take
about a second.
"""


class SelectedRows:
    """A dataset that reads the rows of another dataset, ``rows``, by their indices.  All further attributes,
    as ``lengths``, are those of ``rows``.
    """

    def __init__(self, rows: Any, named: str) -> None:
        """``named`` is the setting of the dataset, for errors."""
        self.rows, self._named = rows, named
        self._collate: Callable[[list[Any]], Any] = getattr(rows, "collate_fn", None) or default_collate
        self._by = "default_collate" if self._collate is default_collate else "its collate_fn"
        self.made_by = f"{self._by} of its rows", WRONG_ROWS
        """The name of the code that makes batches, and how to mend a wrong batch, for errors."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        if name == "rows":  # a copy that is being made lacks it
            raise AttributeError(name)
        return getattr(self.rows, name)

    def read(self, ids: Ids) -> Batch:
        """Returns the collated rows.  A batch that is a tuple, a list or one tensor gets the names "0", "1",
        ….
        """
        several = getattr(self.rows, "__getitems__", None)
        batch = self._collate(several([*ids]) if callable(several) else [self.rows[i] for i in ids])
        if callable(named := getattr(batch, "_asdict", None)):
            return dict(named())
        if isinstance(batch, torch.Tensor):
            batch = [batch]
        return (
            {str(place): each for place, each in enumerate(batch)}
            if isinstance(batch, tuple | list)
            else batch
        )

    def fingerprint(self) -> str:
        """Returns the fingerprint that the dataset tells, or else a digest of its length and of
        :data:`SAMPLED` rows.
        """
        return self._known_by[0]

    @property
    def note(self) -> str:
        """The sentence that says how samples are made, and by which fingerprint the run knows them again."""
        return (
            f"{self._named}: each sample is a row of this dataset; {self._by} makes batches of them, "
            f"and a later start recognises the samples by {self._known_by[1]}"
        )

    @property
    def _known_by(self) -> tuple[str, str]:
        """The fingerprint, and the words for where it comes from."""
        if callable(own := getattr(self.rows, "fingerprint", None)):
            return str(own()), "its fingerprint()"
        if isinstance(found := getattr(self.rows, "_fingerprint", None), str) and found:
            return found, f"its _fingerprint {found}"
        return self._digest

    @cached_property
    def _digest(self) -> tuple[str, str]:
        count = len(self)
        some = sorted({place * (count - 1) // (SAMPLED - 1) for place in range(SAMPLED)}) if count else []
        digest = hashlib.sha256(str(count).encode())
        with apart(0):
            for i in some:
                for name, value in batch_of(self, (i,), self._named).items():
                    digest.update(f"{i} {name} {value.dtype} {list(value.shape)}".encode())
                    digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
        rest = (
            ""
            if len(some) == count
            else (
                f" of {count}: a change of other rows is not noticed, unless the dataset has a fingerprint()"
            )
        )
        return f"rows-{digest.hexdigest()}", f"a digest of {len(some)} rows{rest}"


def notes_of(dataset: Dataset) -> list[str]:
    """Returns the sentences about the datasets of rows in ``dataset``, which may be a mixture."""
    parts = getattr(dataset, "parts", ())
    return [
        each.note
        for each in (dataset, *(parts if isinstance(parts, list) else ()))
        if isinstance(each, SelectedRows)
    ]


def dataset_of(code: Any, args: Mapping[str, Any], named: str) -> Dataset:
    """Returns the dataset that ``code`` makes of ``args``, or ``code`` itself if it is a dataset.  A dataset
    that has rows by index becomes a :class:`SelectedRows`.

    Raises :class:`DataError` for a dataset that cannot give a sample by its number, and whatever ``code``
    raises.
    """
    is_one = not callable(code) or hasattr(type(code), "__getitem__")
    if is_one and args:
        raise DataError(
            f"{named} is a {type(code).__name__} already, and takes no arguments: leave {sorted(args)} out "
            "of args"
        )
    made = code if is_one else code(**args)
    lacks = [name for name in METHODS if not callable(getattr(made, name, None))]
    if not lacks:
        return made
    kind = type(made).__name__
    if isinstance(made, DataLoader):
        raise DataError(
            f"{named} gives a {kind}; give its dataset instead, with collate_fn as an attribute of the "
            "dataset: the job sets the order of samples and the size of a batch"
        )
    if isinstance(made, Mapping):
        raise DataError(f"{named} gives a {kind} of {[*made]}; give one dataset of it, as by split='train'")
    by_index = hasattr(made, "__getitem__")
    if isinstance(made, IterableDataset) or (hasattr(made, "__iter__") and not by_index):
        raise DataError(
            f"{named}: {kind} gives its samples only one after the other, but a worker must read any "
            "sample by its number: prepare text with `elastic data prepare`, give list(...) of "
            "samples that fit into memory, or write them to files with "
            "datasets.Dataset.from_generator(...)"
        )
    if not by_index or "read" not in lacks or "__len__" in lacks:
        raise DataError(
            f"{named} has no {lacks[0]}(); a dataset has {', '.join(METHODS.values())} (see "
            "elastic.data.loader.Dataset), or len() and rows by index"
        )
    return SelectedRows(made, named)
