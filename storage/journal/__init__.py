"""The journal of a run: its writer, its readers, the claims on it, and (:mod:`storage.journal.replicas`) the copies of its end."""

from storage.journal.journal import SEGMENT_RECORDS, Journal, Json, claim_owner, latest_claim, newest, owners, parse, read, records

__all__ = ["SEGMENT_RECORDS", "Journal", "Json", "claim_owner", "latest_claim", "newest", "owners", "parse", "read", "records"]
