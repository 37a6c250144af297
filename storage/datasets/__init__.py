"""Token datasets: how they are written and described, and how they are read."""

from storage.datasets.datasets import (
    BLOCK_BYTES,
    BLOCKS,
    DESCRIPTION,
    DOCUMENTS,
    TOKENIZER,
    Coding,
    Description,
    Tokens,
    expect_room,
    files_of_datasets,
    read_description,
    write_dataset,
)
from storage.datasets.token_reader import TokenFiles

__all__ = [
    "BLOCKS",
    "BLOCK_BYTES",
    "DESCRIPTION",
    "DOCUMENTS",
    "TOKENIZER",
    "Coding",
    "Description",
    "TokenFiles",
    "Tokens",
    "expect_room",
    "files_of_datasets",
    "read_description",
    "write_dataset",
]
