"""Every error that storage raises on purpose.

    StorageError
    ├── Missing          there is no such object
    ├── Exists           a create-only write found an object in its place
    ├── Damaged          an object has another size or digest than was written, or it is gone although a manifest lists it
    ├── Incomplete       the slices do not make up whole tensors with each element exactly once
    ├── BadFormat        a newer release, or another program, wrote the object
    ├── Deposed          another coordinator writes this journal now
    └── Unavailable      the store cannot be used or does not answer; another attempt may help
        └── Full         there is no room in the store

A message names the object and its store, and says what to do.  All arguments are strings and stay in
``args``, so every error pickles.
"""

from __future__ import annotations


class StorageError(Exception):
    """The base of all errors of storage; ``object`` is the full name of the object concerned."""

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
        return (
            f"{self.object} exists already and was left as it is; use another name, or find out who else "
            "writes here"
        )


class Damaged(StorageError):
    """``fix`` says what to do."""

    def __init__(
        self,
        object: str,
        expected: str,
        found: str,
        fix: str = "use an older checkpoint, or restore this object from a copy",
    ) -> None:
        super().__init__(object, expected, found, fix)
        self.expected, self.found, self.fix = expected, found, fix

    def __str__(self) -> str:
        return f"{self.object} is damaged: expected {self.expected}, found {self.found}; {self.fix}"


class Incomplete(StorageError):
    """``object`` is the tensor or the checkpoint."""

    def __init__(self, object: str, problem: str) -> None:
        super().__init__(object, problem)

    def __str__(self) -> str:
        return f"{self.object} is not complete: {self.args[1]}; every element must be written exactly once"


class BadFormat(StorageError):
    """Its argument is the whole sentence: the object, what it is, and what this release reads."""


class Deposed(StorageError):
    def __str__(self) -> str:
        return f"{self.object} was written by another coordinator: this coordinator is deposed and must stop"


class Unavailable(StorageError):
    def __init__(self, object: str, reason: str) -> None:
        super().__init__(object, reason)

    def __str__(self) -> str:
        return f"{self.object} cannot be reached or written: {self.args[1]}"


class Full(Unavailable):
    """There is no room for an object: deleting others makes room for it."""
