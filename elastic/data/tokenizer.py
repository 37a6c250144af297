"""Turns text into tokens and back: byte by byte, or with a Hugging Face ``tokenizer.json``.

A byte tokenizer needs no training and no file, and any text in any encoding survives encoding and decoding
unchanged.  A byte-level BPE (Sennrich et al. 2016; Radford et al. 2019, section 2.2) needs about a quarter of
the tokens; trained twice on the same text it gives the same file.  In both, a token that text cannot contain
ends each document.

The library ``tokenizers`` encodes a few megabytes at a time, in order and on all cores, so memory does not
limit the size of a dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from elastic.data.text_sources import Document
from elastic.errors import DataError
from storage.datasets import Coding, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END = "<|endoftext|>"
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names of the end-of-document token in well-known tokenizers, tried in this order."""
DEFINITION = "tokenizer.json"
CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json")
"""Names of the files beside a tokenizer.json that may name its ``eos_token``, in this order."""
BATCH_BYTES = 4 * 2**20
"""Size of the text in bytes that the library encodes at once, on all cores."""
SMALLEST = 257
"""Size of the smallest vocabulary: 256 bytes and the end of a document."""


class Encoder(Protocol):
    """Encodes documents while a dataset is prepared, and decodes tokens to show them."""

    coding: Coding

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        """Yields (name, tokens with the end-of-document token) of each document, in order."""
        ...

    def decode(self, tokens: Tokens) -> bytes:
        """Returns the text of ``tokens``, without end-of-document tokens."""
        ...


class Bytes:
    """Encodes each byte as one token."""

    coding = Coding("bytes", SMALLEST, end_of_document=256)
    end = END

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        for name, text in documents:
            yield (
                name,
                np.append(
                    np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(self.coding.end_of_document)
                ),
            )

    def decode(self, tokens: Tokens) -> bytes:
        return tokens[tokens != self.coding.end_of_document].astype(np.uint8).tobytes()


class Trained:
    """Encodes with a ``tokenizer.json``.

    ``place`` is its name in messages.  ``end`` is the token that ends documents; by default it is the first
    of ``ENDS`` that exists. Raises :class:`DataError` if ``definition`` is no tokenizer.json or has no such
    token.
    """

    def __init__(self, definition: bytes, place: str, end: str | None = None) -> None:
        self._tokenizer = _parsed(definition, place)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # a document that *says* "<|endoftext|>" does not end there
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        end = end or next((known for known in ENDS if known in ids), None)
        if end is None or end not in ids:
            raise DataError(
                f"{place} has no token {end or ' or '.join(ENDS)} to end documents with; name a token "
                "with --end-of-document"
            )
        self.coding, self.end = Coding("tokenizer.json", max(ids.values()) + 1, ids[end], definition), end

    def encode(self, documents: Iterable[Document]) -> Iterator[tuple[str, Tokens]]:
        dtype, end = self.coding.dtype, self.coding.end_of_document
        for batch in _batches(documents):
            texts = [document.text.decode() for document in batch]
            for document, encoded in zip(
                batch, self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
            ):
                yield document.name, np.array([*encoded.ids, end], dtype)

    def decode(self, tokens: Tokens) -> bytes:
        text: str = self._tokenizer.decode(
            tokens[tokens != self.coding.end_of_document].tolist(), skip_special_tokens=False
        )
        return text.encode()


def open_encoder(coding: Coding, place: str) -> Encoder:
    """Returns the encoder that the dataset at ``place`` was prepared with."""
    if coding.definition is None:
        return Bytes()
    return Trained(
        coding.definition, place, _parsed(coding.definition, place).id_to_token(coding.end_of_document)
    )


def files_of(encoder: Encoder) -> dict[str, bytes]:
    """Returns the files that ``AutoTokenizer.from_pretrained`` of transformers opens; none for an encoder of
    the user's own.
    """
    if not isinstance(encoder, Bytes | Trained):
        return {}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": encoder.end,
        "clean_up_tokenization_spaces": False,
    }
    return {
        DEFINITION: encoder.coding.definition or _byte_definition(),
        CONFIGURATIONS[0]: json.dumps(about, indent=2).encode(),
    }


def _byte_definition() -> bytes:
    """Returns a tokenizer.json whose tokens are those of :class:`Bytes`: a byte-level BPE that merges
    nothing.
    """
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted({*range(256)} - {*printed})  # BPE writes them as letters that come after the bytes
    letters = {chr(byte): byte for byte in printed} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    definition = {
        "version": "1.0",
        "added_tokens": [{"id": Bytes.coding.end_of_document, "content": END, "special": True, **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": letters, "merges": []},
    }
    return json.dumps(definition, indent=1).encode()


def train_bpe(documents: Iterable[Document], vocabulary: int) -> bytes:
    """Trains a byte-level BPE of at most ``vocabulary`` tokens and returns its tokenizer.json.

    It has fewer tokens if the text has nothing more to merge.  Raises :class:`DataError` if ``vocabulary`` is
    too small.
    """
    if vocabulary < SMALLEST:
        raise DataError(
            f"--train-bpe {vocabulary} is too small: 256 bytes and the end of a document already need "
            f"{SMALLEST} tokens; give {SMALLEST} or more"
        )
    _library()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((document.text.decode() for document in documents), trainer)
    return str(tokenizer.to_str(pretty=True)).encode()


def read_tokenizer(path: str | Path, end: str | None = None) -> Trained:
    """Returns the encoder of a tokenizer.json, or of a folder with one, as `save_pretrained` and the Hugging
    Face hub have it.

    Documents end with the token ``end``, by default the ``eos_token`` that a folder names.  Raises
    :class:`DataError` if the tokenizer cannot be read, or has no such token.
    """
    path = Path(path)
    if not path.is_dir():
        return Trained(_read(path, "give a tokenizer.json file, or a folder with one"), str(path), end)
    place = path / DEFINITION
    if not place.exists():
        there = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
        raise DataError(
            f"--tokenizer {str(path)!r} is a folder without {DEFINITION} ({there}); convert an older "
            f"tokenizer by AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained(FOLDER) of "
            "transformers"
        )
    return Trained(_read(place, "give another folder"), str(place), end or _told_end(path))


def _told_end(folder: Path) -> str | None:
    """Returns the ``eos_token`` of a tokenizer's folder, or None if no file of it names one."""
    for name in CONFIGURATIONS:
        if (folder / name).exists():
            try:
                told = json.loads(
                    _read(folder / name, "correct this file, or give the tokenizer.json alone")
                )["eos_token"]
                return str(told["content"] if isinstance(told, dict) else told) if told is not None else None
            except KeyError:
                continue
            except (ValueError, TypeError) as error:
                raise DataError(
                    f"{folder / name} is no description of a tokenizer: {error}; correct this file, or "
                    f"give {DEFINITION} alone"
                ) from None
    return None


def _read(path: Path, fix: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"--tokenizer {str(path)!r} cannot be read: {error.strerror}; {fix}") from None


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
        raise DataError(
            "the library 'tokenizers' is not installed; run `pip install 'elastic-train[text]'`"
        ) from None
