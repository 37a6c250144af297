"""Objects in a bucket that speaks S3.

s3fs supplies the client, the credentials and the event loop.  This module makes the requests one by one.  The
convenience calls of s3fs hold a whole object in memory, retry a create-only write without asking whether the
first attempt succeeded, and have no deadline.

Endpoint, region and credentials come from the node alone: from the standard variables and profiles
(``AWS_ENDPOINT_URL_S3``, ``AWS_REGION``, ``AWS_PROFILE``, ``AWS_ACCESS_KEY_ID`` …) or from the machine's
role.  A job and its messages never hold a secret.

An object larger than ``part_bytes`` is uploaded in parts as its pieces come, ``UPLOADS`` at a time, and
appears when the upload is completed.  All parts have one size, which some stores demand (Cloudflare's R2);
only if the size of the object is not known before, the later parts of a very large object grow
(:func:`sizes_of`).  A create-only write sends ``If-None-Match: *`` with the PUT or with the completion, so
the store decides, for objects of any size.  :mod:`storage.objects.selftest` refuses a store that ignores this
header on either.  Each write puts a random mark into the object's metadata.  If an answer is lost and the
retry finds an object, the mark tells the writer whether that object is its own.

The parts that a killed writer has uploaded are never listed and never read, but they cost money.  Give the
bucket a lifecycle rule ``AbortIncompleteMultipartUpload``.
"""

from __future__ import annotations

import asyncio
import io
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import chain, count, repeat
from typing import Any

from aiobotocore.session import AioSession
from fsspec.asyn import sync
from s3fs import S3FileSystem

from storage.errors import Exists, Full, Missing, StorageError, Unavailable
from storage.objects.port import Data, ObjectStore, below, pieces_of, size_of
from storage.objects.remote import RemotePolicy, Retryable
from storage.objects.s3_errors import FAILURES, S3Refused, judged, meaning

PART_BYTES = 32 * 2**20
"""Least number of bytes of a part, unless it is the last one.  S3 allows 5 MiB to 5 GiB."""
PARTS = 10_000
"""Number of parts that S3 allows an object, which may have 5 TiB."""
UPLOADS = 4
"""Number of parts under way at the same time.  With the parts that are being cut, writing an object takes the
memory of seven parts: 224 MiB; 3.6 GiB for an object of 5 TiB; and 2.4 GiB at the end of an object of 312 GiB
whose size is not known before.
"""
COMPLETION_S = 280.0
"""Additional seconds for completing an upload: a store may take minutes to join the parts of a large object.
"""
MARK = "elastic-write"

CLIENT = {
    # botocore frames a body with a checksum behind it by default; a store that does not know that saves the
    # frame in the object.
    # Bodies are still protected: requests are signed over the body's sha256, and manifests have digests that
    # were taken before.
    "request_checksum_calculation": "when_required",
    # attempts are counted in one place: by RemotePolicy
    "retries": {"total_max_attempts": 1},
    "connect_timeout": 10,
    "read_timeout": 60,
    "max_pool_connections": 64,
}

Answer = Mapping[str, Any]
Part = dict[str, Any]


@cache
def _descriptions() -> Any:
    """Returns the loader of botocore's descriptions of services.  Stores share it: each would take a tenth of
    a second to read them.
    """
    # a missing profile is reported by the first request
    without_profile = {"profile": (None, None, None, None)}
    return AioSession(without_profile).get_component("data_loader")


class S3(ObjectStore):
    """The objects under ``s3://bucket/prefix``.  An object of up to ``single_bytes`` is written by one PUT, a
    larger one in parts.
    """

    at_once = 8

    def __init__(
        self,
        filesystem: Any,
        root: str,
        policy: RemotePolicy | None = None,
        part_bytes: int = PART_BYTES,
        single_bytes: int | None = None,
    ) -> None:
        super().__init__(root)
        self.filesystem = filesystem
        self.policy, self.part_bytes = policy or RemotePolicy(), part_bytes
        self.single_bytes = part_bytes if single_bytes is None else single_bytes
        self.bucket, self.prefix, _ = filesystem.split_path(self.root)

    @classmethod
    def connect(cls, url: str, policy: RemotePolicy | None = None) -> S3:
        """Returns the store at ``url``.  Sends no request yet."""
        root = url.split("://", 1)[1].strip("/")
        if not root or "@" in root.split("/")[0]:
            raise Unavailable(
                "s3://…",
                (
                    "a bucket's URL is s3://bucket/prefix; credentials are taken from the node, never from "
                    "a URL"
                ),
            )
        session = AioSession()
        session.register_component("data_loader", _descriptions())
        # skip_instance_cache: fsspec would return an instance with earlier credentials and endpoint
        return cls(
            S3FileSystem(
                skip_instance_cache=True, use_listings_cache=False, config_kwargs=CLIENT, session=session
            ),
            root,
            policy,
        )

    @property
    def url(self) -> str:
        return f"s3://{self.root}"

    def put(self, key: str, data: Data) -> None:
        self._write(key, data, {})

    def put_if_absent(self, key: str, data: Data) -> None:
        self._write(key, data, {"IfNoneMatch": "*"})

    def get(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        if min(start or 0, stop or 0) < 0:
            start, stop, _ = slice(start, stop).indices(self.size(key))
        first = start or 0
        if stop is not None and stop <= first:
            self.size(key)
            return b""
        ranged = (
            {"Range": f"bytes={first}-{'' if stop is None else stop - 1}"}
            if first or stop is not None
            else {}
        )
        # concurrent requests share the link
        shared_s = self.policy.transfer_s(self.at_once * (stop - first)) if stop is not None else 0.0
        try:
            answer = self._call(key, "get_object", ranged, shared_s)
        except S3Refused:  # 416: the object ends before ``first``
            return b""
        if ranged and not str(answer.get("ContentRange", "")).startswith(f"bytes {first}-"):
            raise Unavailable(
                self.full_name(key),
                "the store ignores the Range header and sends other bytes; use a store that honours Range",
            )
        return bytes(answer["Body"])

    def size(self, key: str) -> int:
        return int(self._call(key, "head_object")["ContentLength"])

    def children(self, folder: str = "") -> list[str]:
        keys = list[str]()
        for page in self._pages(folder, {"Delimiter": "/"}):
            keys += [each["Key"] for each in _objects(page)] + [
                each["Prefix"] for each in page.get("CommonPrefixes", ())
            ]
        return below(self._above + folder, keys)  # also right for a store that ignores the delimiter

    def list(self, prefix: str = "") -> list[str]:
        return sorted(
            each["Key"].removeprefix(self._above) for page in self._pages(prefix) for each in _objects(page)
        )

    @property
    def _above(self) -> str:
        return f"{self.prefix}/" if self.prefix else ""

    def _pages(self, prefix: str, options: Mapping[str, str] | None = None) -> Iterator[Answer]:
        """Yields the store's answers, a thousand names in each."""
        more: dict[str, str] | None = {}
        while more is not None:
            try:
                arguments = {"Prefix": self._above + prefix, **(options or {}), **more}
                page = self._request(f"{self.url}/{prefix}*", "list_objects_v2", arguments)
            except S3Refused as refused:
                raise Unavailable(f"{self.url}/{prefix}*", meaning(refused)) from refused
            yield page
            more = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else None

    def delete(self, key: str) -> None:
        with suppress(Missing):
            self._call(key, "delete_object")

    def in_parts(self) -> ObjectStore:
        return S3(self.filesystem, self.root, self.policy, self.part_bytes, single_bytes=0)

    # ---- writing

    def _write(self, key: str, data: Data, condition: Mapping[str, str]) -> None:
        self._path(key)
        mark = uuid.uuid4().hex
        blocks = blocks_of(data, sizes_of(self.part_bytes, size_of(data)))
        first, second = next(blocks, b""), next(blocks, None)
        try:
            if second is None and len(first) <= self.single_bytes:
                body = {"Body": first, "Metadata": {MARK: mark}}
                self._call(key, "put_object", {**body, **condition}, self.policy.transfer_s(len(first)))
            else:
                self._upload(key, chain(filter(None, (first, second)), blocks), mark, condition)
        except S3Refused as refused:
            found = self._mark(key)
            if found == mark:
                return
            if condition and (found or refused.status == 412):
                raise Exists(key, self.url) from refused
            raise Unavailable(self.full_name(key), meaning(refused)) from refused

    def _upload(self, key: str, blocks: Iterable[bytes], mark: str, condition: Mapping[str, str]) -> None:
        upload = str(self._call(key, "create_multipart_upload", {"Metadata": {MARK: mark}})["UploadId"])
        with ExitStack() as undo:
            undo.callback(self._abort, key, upload)
            parts = self._send(key, upload, blocks)
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": parts}, **condition}
            self._call(key, "complete_multipart_upload", whole, COMPLETION_S)
            undo.pop_all()

    def _abort(self, key: str, upload: str) -> None:
        """Tells the store to drop the parts.  Gives up soon if the store does not answer."""
        brief = S3(
            self.filesystem, self.root, replace(self.policy, attempts=3, call_s=min(20.0, self.policy.call_s))
        )
        with suppress(StorageError, S3Refused):
            brief._call(key, "abort_multipart_upload", {"UploadId": upload})

    def _send(self, key: str, upload: str, blocks: Iterable[bytes]) -> Sequence[Part]:
        """Uploads the parts, ``UPLOADS`` at a time.  Returns when all have arrived."""

        def send(number: int, block: bytes) -> Part:
            part = {"UploadId": upload, "PartNumber": number, "Body": block}
            answer = self._call(key, "upload_part", part, self.policy.transfer_s(len(block)))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        parts: deque[Part] = deque()
        sent: deque[Future[Part]] = deque()
        with ThreadPoolExecutor(UPLOADS, "s3-upload") as pool:
            for number, block in enumerate(blocks, 1):
                if number > PARTS:
                    why = (
                        f"it is too large for {PARTS} parts, or larger than 5 TiB, the limit of S3; "
                        "use more shards"
                    )
                    raise Unavailable(self.full_name(key), why)
                sent.append(pool.submit(send, number, block))
                if len(sent) == UPLOADS:
                    parts.append(sent.popleft().result())
            parts.extend(each.result() for each in sent)
        return tuple(parts)

    def _mark(self, key: str) -> str:
        """Returns the mark of the object's writer: "unknown" if the object has none, and "" if there is no
        object.
        """
        try:
            return str(self._call(key, "head_object").get("Metadata", {}).get(MARK, "unknown"))
        except Missing:
            return ""

    # ---- requests

    def _call(
        self, key: str, verb: str, arguments: Mapping[str, Any] | None = None, extra_s: float = 0.0
    ) -> Answer:
        """Sends a request about one object.  Raises :class:`S3Refused` only if the name is taken or the range
        lies beyond the end.
        """
        named = {"Key": self._path(key).removeprefix(f"{self.bucket}/"), **(arguments or {})}
        try:
            return self._request(self.full_name(key), verb, named, extra_s)
        except S3Refused as refused:
            if refused.code in ("NoSuchKey", "404"):
                raise Missing(key, self.url) from refused
            if refused.lost_its_place or refused.status == 416:
                raise
            raise (Full if refused.full else Unavailable)(self.full_name(key), meaning(refused)) from refused

    def _request(self, object: str, verb: str, arguments: Mapping[str, Any], extra_s: float = 0.0) -> Answer:
        def attempt(seconds: float) -> Answer:
            answer: Answer = sync(self.filesystem.loop, self._once, verb, seconds, arguments)
            return answer

        return self.policy.call(object, attempt, extra_s)

    async def _once(self, verb: str, seconds: float, arguments: Mapping[str, Any]) -> Answer:
        """Makes one attempt, including the body, within ``seconds``.  Raises :class:`Retryable` or
        :class:`S3Refused`.
        """
        if "Body" in arguments:
            arguments = {**arguments, "Body": io.BytesIO(arguments["Body"])}  # read anew by every attempt
        try:
            async with asyncio.timeout(seconds) as limit:
                client = await self.filesystem.set_session()
                answer: dict[str, Any] = await getattr(client, verb)(Bucket=self.bucket, **arguments)
                if "Body" in answer:
                    length = int(answer["ContentLength"])
                    limit.reschedule(
                        asyncio.get_running_loop().time() + seconds + self.policy.transfer_s(length)
                    )
                    async with answer["Body"] as body:
                        answer["Body"] = await body.read()
                    if len(answer["Body"]) != length:
                        raise Retryable(f"{len(answer['Body'])} of {length} bytes came")
        except FAILURES as error:
            raise judged(error, seconds) from error
        return answer


def _objects(page: Answer) -> list[Mapping[str, Any]]:
    """Returns the objects of a page, without the empty objects ``…/`` with which consoles show folders."""
    return [each for each in page.get("Contents", ()) if not each["Key"].endswith("/")]


def sizes_of(part_bytes: int, size: int | None = None) -> Iterator[int]:
    """Yields the sizes of the parts of an object of ``size`` bytes, which are all equal.

    If ``size`` is not known, the first half of ``PARTS`` have ``part_bytes`` each, and later parts are larger
    and larger, so that all parts together hold more than 5 TiB.  The last part is 65 times as large as the
    first: 2 GiB.
    """
    if size is not None:
        yield from repeat(max(part_bytes, -(-size // PARTS)))
    for number in count(1):
        yield part_bytes * (1 + max(0, number - PARTS // 2) * 128 // PARTS)


def blocks_of(data: Data, sizes: Iterator[int]) -> Iterator[bytes]:
    """Yields the bytes of ``data`` in blocks of ``sizes``, of which the last may be shorter.  Holds only one
    block in memory at a time.
    """
    block, size = bytearray(), next(sizes)
    for piece in pieces_of(data):
        rest = memoryview(piece)
        rest = rest.cast("B") if rest.nbytes else rest
        while rest.nbytes:
            room = size - len(block)
            block += rest[:room]
            rest = rest[room:]
            if len(block) == size:
                yield bytes(block)
                block.clear()
                size = next(sizes)
    if block:
        yield bytes(block)
