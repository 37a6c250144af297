"""This member's record of a step, for the one exchange that commits it; ``protocol/commit_record.py`` says
what is in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from elastic.protocol.commit_record import FROM_DEVICE, HEADER, LOWER, CommitShape, RecordHead

if TYPE_CHECKING:
    from elastic.train.step import Share

EXACT = 2**53 - 1
"""Mask of the bits of an integer that a float64 has."""


def blank_record(shape: CommitShape, head: RecordHead, share: Share) -> torch.Tensor:
    """Returns this member's record, float64 [shape.fields], with all that the host knows; see
    ``protocol/commit_record.py``.
    """
    known: list[float] = [*head]
    for ids in share.samples:
        known += [0, 0, *ids, *(0 for _ in range(shape.microbatch - len(ids)))]
    return torch.tensor([*known, 0], dtype=torch.float64)


def fill_record(record: torch.Tensor, share: Share, norm: torch.Tensor) -> torch.Tensor:
    """Fills in what only the device knows, and the checksum, and returns ``record``.  Nothing here waits for
    the device.
    """
    record[FROM_DEVICE : FROM_DEVICE + 2] = torch.stack((torch.isfinite(norm).double(), norm))
    if share.reran is not None and share.ran is not None:
        digests = torch.stack((share.ran, share.reran)) & EXACT
        record[FROM_DEVICE + 2 : FROM_DEVICE + 4] = digests.double()
    record[HEADER:-1].view(len(share.samples), -1)[:, :2] = torch.stack(
        (_doubles(share.losses), _doubles(share.counts)), 1
    )
    words = record.view(torch.int64)
    mixed = words[:-1] ^ (words[:-1] >> 32 & LOWER)
    words[-1] = (mixed * torch.arange(1, 2 * len(words) - 1, 2, device=words.device)).sum()
    return record


def _doubles(scalars: list[torch.Tensor]) -> torch.Tensor:
    """Returns the scalars as one tensor, float64 [scalars].  A stack of several dtypes would round some of
    them first.
    """
    alike = len({each.dtype for each in scalars}) == 1
    return torch.stack(scalars if alike else [each.double() for each in scalars]).double()
