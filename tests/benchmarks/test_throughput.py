"""The benchmark of throughput says whether it compared bits, and fails unless those that it compared are
equal.
"""

from __future__ import annotations

import pytest

from tests.benchmarks.throughput import Row, compared

GOOD: Row = {"bits": [(1, "0x1p+0", "0x1p+1")]}
OTHER: Row = {"bits": [(1, "0x1p+0", "0x1p+2")]}
FAILED: Row = {"failed": "out of memory"}


@pytest.mark.parametrize(
    ("rows", "code", "said"),
    [
        ({"reproducible": GOOD, "again": GOOD}, 0, "the bits of reproducible and again are equal"),
        ({"reproducible": GOOD, "again": OTHER}, 1, "the bits of reproducible and again differ"),
        (
            {"reproducible": FAILED, "again": FAILED},
            1,
            "bits are not compared: reproducible and again failed",
        ),
        ({"reproducible": GOOD, "again": FAILED}, 1, "bits are not compared: again failed"),
        ({"reproducible": GOOD, "free": GOOD}, 0, "bits are not compared: name both reproducible and again"),
        ({"free": FAILED}, 0, ""),
    ],
)
def test_bits_that_were_not_compared_are_not_called_equal(rows: dict[str, Row], code: int, said: str) -> None:
    assert compared(rows) == (code, said)
