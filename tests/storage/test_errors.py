"""Storage errors travel between processes, name their object, and say what to do."""

from __future__ import annotations

import pickle

import pytest

from storage import errors
from storage.errors import BadFormat, Damaged, Deposed, Exists, Incomplete, Missing, StorageError, Unavailable

pytestmark = pytest.mark.fast
EXAMPLES = [
    Missing("k", "s3://b"),
    Exists("k", "s3://b"),
    Damaged("s3://b/k", "12 bytes", "11 bytes"),
    Incomplete("s3://b/k", "3 of 4 elements are there"),
    BadFormat("s3://b/k has format 2, but this release reads formats up to 1: install a newer release"),
    Deposed("s3://b/k"),
    Unavailable("s3://b/k", "503"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_pickle_and_name_their_object(error: StorageError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert "s3://b/k" in str(error)
    assert len(str(error)) > len("s3://b/k") + 20


def test_every_error_is_among_them_and_drawn() -> None:
    assert {type(error) for error in EXAMPLES} == set(StorageError.__subclasses__())
    assert all(f"── {type(error).__name__} " in str(errors.__doc__) for error in EXAMPLES)
