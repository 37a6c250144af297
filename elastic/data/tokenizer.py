"""Text to tokens and back: byte by byte, or with a Hugging Face ``tokenizer.json``.

The bytes need nothing to train, to ship or to get wrong, and any text in any encoding is itself again after decoding.  A byte-level
BPE (Sennrich et al. 2016; Radford et al. 2019, section 2.2) needs a quarter of the tokens; trained twice on the same text it is the
same file.  In either, one token that text can never contain ends each document.

The library ``tokenizers`` encodes a batch on all cores, in order; a batch is a few megabytes, so no dataset is too large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from elastic.data.sources import Document
from elastic.errors import DataError
from storage.datasets import Coding, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""What well-known tokenizers call the end of a document."""
BATCH_BYTES = 4 * 2**20
SMALLEST = 257
"""The bytes, and the end of a document."""


class Encoder(Protocol):
    """What a dataset is prepared with and shown by."""

    coding: Coding

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        """(name, tokens and the end) of each document, in order."""
        ...

    def decode(self, tokens: Tokens) -> bytes:
        """The text of ``tokens``, without the ends of documents."""
        ...


class Bytes:
    """One token a byte."""

    coding = Coding("bytes", SMALLEST, end_of_document=256)

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        for name, text in documents:
            yield name, np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(self.coding.end_of_document))

    def decode(self, tokens: Tokens) -> bytes:
        return tokens[tokens != self.coding.end_of_document].astype(np.uint8).tobytes()


class Trained:
    """A ``tokenizer.json``; ``place`` is its name in messages, ``end`` the token that ends documents, by default one of ``ENDS``."""

    def __init__(self, definition: bytes, place: str, end: str | None = None) -> None:
        self._tokenizer = _parsed(definition, place)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # a document that *says* "<|endoftext|>" does not end there
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        end = end or next((known for known in ENDS if known in ids), None)
        if end is None or end not in ids:
            raise DataError(f"{place} has no token {end or ' or '.join(ENDS)} to end documents with; name one with --end-of-document")
        self.coding = Coding("tokenizer.json", max(ids.values()) + 1, ids[end], definition)

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        dtype, end = self.coding.dtype, self.coding.end_of_document
        for batch in _batches(documents):
            texts = [text_of(document) for document in batch]
            for document, encoded in zip(batch, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                yield document.name, np.array([*encoded.ids, end], dtype)

    def decode(self, tokens: Tokens) -> bytes:
        text: str = self._tokenizer.decode(tokens[tokens != self.coding.end_of_document].tolist(), skip_special_tokens=False)
        return text.encode()


def open_encoder(coding: Coding, place: str) -> Encoder:
    """The one that a dataset at ``place`` was prepared with."""
    if coding.definition is None:
        return Bytes()
    return Trained(coding.definition, place, _parsed(coding.definition, place).id_to_token(coding.end_of_document))


def train_bpe(documents: Iterable[Document], vocabulary: int) -> bytes:
    """The tokenizer.json of a byte-level BPE of at most ``vocabulary`` tokens; fewer where the text has no more to merge."""
    if vocabulary < SMALLEST:
        raise DataError(f"--train-bpe {vocabulary} is too small: the 256 bytes and the end of a document are {SMALLEST} tokens already")
    _library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((text_of(document) for document in documents), trainer)
    return str(tokenizer.to_str(pretty=True)).encode()


def read_definition(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"--tokenizer {str(path)!r} cannot be read: {error.strerror}; give a tokenizer.json file") from None


def text_of(document: Document) -> str:
    """Raises :class:`DataError` for bytes that are not UTF-8, which only the tokenizer of bytes takes."""
    try:
        return document.text.decode()
    except UnicodeDecodeError as error:
        line = document.text.count(b"\n", 0, error.start) + 1
        raise DataError(f"{document.name}, line {line}: byte {error.start} is not UTF-8; convert the file, or use no tokenizer") from None


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parsed(definition: bytes, place: str) -> Tokenizer:
    _library()
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(definition)
    except ValueError as error:
        raise DataError(f"{place} is no tokenizer.json: {error}") from None


def _library() -> None:
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise DataError("the library 'tokenizers' is not installed; run `pip install 'elastic-train[text]'`") from None
