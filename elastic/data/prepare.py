"""Makes a token dataset from text: every document of the sources in order, each followed by an end-of-document token.

The same text, prepared with the same options, always gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.data.sources import SUFFIXES, Document, documents, text_files
from elastic.data.tokenizer import Bytes, Encoder, Trained, read_definition, train_bpe
from elastic.errors import DataError
from storage.datasets import write_dataset
from storage.errors import Exists
from storage.objects import ObjectStore


@dataclass(frozen=True)
class Summary:
    """Describes the dataset that :func:`prepare` made."""

    url: str
    documents: int
    tokens: int
    files: int
    vocabulary: int
    fingerprint: str

    def __str__(self) -> str:
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens in {self.files} {'file' if self.files == 1 else 'files'}, "
            f"vocabulary {self.vocabulary:,}: {self.url} (fingerprint {self.fingerprint[:12]})"
        )


def prepare(
    source: str | Path | Sequence[str | Path],
    destination: str,
    suffixes: Sequence[str] = SUFFIXES,
    text_field: str = "text",
    *,
    tokenizer: str | Path | None = None,
    bpe: int | None = None,
    end_of_document: str | None = None,
) -> Summary:
    """Writes the text in ``source`` (folders, files or URLs) as a dataset at the URL or folder ``destination``.

    The tokens are the bytes of the text by default.  ``tokenizer`` is the path of a tokenizer.json to use instead; ``bpe`` is the
    largest number of entries of a BPE tokenizer to train on the text; ``end_of_document`` is the token that ends documents, if one of these
    is used.  Preparing the same text again changes nothing and is no error.

    Raises :class:`DataError` if there is no text, if some of it cannot be read, or if another dataset is there already; then nothing
    new is left behind.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    files = text_files(sources, suffixes)

    def texts() -> Iterator[Document]:
        return documents(files, text_field)

    if not any(document.text for document in texts()):
        raise DataError(_nothing(sources, suffixes, len(files)))
    encoder = _encoder(texts, tokenizer, bpe, end_of_document)
    store = ObjectStore.open(destination)
    try:
        made = write_dataset(store, encoder.encode(texts()), encoder.coding)
    except Exists:
        raise DataError(f"{store.url} holds another dataset already; give another destination, or delete it first") from None
    return Summary(store.url, made.documents, made.tokens, len(made.files), made.vocabulary, made.fingerprint)


def _encoder(texts: Callable[[], Iterator[Document]], tokenizer: str | Path | None, bpe: int | None, end: str | None) -> Encoder:
    if tokenizer is not None:
        return Trained(read_definition(tokenizer), str(tokenizer), end)
    if bpe is not None:
        return Trained(train_bpe(texts(), bpe), "the trained tokenizer", end)
    return Bytes()


def _nothing(sources: Sequence[str | Path], suffixes: Sequence[str], files: int) -> str:
    shown = " and ".join(repr(str(source)) for source in sources)
    if files:
        return f"the {files} text {'file' if files == 1 else 'files'} in {shown} {'is' if files == 1 else 'are all'} empty"
    return f"{shown}: no such file, nor a folder with one whose name ends in {' or '.join(suffixes)}; give another source, or --suffix"
