"""Interprets the failures of an S3 client: which of them deserve another attempt, and what a user should
change after the others.

Messages show the store's status, code and sentence.  They never show the signature or the key that a store
echoes beside them.
"""

from __future__ import annotations

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from storage.objects.remote import Retryable

FAILURES = (
    boto.ClientError,
    boto.BotoCoreError,
    ResponseParserError,
    aiohttp.ClientError,
    OSError,
    ValueError,
)
"""Everything that a request raises if network, store or configuration is at fault.  TimeoutError is an
OSError.
"""

_TRANSIENT = (
    boto.HTTPClientError,  # reset, closed, timed out
    boto.ConnectionError,  # refused, no such host
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    boto.CredentialRetrievalError,
    boto.MetadataRetrievalError,
    ResponseParserError,  # a page of a proxy, or half an answer
    aiohttp.ClientError,
    OSError,
)
_TRANSIENT_CODES = frozenset(
    {
        "SlowDown",
        "RequestTimeout",
        "InternalError",
        "ServiceUnavailable",
        "RequestLimitExceeded",
        "Throttling",
        "ThrottlingException",
        "IncompleteBody",  # these three: damaged on its way, and sent again
        "BadDigest",
        "XAmzContentSHA256Mismatch",
    }
)

_FULL_CODES = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull"})
"""Codes by which Ceph and MinIO say that the bucket's quota is used up, or their disks are."""

_SET = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on every node"
_KEYS = f"the node's credentials are refused: {_SET}"
_REGION = "set AWS_REGION (or region in the profile) on every node to the bucket's region"
_RIGHTS = "allow s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and s3:ListBucket on it"
_MEANING = {
    "NoSuchBucket": "there is no such bucket: create it, or correct the bucket's name or AWS_ENDPOINT_URL_S3",
    "InvalidBucketName": "a bucket cannot have this name: correct it in the job",
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "InvalidToken": _KEYS,
    "ExpiredToken": (
        "the node's credentials have expired: renew AWS_SESSION_TOKEN, or use a role or profile that renews "
        "itself"
    ),
    "RequestTimeTooSkewed": "the node's clock is wrong: set it (NTP)",
    "AccessDenied": f"the node's credentials do not permit this operation: {_RIGHTS}",
    "403": f"the node's credentials are wrong or do not permit this operation: check them, and {_RIGHTS}",
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "PermanentRedirect": _REGION,
    "301": _REGION,
    "NotImplemented": (
        "the store lacks a feature that Elastic needs: use a store with create-only writes (If-None-Match) "
        "and multipart uploads"
    ),
    "501": (
        "the store lacks a feature that Elastic needs: use a store with create-only writes (If-None-Match) "
        "and multipart uploads"
    ),
}
_UNUSABLE: tuple[tuple[type[Exception], str], ...] = (
    (boto.NoCredentialsError, f"{_SET}, or give it a role"),
    (boto.PartialCredentialsError, _SET),
    (boto.ProfileNotFound, "correct AWS_PROFILE, or add the profile to ~/.aws/config on every node"),
    (boto.NoRegionError, _REGION),
    (boto.ParamValidationError, "correct the bucket's name or the key"),
    (ValueError, "correct AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: http(s)://host[:port]"),
)


class S3Refused(Exception):
    """The store refuses, and would refuse again."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(status, code, text)
        self.status, self.code, self.text = status, code, text

    @property
    def lost_its_place(self) -> bool:
        """True if the object exists already: another writer wrote it, or an earlier attempt whose answer was
        lost.
        """
        return self.status == 412 or self.code == "NoSuchUpload"

    @property
    def full(self) -> bool:
        """True if there is no room for the object."""
        return self.status == 507 or self.code in _FULL_CODES


def judged(error: Exception, seconds: float) -> Retryable | S3Refused:
    """Returns what to raise instead of ``error``, which ended an attempt of ``seconds``."""
    if isinstance(error, boto.ClientError):
        return _answered(error)
    if isinstance(error, TimeoutError) and not str(error):
        return Retryable(f"no answer within {seconds:.1f} s")
    if isinstance(error, _TRANSIENT):
        return Retryable(f"{type(error).__name__}: {error}")
    advice = next(
        (advice for kind, advice in _UNUSABLE if isinstance(error, kind)), "check the node's AWS settings"
    )
    return S3Refused(0, "", f"{str(error).splitlines()[0]}; {advice}")


def _answered(error: boto.ClientError) -> Retryable | S3Refused:
    said = error.response.get("Error", {})
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = str(said.get("Code", status))
    text = f"{status} {'' if code == str(status) else code}".strip() + (
        f": {said.get('Message', 'no reason given')}"
    )
    # a completion is answered 200 before it is decided, and the refusal comes in the body
    if code in ("PreconditionFailed", "412"):
        return S3Refused(412, code, text)
    refused = S3Refused(status, code, text)
    if code in _MEANING or refused.full:
        return refused
    # 409: several writers collided; the next attempt shows which of them won
    if code in _TRANSIENT_CODES or status >= 500 or status in (408, 409, 429):
        return Retryable(text)
    region = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    return S3Refused(status, code, f"{text} (the bucket is in {region})" if region else text)


def meaning(refused: S3Refused) -> str:
    """Returns the store's words and what to do."""
    advice = _MEANING.get(refused.code)
    return f"{refused.text}; {advice}" if advice else refused.text
