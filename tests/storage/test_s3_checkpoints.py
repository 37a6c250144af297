"""H3, R11: checkpoints, journal, claims and datasets in a bucket, on a real server, through its death, and on
a server that misbehaves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from elastic.data.tokens import TokenDataset
from elastic.errors import DataError
from storage.checkpoints import Checkpoints
from storage.checkpoints.manifest import MANIFEST
from storage.datasets import Coding, TokenFiles, write_dataset
from storage.errors import Damaged, Missing, StorageError
from storage.journal import Journal, claim_owner, owners, read
from storage.objects import ObjectStore
from storage.objects.remote import RemotePolicy
from storage.objects.s3 import S3
from storage.slices import Version
from tests.storage.conformance import race
from tests.storage.states import TENSORS, save, state_of, write
from tests.storage.test_checkpoints import (
    test_an_attempt_that_came_to_nothing_is_not_in_the_way,
    test_latest_good,
    test_no_manifest_for_what_is_not_in_the_bucket,
    test_two_committers,
)
from tests.storage.test_deletion import break_off
from tests.storage.test_s3 import MIB5, QUICK, uploads
from tests.support.buckets import below, enter
from tests.support.patience import PATIENCE_S
from tests.support.swift import Swift
from tests.support.unruly import Unruly, flipped, flipped_upload, lost_answer, reset, says, truncated

__all__ = [  # what commits and deletes, again, on the fixture below
    "test_an_attempt_that_came_to_nothing_is_not_in_the_way",
    "test_latest_good",
    "test_no_manifest_for_what_is_not_in_the_bucket",
    "test_two_committers",
]
ROOT = Path(__file__).parents[2]
BEFORE, V = Version(2, 1), Version(3, 1)
STATE = state_of(TENSORS, seed=7)


@pytest.fixture
def checkpoints(swift_bucket: S3) -> Checkpoints:
    return Checkpoints(below(swift_bucket), "run")


def whole(checkpoints: Checkpoints, version: Version) -> dict[object, bytearray]:
    return dict(checkpoints.open(version).read([tensor.whole() for tensor in TENSORS]))


def expected() -> dict[object, bytes]:
    return {tensor.whole(): data for tensor, data in STATE.items()}


def test_l7_a_deletion_that_breaks_off_on_a_server_is_ended_by_the_next(swift_bucket: S3) -> None:
    break_off(Checkpoints(below(swift_bucket), "run"), calls=(4,), after=True)


# ---- a store that damages


@pytest.fixture
def unsafe(moto_bucket: S3) -> Checkpoints:
    """Returns checkpoints with one good save on the server that misbehaves."""
    found = Checkpoints(below(moto_bucket, policy=QUICK), "run")
    save(found, BEFORE, STATE, 2)
    return found


def test_a_bit_that_flips_on_its_way_back_is_noticed(unruly: Unruly, unsafe: Checkpoints) -> None:
    """R11: the transport believes such a body; the digest of the slice does not."""
    unruly.when("GET .*safetensors", flipped, times=99)
    with pytest.raises(Damaged, match="safetensors"):
        whole(unsafe, BEFORE)
    unruly.behave()
    assert whole(unsafe, BEFORE) == expected()  # the negative control: nothing was wrong with the object


def test_a_bit_that_flips_on_its_way_there_is_noticed_and_the_one_before_is_used(
    unruly: Unruly, unsafe: Checkpoints
) -> None:
    unruly.when("PUT .*00001-of-00002.safetensors", flipped_upload)
    save(unsafe, V, STATE, 2)
    assert unsafe.latest_good() == V  # nobody has looked yet
    problems = unsafe.verify(V).problems
    assert [type(problem) for problem in problems] == [Damaged] * len(problems) != []
    assert all("shard-00001-of-00002.safetensors" in problem.object for problem in problems)
    unsafe.quarantine(V, str(problems[0]))
    assert unsafe.latest_good() == BEFORE
    assert unsafe.verify(BEFORE).good


@pytest.mark.parametrize(
    "fault",
    [says("503 SERVICE UNAVAILABLE", "SlowDown"), reset, lost_answer, truncated],
    ids=["503", "reset", "lost", "cut"],
)
def test_a_save_goes_through_a_bad_hour(
    unruly: Unruly, unsafe: Checkpoints, fault: Callable[..., Iterable[bytes]]
) -> None:
    """R11: every third request fails, and nothing is torn."""
    for number in range(0, 60, 3):
        unruly.when(".", fault)
        unruly.when(".", lambda app, environ, start: app(environ, start), times=2 + number % 2)
    save(unsafe, V, STATE, 3)
    unruly.behave()
    assert unsafe.verify(V).good
    assert whole(unsafe, V) == expected()
    assert len(unsafe.store.list("run/steps/000000000003/")) == 3 + 2


def test_while_the_store_is_down_nothing_half_is_seen(unruly: Unruly, unsafe: Checkpoints) -> None:
    unruly.when("PUT .*MANIFEST", says("503 SERVICE UNAVAILABLE", "SlowDown"), times=99)
    with pytest.raises(
        StorageError, match=f"{MANIFEST} cannot be reached or written: gave up after 4 attempts"
    ):
        save(unsafe, V, STATE, 2)
    assert unsafe.latest_good() == BEFORE
    unruly.behave()
    save(unsafe, V, STATE, 2)  # the save is repeated: it finds its own shards
    assert unsafe.latest_good() == V
    assert unsafe.verify(V).good


# ---- a real server, and real deaths


def test_of_many_committers_one_writes_the_manifest(swift_bucket: S3) -> None:
    """Promise 6 in a bucket."""
    store = below(swift_bucket)
    names = [f"committer {number}".encode() for number in range(6)]
    for number in range(2):
        winners = race(store, f"run/{number}/{MANIFEST}", names)
        assert winners == [store.get(f"run/{number}/{MANIFEST}")]


def test_a_save_survives_the_servers_death(swift: Swift, swift_bucket: S3) -> None:
    """H3, R11: every server is killed (SIGKILL) between two shards of a save, and comes back while the second
    is being tried.
    """
    died = threading.Event()

    def wait(seconds: float) -> None:
        died.set()
        threading.Event().wait(min(seconds, 0.2))

    store = below(swift_bucket, policy=RemotePolicy(attempts=200, sleep=wait))
    checkpoints = Checkpoints(store, "run")
    save(checkpoints, BEFORE, STATE, 2)
    receipts = write(checkpoints, V, STATE, 2)[:1]
    swift.kill()
    assert all(process.returncode == -signal.SIGKILL for process in swift.processes.values())
    done: list[str] = []
    saver = threading.Thread(target=lambda: done.append(save(checkpoints, V, STATE, 2)))
    saver.start()
    try:
        assert died.wait(PATIENCE_S), "no attempt failed: the store was not down"
    finally:
        swift.start()
    saver.join(PATIENCE_S)
    assert len(done) == 1
    assert checkpoints.verify(V).good and checkpoints.verify(BEFORE).good
    assert receipts[0].file in checkpoints.manifest(V).files


def test_a_writer_killed_in_the_middle_of_an_upload_leaves_nothing_to_be_seen(
    swift: Swift, swift_bucket: S3
) -> None:
    """R11: the writer gets SIGKILL in the middle of an upload in parts; a later writer can write the object."""
    store = below(swift_bucket, part_bytes=MIB5)
    script = (
        "import sys, threading; from storage.objects import ObjectStore; from storage.objects.s3 import S3\n"
        "whole = ObjectStore.open(sys.argv[1]); store = S3(whole.filesystem, whole.root, part_bytes=5 * "
        "2**20)\n"
        "def pieces():\n"
        "    for _ in range(4): yield bytes(5 * 2**20)\n"
        "    print('half way', flush=True)\n"
        "    threading.Event().wait(60)\n"
        "store.put_if_absent('run/a', pieces())\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        enter(patch, swift)
        patch.setenv("PYTHONPATH", str(ROOT))
        writer = subprocess.Popen(
            [sys.executable, "-c", script, store.url], stdout=subprocess.PIPE, text=True
        )
    assert writer.stdout is not None
    with writer.stdout:
        assert writer.stdout.readline() == "half way\n"
        writer.kill()
        assert writer.wait(PATIENCE_S) == -signal.SIGKILL
    assert uploads(store) == [f"{store.prefix}/run/a"]  # it was half way
    assert store.list() == []
    with pytest.raises(Missing):
        store.get("run/a")
    store.put_if_absent("run/a", bytes([1]) * (MIB5 + 1))
    assert store.list() == ["run/a"]
    assert store.get("run/a", MIB5 - 1) == b"\x01\x01"


def test_a_journal_and_its_claims(swift_bucket: S3, tmp_path: Path) -> None:
    store = below(swift_bucket)
    assert [claim_owner(store, "run", {"address": name}) for name in "ab"] == [1, 2]
    journal = Journal(store, "run", tmp_path / "journal", 0, {"sum": 0}, segment_s=3600.0)
    for n in range(5):
        journal.append({"n": n}, lambda n=n: {"sum": n}, durable=True)  # type: ignore[misc]
    journal.close()
    assert journal.behind == ""
    assert [[record["n"] for record in segment] for _, segment in read(store, "run")] == [[0, 1, 2, 3, 4]]
    assert sorted(owners(store, "run")) == [1, 2]
    rival = Journal(store, "run", tmp_path / "rival", 0, {"sum": 0}, segment_s=3600.0)
    rival.append({"n": 0}, lambda: {"sum": 9}, durable=False)
    rival.close()
    assert rival.deposed.endswith("run/journal/000/000/000/000000000000.jsonl.gz")
    assert len(read(store, "run")) == 1


def test_a_dataset_is_read_by_ranges(unruly: Unruly, moto_bucket: S3) -> None:
    store = below(moto_bucket)
    tokens = np.random.default_rng(1).integers(0, 256, 10_000, dtype=np.uint16)
    write_dataset(
        store,
        [("a", tokens[:3000]), ("b", tokens[3000:])],
        Coding("bytes", 256, 255),
        shard_tokens=4096,
        block_bytes=1024,
    )
    files = TokenFiles(store)
    unruly.behave()
    for first, last in [(0, 10), (500, 530), (4090, 4100), (9999, 10_000), (3, 7)]:
        assert np.array_equal(files.read(first, last), tokens[first:last])
    # blocks 0 and 1, the last of one file, the first of the next, and the end
    assert unruly.asked("GET .*bin") == 5
    assert unruly.asked("HEAD") == 0
    unruly.when("GET .*bin", truncated, times=2)
    assert np.array_equal(files.read(6000, 6010), tokens[6000:6010])


def test_a_job_reads_its_tokens_from_s3(
    unruly: Unruly, moto_bucket: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``data.args.path = "s3://…"``: the same samples and fingerprint as from a folder."""
    enter(monkeypatch, unruly)
    store, folder = below(moto_bucket), ObjectStore.open(str(tmp_path))
    tokens = np.random.default_rng(2).integers(0, 256, 5_000, dtype=np.uint16)
    for each in (store, folder):
        write_dataset(each, [("a", tokens)], Coding("bytes", 256, 255), shard_tokens=1024)
    there, here = TokenDataset(store.url, seq_len=100), TokenDataset(str(tmp_path), seq_len=100)
    assert there.fingerprint() == here.fingerprint()
    assert len(there) == len(here) == 49
    ids = (0, 48, 10, 20)
    assert torch.equal(there.read(ids)["tokens"], here.read(ids)["tokens"])
    with pytest.raises(DataError, match="holds no dataset"):
        TokenDataset(f"{store.url}/nothing", seq_len=100)


# ---- what people get wrong

WRONG = {
    "secret": (
        {"AWS_SECRET_ACCESS_KEY": "hunter2-wrong"},
        "credentials are refused: set AWS_PROFILE, or AWS_ACCESS_KEY_ID",
    ),
    "key": (
        {"AWS_ACCESS_KEY_ID": "hunter2-nobody"},
        "credentials are refused: set AWS_PROFILE, or AWS_ACCESS_KEY_ID",
    ),
    "endpoint": (
        {"AWS_ENDPOINT_URL_S3": "localhost:nowhere"},
        "correct AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: http",
    ),
    "profile": ({"AWS_PROFILE": "nobody"}, "correct AWS_PROFILE"),
    "nothing": (
        {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
        "set AWS_PROFILE, or AWS_ACCESS_KEY_ID",
    ),
    "half": ({"AWS_SECRET_ACCESS_KEY": ""}, "set AWS_PROFILE, or AWS_ACCESS_KEY_ID"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings_are_named_with_the_fix(
    swift: Swift, swift_bucket: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    """No message holds a secret, not even a wrong one."""
    enter(monkeypatch, swift)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    changes, advice = WRONG[wrong]
    for name, value in changes.items():
        if value:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name)
    store = S3.connect(f"s3://{swift_bucket.bucket}/run", QUICK)
    with pytest.raises(StorageError, match=advice) as caught:
        store.put_if_absent("a", b"")
    assert f"s3://{swift_bucket.bucket}/run/a" in str(caught.value)
    assert not any(
        secret in str(caught.value)
        for secret in (os.environ.get("AWS_SECRET_ACCESS_KEY", "testing"), "hunter2")
    )


def test_a_wrong_region_is_followed_to_the_right_one(
    swift: Swift, swift_bucket: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store names the right region; a store that does not answers AuthorizationHeaderMalformed, with the
    setting to change.
    """
    enter(monkeypatch, swift)
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    store = S3.connect(below(swift_bucket).url, QUICK)
    store.put_if_absent("a", b"1")
    assert store.get("a") == b"1"


def test_a_bucket_that_is_not_there(swift: Swift, monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch, swift)
    store = S3.connect("s3://no-such-bucket/run", QUICK)
    for call in (lambda: store.put_if_absent("a", b""), lambda: store.get("a"), store.list):
        with pytest.raises(
            StorageError,
            match=(
                r"s3://no-such-bucket/run.* there is no such bucket: create "
                r"it, or correct"
            ),
        ):
            call()


@pytest.mark.fast
@pytest.mark.parametrize("url", ["s3://", "s3://KEY:hunter2@bucket/run"])
def test_what_is_no_bucket(url: str) -> None:
    with pytest.raises(StorageError, match="credentials are taken from the node") as caught:
        S3.connect(url)
    assert "hunter2" not in str(caught.value)
