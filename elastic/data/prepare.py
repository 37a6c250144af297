"""Text becomes a token dataset: every file of a folder, in the order of their paths, byte by byte.

The vocabulary is the 256 bytes and one mark after each document: no tokenizer to train, to ship or to get wrong, and any text, in
any encoding, is itself again after decoding.  The same folder always gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastic.errors import DataError
from storage.datasets import Tokens, write_dataset
from storage.errors import Exists
from storage.objects import ObjectStore

SUFFIXES = (".txt", ".md", ".rst", ".py")
END_OF_DOCUMENT = 256
VOCABULARY = 257


@dataclass(frozen=True)
class Summary:
    """What :func:`prepare` made."""

    url: str
    documents: int
    tokens: int
    files: int
    fingerprint: str

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens in {self.files} {'file' if self.files == 1 else 'files'}: "
            f"{self.url} (fingerprint {self.fingerprint[:12]})"
        )


def prepare(source: str | Path, destination: str, suffixes: Sequence[str] = SUFFIXES) -> Summary:
    """Write the text files below the folder ``source`` as a dataset at the URL or folder ``destination``; again is no error.

    Raises :class:`DataError` if there is no text, or another dataset is there already.
    """
    folder = Path(source)
    paths = text_files(folder, suffixes)
    if not any(path.stat().st_size for path in paths):
        raise DataError(_nothing(folder, suffixes, len(paths)))
    documents = ((path.relative_to(folder).as_posix(), tokenize(path.read_bytes())) for path in paths)
    store = ObjectStore.open(destination)
    try:
        made = write_dataset(store, documents, "bytes", VOCABULARY)
    except Exists:
        raise DataError(f"{store.url} holds another dataset already; give another destination, or delete it first") from None
    return Summary(store.url, made.documents, made.tokens, len(made.files), made.fingerprint)


def text_files(folder: Path, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files below ``folder`` whose names end so, sorted by their path from there; nothing hidden."""
    found = (path for path in folder.rglob("*") if path.name.endswith(tuple(suffixes)) and path.is_file())
    visible = ((path.relative_to(folder).as_posix(), path) for path in found)
    return [path for name, path in sorted(visible) if not any(part.startswith(".") for part in name.split("/"))]


def tokenize(text: bytes) -> Tokens:
    """One token a byte, and the mark of the end."""
    return np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(END_OF_DOCUMENT))


def _nothing(folder: Path, suffixes: Sequence[str], files: int) -> str:
    if not folder.is_dir():
        return f"{str(folder)!r} is not a folder; give the folder that holds the text"
    if not files:
        return f"{str(folder)!r} holds no file whose name ends in {' or '.join(suffixes)}; give another folder, or --suffix"
    return f"the {files} text {'file' if files == 1 else 'files'} in {str(folder)!r} {'is' if files == 1 else 'are all'} empty"
