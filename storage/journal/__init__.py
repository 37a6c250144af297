"""The journal of a run: its writer, its readers, the claims on it, and (:mod:`storage.journal.replicas`) the copies of its end."""

from storage.journal.journal import (
    CONTINUATIONS,
    SEGMENT_RECORDS,
    Journal,
    Json,
    Segment,
    claim_owner,
    latest_claim,
    newest,
    newest_owner,
    owners,
    parse,
    read,
    records,
    rejoined,
)

__all__ = [
    "CONTINUATIONS",
    "SEGMENT_RECORDS",
    "Journal",
    "Json",
    "Segment",
    "claim_owner",
    "latest_claim",
    "newest",
    "newest_owner",
    "owners",
    "parse",
    "read",
    "records",
    "rejoined",
]
