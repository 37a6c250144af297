"""S3, against a real server and against one that misbehaves."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise, repeat
from typing import Any

import pytest
from fsspec.asyn import sync

from storage.errors import Exists, Full, Missing, Unavailable
from storage.objects import ObjectStore, Sized
from storage.objects.remote import RemotePolicy, Retryable
from storage.objects.s3 import PART_BYTES, PARTS, S3, UPLOADS, sizes_of
from tests.storage.conformance import Conformance, Writes
from tests.support.buckets import below
from tests.support.unruly import (
    App,
    Environ,
    Fault,
    Start,
    Unruly,
    dripping,
    lost_answer,
    reset,
    says,
    silent,
    truncated,
    without_mark,
)


class TestSwift(Conformance):
    races = 2

    @pytest.fixture
    def store(self, swift_bucket: S3) -> ObjectStore:
        return below(swift_bucket)


class TestSwiftInParts(Writes):
    """Every object, the smallest too, goes up as parts and is completed; it is read and deleted as any other."""

    races = 1

    @pytest.fixture
    def store(self, swift_bucket: S3) -> ObjectStore:
        return below(swift_bucket, single_bytes=0)


class TestMoto(Conformance):
    races = 3

    @pytest.fixture
    def store(self, moto_bucket: S3) -> ObjectStore:
        return below(moto_bucket)


# ---- what goes wrong between us and the store

QUICK = RemotePolicy(attempts=4, attempt_s=5.0, sleep=lambda _: None)
VERBS: dict[str, tuple[Callable[[ObjectStore], object], object]] = {
    "put": (lambda store: store.put("b", b"new"), None),
    "put_if_absent": (lambda store: store.put_if_absent("b", b"new"), None),
    "get": (lambda store: store.get("a"), b"0123456789"),
    "range": (lambda store: store.get("a", 2, 8), b"234567"),
    "size": (lambda store: store.size("a"), 10),
    "list": (lambda store: store.list(), ["a"]),
    "delete": (lambda store: store.delete("gone"), None),
}
FAULTS = {
    "503": says("503 SERVICE UNAVAILABLE", "SlowDown"),
    "500": says("500 INTERNAL SERVER ERROR", "InternalError"),
    "429": says("429 TOO MANY REQUESTS", "TooManyRequests"),
    "half written": says("400 BAD REQUEST", "IncompleteBody"),
    "two writers": says("409 CONFLICT", "ConditionalRequestConflict"),
    "a proxy's page": says("502 BAD GATEWAY", "<html"),
    "reset": reset,
    "lost answer": lost_answer,
}


@pytest.fixture
def store(moto_bucket: S3) -> S3:
    """Returns a store with one object on the server that misbehaves."""
    store = below(moto_bucket, policy=QUICK)
    store.put("a", b"0123456789")
    return store


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("verb", VERBS)
def test_what_passes_is_tried_again(unruly: Unruly, store: S3, verb: str, fault: str) -> None:
    if (verb, fault) == ("size", "half written"):
        return  # a HEAD's 400 has no body to say which
    unruly.behave()
    unruly.when(".", FAULTS[fault], times=2)
    call, expected = VERBS[verb]
    assert call(store) == expected
    # those two the HTTP client may have tried again by itself
    assert unruly.asked(".") >= 3 or fault in ("reset", "lost answer")
    if verb.startswith("put"):
        assert store.get("b") == b"new"


@pytest.mark.parametrize("verb", ["get", "range", "list"])
def test_half_a_body_is_no_answer(unruly: Unruly, store: S3, verb: str) -> None:
    unruly.behave()
    unruly.when("GET", truncated, times=2)
    call, expected = VERBS[verb]
    assert call(store) == expected
    assert unruly.asked("GET") == 3


@pytest.mark.parametrize("kind", [silent, dripping])
def test_a_deadline_is_more_than_a_socket_timeout(
    unruly: Unruly, store: S3, kind: Callable[[threading.Event], Fault]
) -> None:
    """R11: nothing comes, or a byte now and then for ever: both are cut off."""
    over = threading.Event()
    store.put("long", bytes(100_000))
    unruly.when("GET", kind(over), times=1)
    # a server that is only slow has answered by then
    store.policy = replace(QUICK, attempt_s=2.0, slowest_bytes_s=1e6)
    assert store.get("long") == bytes(100_000)
    store.policy = replace(store.policy, attempt_s=0.3)
    unruly.when("GET", kind(over), times=99)
    with pytest.raises(
        Unavailable,
        match=(
            r"/long cannot .*: gave up after 4 attempts in \d\.\d s; the last error: no "
            r"answer within 0.3 s"
        ),
    ) as caught:
        store.get("long")
    assert isinstance(caught.value.__cause__, Retryable)
    over.set()


def test_when_attempts_are_spent(unruly: Unruly, store: S3) -> None:
    unruly.behave()
    unruly.when(".", FAULTS["503"], times=99)
    for call, _ in VERBS.values():
        unruly.requests.clear()
        with pytest.raises(
            Unavailable,
            match=(
                r"gave up after 4 attempts in .* s; the last error: 503( "
                r"SlowDown: as the test wants it)?"
            ),
        ):
            call(store)
        assert unruly.asked(".") == 4


@pytest.mark.parametrize(
    ("answer", "advice"),
    [
        (says("403 FORBIDDEN", "AccessDenied"), "s3:PutObject"),
        (says("403 FORBIDDEN", "InvalidAccessKeyId"), "set AWS_PROFILE, or AWS_ACCESS_KEY_ID"),
        (says("400 BAD REQUEST", "ExpiredToken"), "renew AWS_SESSION_TOKEN"),
        (says("403 FORBIDDEN", "RequestTimeTooSkewed"), "clock"),
        (says("400 BAD REQUEST", "AuthorizationHeaderMalformed"), "AWS_REGION"),
        (says("404 NOT FOUND", "NoSuchBucket"), "no such bucket: create it"),
        (says("501 NOT IMPLEMENTED", "NotImplemented"), "If-None-Match"),
        (says("400 BAD REQUEST", "SomethingNew"), "400 SomethingNew"),
    ],
)
@pytest.mark.parametrize("verb", ["put_if_absent", "get", "list"])
def test_what_does_not_pass_is_asked_once(
    unruly: Unruly, store: S3, verb: str, answer: Fault, advice: str
) -> None:
    unruly.behave()
    unruly.when(".", answer, times=99)
    with pytest.raises(Unavailable, match=advice):
        VERBS[verb][0](store)
    assert unruly.asked(".") == 1


def test_what_is_or_is_not_there_is_asked_once(unruly: Unruly, store: S3) -> None:
    unruly.behave()
    with pytest.raises(Missing):
        store.get("b")
    with pytest.raises(Missing):
        store.size("b")
    assert unruly.asked(".") == 2
    with pytest.raises(Exists):
        store.put_if_absent("a", b"")
    assert unruly.asked("PUT") == 1


@pytest.mark.parametrize("single", [None, 0], ids=["put", "parts"])
class TestACreateWhoseAnswerIsLost:
    """The create is tried again, and the writer is then told whether it won itself."""

    DECIDES = "PUT .*/k[?]$|POST .*/k[?]uploadId"

    def test_by_oneself(self, unruly: Unruly, store: S3, single: int | None) -> None:
        store.single_bytes = store.single_bytes if single is None else single
        for after in (
            None,
            says("412 PRECONDITION FAILED", "PreconditionFailed"),
            says("404 NOT FOUND", "NoSuchUpload"),
        ):
            unruly.when(self.DECIDES, lost_answer)
            if after is not None and single == 0:  # what stores say to the second completion differs
                unruly.when(self.DECIDES, after)
            store.put_if_absent("k", b"mine")
            assert store.get("k") == b"mine"
            store.delete("k")

    @pytest.mark.parametrize("theirs", [b"theirs", b"mine"])
    def test_by_another(self, unruly: Unruly, store: S3, single: int | None, theirs: bytes) -> None:
        """Only one of two writers is told that it won, even if both write the same bytes."""
        store.single_bytes = store.single_bytes if single is None else single
        rival = S3(store.filesystem, store.root, QUICK)

        def beaten(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
            rival.put_if_absent("k", theirs)
            return reset(app, environ, start)

        unruly.when(self.DECIDES, beaten)
        with pytest.raises(Exists):
            store.put_if_absent("k", b"mine")
        assert store.get("k") == theirs
        assert uploads(store) == []

    def test_a_store_that_forgets_who_wrote_is_not_believed(
        self, unruly: Unruly, store: S3, single: int | None
    ) -> None:
        """The negative control: without the mark, a writer's own first try looks like a rival's."""
        store.single_bytes = store.single_bytes if single is None else single
        unruly.when(self.DECIDES, lost_answer)
        unruly.when(self.DECIDES, says("412 PRECONDITION FAILED", "PreconditionFailed"))
        unruly.when("HEAD", without_mark, times=99)
        with pytest.raises(Exists):
            store.put_if_absent("k", b"mine")


@pytest.mark.parametrize(
    "fault", [("507 INSUFFICIENT STORAGE", "XMinioStorageFull"), ("403 FORBIDDEN", "QuotaExceeded")]
)
def test_a_bucket_without_room_is_told_from_one_that_is_down(
    unruly: Unruly, moto_bucket: S3, fault: tuple[str, str]
) -> None:
    """It is not asked again: only a deletion helps.  The control is a bucket that is down."""
    store = below(moto_bucket, policy=QUICK)
    unruly.when("PUT", says(*fault))
    with pytest.raises(Full, match=fault[1]):
        store.put_if_absent("k", b"bytes")
    assert unruly.asked("PUT") == 1
    unruly.when("PUT", FAULTS["503"], times=99)
    with pytest.raises(Unavailable) as down:
        store.put_if_absent("k", b"bytes")
    assert not isinstance(down.value, Full)


# ---- uploads in parts

MIB5 = 5 * 2**20


@pytest.fixture(params=["moto", "swift"])
def large(request: pytest.FixtureRequest) -> S3:
    """A store whose parts are as small as S3 allows.  It is patient: an upload whose begin is answered late
    is begun twice.
    """
    return below(request.getfixturevalue(f"{request.param}_bucket"), part_bytes=MIB5)


def test_a_large_object_goes_up_in_parts_and_comes_back_by_ranges(large: S3) -> None:
    data = random.Random(1).randbytes(2 * MIB5 + 3)
    cuts = [0, 1, MIB5 - 1, MIB5 + 1, len(data)]
    large.put_if_absent("a", (memoryview(data)[first:last] for first, last in pairwise(cuts)))
    assert large.size("a") == len(data)
    assert large.get("a") == data
    for first, last in [(0, 5), (MIB5 - 2, MIB5 + 2), (2 * MIB5, 3 * MIB5), (len(data) - 1, None)]:
        assert large.get("a", first, last) == data[first:last]
    with pytest.raises(Exists):
        large.put_if_absent("a", data)
    large.put("a", data[::-1])
    assert large.get("a") == data[::-1]
    assert large.list() == ["a"]
    assert uploads(large) == []
    large.delete("a")
    assert large.list() == []


def test_an_object_has_as_many_bytes_as_s3_allows_in_as_many_parts() -> None:
    """Parts of one size were 312 GiB, and all were sent before the object was found to be too large.  Of
    smaller objects they stay so.
    """
    sizes = list(islice(sizes_of(PART_BYTES), PARTS))
    assert sum(sizes) >= 5 * 2**40 and max(sizes) <= 5 * 2**30
    assert set(sizes[: PARTS // 2]) == {PART_BYTES} and sizes == sorted(sizes)


def test_parts_of_an_object_of_known_size_are_equal_and_no_more_than_are_allowed() -> None:
    """Cloudflare's R2 refuses others, except for the last one."""
    for size in (1, 159 * 2**30, 10_000 * PART_BYTES, 10_000 * PART_BYTES + 1, 5 * 2**40):
        sizes = list(islice(sizes_of(PART_BYTES, size), PARTS))
        assert (
            sum(sizes) >= size
            and len(set(sizes)) == 1
            and sizes[0] == (PART_BYTES if size <= 10_000 * PART_BYTES else -(-size // 10_000))
        )


@pytest.mark.parametrize("kind", ["pieces", "sized", "whole"])
def test_an_object_of_more_parts_than_are_allowed_goes_up_in_larger_ones(
    large: S3, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """They are equal, as some stores demand, unless nobody says before how large the object is."""
    monkeypatch.setattr("storage.objects.s3.PARTS", 4)
    data, sent, call = random.Random(2).randbytes(6 * MIB5 + 3), dict[int, int](), large._call
    pieces = [data[first : first + MIB5] for first in range(0, len(data), MIB5)]

    def counted(key: str, verb: str, arguments: Any = None, extra_s: float = 0.0) -> Any:
        if verb == "upload_part":
            sent[arguments["PartNumber"]] = len(arguments["Body"])
        return call(key, verb, arguments, extra_s)

    monkeypatch.setattr(large, "_call", counted)
    large.put_if_absent(
        "a", iter(pieces) if kind == "pieces" else Sized(len(data), iter(pieces)) if kind == "sized" else data
    )
    assert large.size("a") == len(data) and large.get("a") == data and uploads(large) == []
    *first, last = (sent[number] for number in sorted(sent))
    assert ({*first} == {-(-len(data) // 4)} and last <= first[0]) is (kind != "pieces")
    monkeypatch.setattr("storage.objects.s3.sizes_of", lambda part_bytes, _: repeat(part_bytes))
    with pytest.raises(Unavailable, match="too large for 4 parts"):
        large.put_if_absent("b", data)  # the control
    assert large.list() == ["a"] and uploads(large) == []


def test_memory_is_bounded_by_the_parts_on_their_way(unruly: Unruly, moto_bucket: S3) -> None:
    """R11: a stream is never further ahead of the store than ``UPLOADS`` parts, and the one being filled."""
    store, lead, number = below(moto_bucket, part_bytes=MIB5), [], 16

    def pieces() -> Iterator[bytes]:
        for made in range(number):
            lead.append(made - unruly.asked("PUT .*partNumber"))
            yield bytes([made]) * MIB5

    store.put_if_absent("a", pieces())
    assert unruly.asked("PUT .*partNumber") == number
    assert max(lead) <= UPLOADS + 2
    assert store.size("a") == number * MIB5


def test_an_upload_whose_source_fails_is_aborted(large: S3) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(2 * MIB5 + 1)
        raise RuntimeError("the source broke")

    for verb in (large.put, large.put_if_absent):
        with pytest.raises(RuntimeError, match="the source broke"):
            verb("a", broken())
    assert uploads(large) == large.list() == []


@pytest.mark.parametrize("request_", ["partNumber=2", "POST .*uploadId"])
def test_an_upload_that_the_store_fails_is_aborted(unruly: Unruly, moto_bucket: S3, request_: str) -> None:
    store = below(moto_bucket, policy=QUICK, part_bytes=MIB5)
    unruly.when(request_, FAULTS["503"], times=99)
    with pytest.raises(Unavailable, match="gave up after 4 attempts"):
        store.put("a", bytes(2 * MIB5))
    assert uploads(store) == store.list() == []


@pytest.mark.parametrize("fault", ["503", "reset", "lost answer"])
def test_each_request_of_an_upload_is_tried_again(unruly: Unruly, moto_bucket: S3, fault: str) -> None:
    store = below(moto_bucket, policy=QUICK, part_bytes=MIB5)
    for request in (r"POST .*\?uploads", "partNumber=1", "partNumber=2", "POST .*uploadId"):
        unruly.when(request, FAULTS[fault], times=2)
    store.put_if_absent("a", bytes(MIB5) + b"end")
    assert store.size("a") == MIB5 + 3
    assert store.get("a", MIB5) == b"end"


def uploads(store: S3) -> list[str]:
    """Returns the uploads below ``store`` that were begun and neither completed nor aborted."""

    async def ask() -> list[str]:
        client = await store.filesystem.set_session()
        answer = await client.list_multipart_uploads(Bucket=store.bucket)
        return [each["Key"] for each in answer.get("Uploads", ()) if each["Key"].startswith(store.prefix)]

    return list(sync(store.filesystem.loop, ask))


def test_a_long_listing_comes_in_pages(unruly: Unruly, store: S3) -> None:
    def two_at_once(app: App, environ: Environ, start: Start) -> Iterable[bytes]:
        environ["QUERY_STRING"] += "&max-keys=2"
        return app(environ, start)

    keys = [f"k/{number}/ü +%" for number in range(5)]
    for key in keys:
        store.put(key, b"")
    unruly.behave()
    unruly.when("list-type=2", two_at_once, times=99)
    assert store.list("k/") == keys
    assert unruly.asked("list-type=2") == 3


def test_folders_that_a_console_made_are_no_objects(store: S3) -> None:
    async def make() -> None:
        client = await store.filesystem.set_session()
        await client.put_object(Bucket=store.bucket, Key=f"{store.prefix}/folder/")

    sync(store.filesystem.loop, make)
    assert store.list() == ["a"]
