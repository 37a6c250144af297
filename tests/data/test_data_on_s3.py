"""A dataset in a bucket is written there and read by ranges; what is not as it was written is never believed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from storage.datasets import TokenFiles, write_dataset
from storage.errors import Damaged
from storage.objects import ObjectStore
from storage.objects.remote import RemotePolicy
from storage.objects.s3 import S3
from tests.data.test_prepare import MIXED_TEXTS, mixed
from tests.data.texts import BYTES, END, tokenize
from tests.support.buckets import below, enter
from tests.support.swift import Swift
from tests.support.unruly import Unruly, flipped, reset, says, truncated

TEXT = bytes(range(256)) * 40
ROW = [*TEXT, END]
BLOCK = 1024
QUICK = RemotePolicy(attempts=4, attempt_s=5.0, sleep=lambda _: None)


@pytest.fixture
def dataset(moto_bucket: S3) -> S3:
    store = below(moto_bucket, policy=QUICK)
    write_dataset(store, [("a", tokenize(TEXT))], BYTES, shard_tokens=4000, block_bytes=BLOCK)
    return store


@pytest.mark.full
def test_from_a_bucket_to_a_bucket_into_samples(
    swift: Swift, swift_bucket: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real server, found by the node's own settings: the dataset is the one that a folder gives."""
    enter(monkeypatch, swift)
    source, out = below(swift_bucket), below(swift_bucket)
    made = prepare(mixed(source).url, out.url, bpe=300).made
    local = prepare(mixed(ObjectStore.open(str(tmp_path / "text"))).url, str(tmp_path / "data"), bpe=300)
    assert (made.fingerprint, made.documents) == (local.made.fingerprint, len(MIXED_TEXTS))
    remote, folder = TokenDataset(out.url, 4), TokenDataset(str(tmp_path / "data"), 4)
    ids = tuple(np.random.default_rng(0).permutation(len(folder)).tolist())
    assert remote.read(ids)["tokens"].equal(folder.read(ids)["tokens"])
    assert remote.fingerprint() == folder.fingerprint()


def test_only_the_blocks_that_are_asked_for_are_fetched(unruly: Unruly, dataset: S3) -> None:
    files = TokenFiles(dataset)
    unruly.behave()
    assert files.rows([0, 10, 5000], 300).tolist() == [ROW[first : first + 300] for first in (0, 10, 5000)]
    assert unruly.asked("GET") == 3, "one of the first file's, two of the second's"
    files.rows([100, 5100], 100)
    assert unruly.asked("GET") == 3


@pytest.mark.parametrize("fault", [says("503 SERVICE UNAVAILABLE", "SlowDown"), reset, truncated, flipped])
def test_what_goes_wrong_on_the_way_is_fetched_again(unruly: Unruly, dataset: S3, fault: object) -> None:
    files = TokenFiles(dataset)
    unruly.behave()
    unruly.when("GET", fault, times=1)  # type: ignore[arg-type]
    assert files.rows(range(0, 10000, 500), 200).tolist() == [
        ROW[first : first + 200] for first in range(0, 10000, 500)
    ]


def test_a_flipped_bit_in_the_bucket_is_named_and_never_read(dataset: S3) -> None:
    raw = bytearray(dataset.get("tokens-00001.bin"))
    raw[3 * BLOCK + 7] ^= 4
    dataset.put("tokens-00001.bin", raw)
    files = TokenFiles(dataset)
    assert files.read(4000, 5500).tolist() == ROW[4000:5500]
    name = re.escape(f"{dataset.url}/tokens-00001.bin, block 3 (bytes 3072 to 4096), is damaged")
    with pytest.raises(Damaged, match=name):
        files.rows([0, 5600], 10)
