"""The journal of a run: its writer, its readers, the claims on it, and (:mod:`storage.journal.replicas`) the
copies of its end.
"""

from storage.journal.claims import claim_owner, latest_claim, newest_owner, owner_of, owners
from storage.journal.journal import CONTINUATIONS, RECORDS, SEGMENT_RECORDS, Journal
from storage.journal.reading import Newest, objects, parse, read, since
from storage.journal.stored_segment import Json, Segment, unpacked

__all__ = [
    "CONTINUATIONS",
    "RECORDS",
    "SEGMENT_RECORDS",
    "Journal",
    "Json",
    "Newest",
    "Segment",
    "claim_owner",
    "latest_claim",
    "newest_owner",
    "objects",
    "owner_of",
    "owners",
    "parse",
    "read",
    "since",
    "unpacked",
]
