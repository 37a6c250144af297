"""Makes a token dataset from text: every document of the sources in order, each followed by an
end-of-document token.

The same text, prepared with the same options, always gives the same bytes.  Documents may be held out for
validation.  The digest of a document's text decides whether the document is held out.  So equal documents are
on the same side, whatever the other documents are, and stay there when text is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastic.data.text_sources import SUFFIXES, Document, documents, text_files
from elastic.data.tokenizer import Bytes, Encoder, Trained, read_tokenizer, train_bpe
from elastic.errors import DataError
from storage.datasets import DESCRIPTION, Description, expect_room, write_dataset
from storage.documents import digest_of
from storage.errors import Exists
from storage.objects import ObjectStore

HELD_OUT = "held-out"
"""Folder of the held-out documents, inside the folder of the dataset."""


@dataclass(frozen=True)
class Summary:
    """The dataset that :func:`prepare` ``made``, and its place."""

    url: str
    made: Description
    held_out: Summary | None = None
    """The dataset of the documents that are held out, if there is one."""

    def __str__(self) -> str:
        made, files = self.made, len(self.made.files)
        said = (
            f"{made.documents:,} {'document' if made.documents == 1 else 'documents'}, {made.tokens:,} "
            f"{'token' if made.tokens == 1 else 'tokens'} in {files} {'file' if files == 1 else 'files'}, "
            f"vocabulary {made.vocabulary:,}: {self.url} (fingerprint {made.fingerprint[:12]})"
        )
        return said if self.held_out is None else f"{said}\nheld out: {self.held_out}"


def prepare(
    source: str | Path | Sequence[str | Path],
    destination: str,
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    *,
    tokenizer: str | Path | None = None,
    bpe: int | None = None,
    end_of_document: str | None = None,
    held_out: float = 0.0,
    unique: bool = False,
) -> Summary:
    """Writes the text in ``source`` (folders, files or URLs) as a dataset at the URL or folder
    ``destination``.

    The tokens are the bytes of the text by default.  ``tokenizer`` is the path of a tokenizer.json to use
    instead, or of a folder with one; ``bpe`` is the largest number of entries of a BPE tokenizer to train on
    the text; ``end_of_document`` is the token that ends documents, if ``tokenizer`` or ``bpe`` is used.
    About the part ``held_out`` of the documents goes to a dataset of its own, in a folder below.  ``unique``
    leaves out documents whose text came before.  Preparing the same text again changes nothing and is no
    error.

    Raises :class:`DataError` if there is no text, if some of it cannot be read, or if the destination holds
    another dataset or a foreign file that would be overwritten.  Then nothing new is left behind, except
    perhaps the held-out documents.
    """
    if not 0 <= held_out < 1:
        raise DataError(
            f"--held-out {held_out:g} must be a share of the documents: at least 0, and less than 1"
        )
    sources = [source] if isinstance(source, str | Path) else list(source)
    files = text_files(sources, suffixes)

    def texts(out: bool = False) -> Iterator[Document]:
        seen = set[bytes]()
        for document in documents(files, text_field):
            digest = bytes.fromhex(digest_of(document.text))[:16] if held_out or unique else b""
            if unique and digest in seen:
                continue
            if unique:
                seen.add(digest)
            if (int.from_bytes(digest[:8], "big") < held_out * 2**64) is out:
                yield document

    for out in (False, True)[: 2 if held_out else 1]:
        if not any(document.text for document in texts(out)):
            raise DataError(
                _nothing(sources, suffixes, len(files)) if not held_out else _one_sided(held_out, out)
            )
    store = ObjectStore.open(destination)
    beside = ObjectStore.open(f"{store.url}/{HELD_OUT}") if held_out else None
    for each in filter(None, (store, beside)):  # before a tokenizer is trained, which takes long
        with _refused(each):
            expect_room(each)
    encoder = _encoder(texts, tokenizer, bpe, end_of_document)
    aside = _written(beside, encoder, texts(out=True)) if beside is not None else None
    return _written(store, encoder, texts(), aside)


def _written(
    store: ObjectStore, encoder: Encoder, texts: Iterator[Document], held_out: Summary | None = None
) -> Summary:
    with _refused(store):
        return Summary(store.url, write_dataset(store, encoder.encode(texts), encoder.coding), held_out)


@contextmanager
def _refused(store: ObjectStore) -> Iterator[None]:
    """Turns :class:`Exists` into a :class:`DataError` that says what the destination holds already."""
    try:
        yield
    except Exists as error:
        if error.args[0] == DESCRIPTION:
            raise DataError(
                f"{store.url} already holds a dataset; give another destination, or delete this dataset first"
            ) from None
        raise DataError(
            f"{error.object} exists, and without a {DESCRIPTION} beside it Elastic does not overwrite "
            "it; give another destination"
        ) from None


def _encoder(
    texts: Callable[[], Iterator[Document]], tokenizer: str | Path | None, bpe: int | None, end: str | None
) -> Encoder:
    if tokenizer is not None:
        return read_tokenizer(tokenizer, end)
    if bpe is not None:
        return Trained(train_bpe(texts(), bpe), "the trained tokenizer", end)
    return Bytes()


def _nothing(sources: Sequence[str | Path], suffixes: Sequence[str], files: int) -> str:
    shown = " and ".join(repr(str(source)) for source in sources)
    if files:
        return (
            f"the {files} text {'file' if files == 1 else 'files'} in {shown} "
            f"{'is' if files == 1 else 'are all'} empty"
        )
    ends = " or ".join(suffixes)
    if len(sources) == 1 and Path(sources[0]).is_dir():
        return (
            f"{shown} is a folder without a file whose name ends in {ends}; give another source, or --suffix"
        )
    return (
        f"{shown}: neither a file nor a folder with a file whose name ends in {ends}; give another "
        "source, or --suffix"
    )


def _one_sided(held_out: float, out: bool) -> str:
    side = "would be held out" if out else "would be left to train on"
    return (
        f"--held-out {held_out:g}: no document {side}; give another share, or more documents (each "
        "file is one document, and so is each line of JSON)"
    )
