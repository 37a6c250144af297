"""Texts, and the row of tokens that they become."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np

from elastic.data.text_sources import Document
from elastic.data.tokenizer import Bytes
from storage.datasets import Tokens
from storage.objects import ObjectStore

BYTES = Bytes.coding
END = BYTES.end_of_document
TEXTS = {
    "b.txt": "bee\n",
    "a/z.md": "zed",
    "a/empty.txt": "",
    "a.txt": "Ä é 文 \x00 end",
    "deep/er/x.py": "x = 1\n" * 50,
}


def write_texts(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return root


def dumb_row(texts: dict[str, str]) -> list[int]:
    """Returns all tokens: the bytes of each text in the order of the paths, and a mark after each text."""
    return [token for name in sorted(texts) for token in (*texts[name].encode(), END)]


def tokenize(text: bytes) -> Tokens:
    ((_, tokens),) = Bytes().encode([Document("x", text)])
    return tokens


def numbered(*rows: list[int]) -> list[tuple[str, Tokens]]:
    """Returns a document for each row of tokens, whatever they stand for."""
    return [(f"{n:03d}", np.array(row, np.uint32)) for n, row in enumerate(rows)]


def memory() -> ObjectStore:
    return ObjectStore.open(f"memory://{uuid.uuid4().hex}")
