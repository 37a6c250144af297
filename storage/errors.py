"""Every error that storage raises on purpose.

    StorageError
    ├── Missing          there is no such object
    ├── Exists           a create-only write found something in its place
    ├── Damaged          an object is not what was written: size, digest, or gone though something counts on it
    ├── Incomplete       slices do not make up whole tensors, each element exactly once
    ├── BadFormat        written by a newer release
    ├── Deposed          somebody else writes this journal now
    └── Unavailable      the store cannot be used or does not answer: trying again may help

A message names the object, with its store, and what to do.  All arguments are strings and are kept in ``args``, so every error
pickles.
"""

from __future__ import annotations


class StorageError(Exception):
    """Base of all; ``object`` is the full name of what it is about."""

    def __init__(self, object: str, *details: str) -> None:
        super().__init__(object, *details)
        self.object = object


class Missing(StorageError):
    def __init__(self, key: str, url: str = "") -> None:
        super().__init__(key, url)
        self.object = f"{url}/{key}" if url else key

    def __str__(self) -> str:
        return f"{self.object} does not exist; check its name and the bucket"


class Exists(StorageError):
    def __init__(self, key: str, url: str = "") -> None:
        super().__init__(key, url)
        self.object = f"{url}/{key}" if url else key

    def __str__(self) -> str:
        return f"{self.object} exists already and was left as it is; use another name, or find out who else writes here"


class Damaged(StorageError):
    def __init__(self, object: str, expected: str, found: str) -> None:
        super().__init__(object, expected, found)
        self.expected, self.found = expected, found

    def __str__(self) -> str:
        return f"{self.object} is damaged: expected {self.expected}, found {self.found}; use an older one, or restore it"


class Incomplete(StorageError):
    """``object``: the tensor, or the checkpoint."""

    def __init__(self, object: str, problem: str) -> None:
        super().__init__(object, problem)

    def __str__(self) -> str:
        return f"{self.object} is not complete: {self.args[1]}; every element must be written exactly once"


class BadFormat(StorageError):
    """The whole sentence is the argument: which object, its format, and the formats that are read."""


class Deposed(StorageError):
    def __str__(self) -> str:
        return f"{self.object} was written by another coordinator: this one is deposed and must stop"


class Unavailable(StorageError):
    def __init__(self, object: str, reason: str) -> None:
        super().__init__(object, reason)

    def __str__(self) -> str:
        return f"{self.object} cannot be reached or written: {self.args[1]}"
