"""Opens a token dataset and describes it for a person."""

from __future__ import annotations

import os
import shlex

from elastic.data.text_sources import text_files
from elastic.data.tokenizer import Encoder, open_encoder
from elastic.errors import DataError
from storage.datasets import Coding, Description, TokenFiles
from storage.errors import BadFormat, Damaged, Missing
from storage.objects import ObjectStore

SHOWN_TOKENS = 64
"""Number of tokens from the beginning of a dataset that are shown as text."""


def show(path: str) -> dict[str, str]:
    """Returns descriptions by name.  Raises :class:`DataError` if there is no dataset at ``path``."""
    store = ObjectStore.open(path)
    try:
        files = TokenFiles(store)
    except Missing:
        raise DataError(f"{path!r} holds no dataset; `elastic data prepare` makes one") from None
    about = files.description
    first = files.read(0, min(SHOWN_TOKENS, about.tokens))
    return {
        "dataset": store.url,
        "tokenizer": about.tokenizer
        if about.definition is None
        else (f"{about.tokenizer} (blake3 {about.definition.blake3[:12]})"),
        "vocabulary": f"{about.vocabulary:,} ({about.dtype.name}), {about.end_of_document} ends a document",
        "tokens": f"{about.tokens:,}",
        "documents": f"{about.documents:,}",
        "files": f"{len(about.files):,}, {sum(file.size for file in about.files):,} bytes",
        "fingerprint": about.fingerprint,
        "begins": " ".join(map(str, first[:12])) + " …",
        "as text": repr(encoder_of(store, about).decode(first).decode(errors="replace")),
    }


def encoder_of(store: ObjectStore, about: Description) -> Encoder:
    """Returns the encoder that turned the text into these tokens."""
    definition = store.get(about.definition.name) if about.definition is not None else None
    return open_encoder(
        Coding(about.tokenizer, about.vocabulary, about.end_of_document, definition), store.url
    )


def open_tokens(path: str) -> TokenFiles:
    """Opens the dataset of a job.  Raises :class:`DataError` with what the user can do if there is none."""
    try:
        return TokenFiles(ObjectStore.open(path))
    except Missing:
        raise DataError(_not_prepared(path)) from None
    except (Damaged, BadFormat) as error:
        raise DataError(f"data.args.path = {path!r}: {error}") from error


def _not_prepared(path: str) -> str:
    texts = len(text_files([path]))
    if texts:
        command = f"elastic data prepare {shlex.quote(path)} {shlex.quote(os.path.abspath(path) + '-tokens')}"
        return (
            f"data.args.path = {path!r} is a folder of text ({texts} files), not a dataset; run "
            f"`{command}`, and set data.args.path to the new folder"
        )
    return (
        f"data.args.path = {path!r} holds no dataset; run `elastic data prepare FOLDER_OF_TEXT "
        f"{shlex.quote(path)}`"
    )
