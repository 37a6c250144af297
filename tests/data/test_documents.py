"""A packed sample tells which document each token belongs to, as the writer noted the borders in
documents.parquet.
"""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.errors import DataError
from storage.datasets import DOCUMENTS, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import BYTES, END, TEXTS, numbered, write_texts

ENDS = {"z1.txt": "it says <|endoftext|> and goes on", "z2.txt": "", "z3.txt": "", "z4.txt": "!"}
"""Texts that could be taken for other documents than they are."""


def noted(url: str) -> list[int]:
    """Returns the document of each token of a dataset, by the first tokens and the lengths that its index
    has.
    """
    index = pq.read_table(io.BytesIO(ObjectStore.open(url).get(DOCUMENTS))).to_pylist()
    return [number for number, row in enumerate(index) for _ in range(row["length"])]


@pytest.mark.parametrize("bpe", [None, 270])
@pytest.mark.parametrize("seq_len", [1, 5, 7, 64])
def test_documents_are_those_of_the_index(tmp_path: Path, seq_len: int, bpe: int | None) -> None:
    """Some are empty, one is longer than a sample, and one names the token that ends documents."""
    write_texts(tmp_path / "text", TEXTS | ENDS)
    url = prepare(tmp_path / "text", str(tmp_path / "tokens"), bpe=bpe).url
    dataset, row = TokenDataset(url, seq_len, documents=True), noted(url)
    batch = dataset.read(tuple(range(len(dataset))))
    windows = [row[i * seq_len : i * seq_len + seq_len + 1] for i in range(len(dataset))]
    assert batch["documents"].tolist() == [[number - window[0] for number in window] for window in windows]
    assert batch["documents"].dtype == torch.int32
    plain = TokenDataset(url, seq_len)
    assert plain.read((0,)).keys() == {"tokens"}
    assert torch.equal(batch["tokens"], plain.read(tuple(range(len(plain))))["tokens"])


def test_a_border_at_the_end_of_a_sample(store: ObjectStore) -> None:
    """The token that ends a document is asked for by the sample before the border, and is alone in its
    document in the next one.
    """
    write_dataset(store, numbered([1, 2, 3, END], [4, END], [END], [5, 6, END]), BYTES)
    batch = TokenDataset(store.url, 3, documents=True).read((0, 1, 2))
    assert batch["tokens"].tolist() == [[1, 2, 3, END], [END, 4, END, END], [END, 5, 6, END]]
    assert batch["documents"].tolist() == [[0, 0, 0, 0], [0, 1, 1, 2], [0, 1, 1, 1]]


def test_asking_for_documents_changes_the_fingerprint(store: ObjectStore) -> None:
    """It changes what is trained, so a run that has begun refuses it; without it the fingerprint is the old
    one.
    """
    write_dataset(store, numbered([1, 2, 3, END]), BYTES)
    plain, packed = (
        TokenDataset(store.url, 3, documents=documents).fingerprint() for documents in (False, True)
    )
    assert plain == TokenDataset(store.url, 3).fingerprint() != packed
    with pytest.raises(DataError, match=r"^data\.args\.documents = 'no' must be true or false$"):
        TokenDataset(store.url, 3, documents="no")  # type: ignore[arg-type]
