"""E1: the table of number formats is that of the formats' own bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from actors.cli import main
from elastic.engine.dtypes import FORMATS, Format, format_of

pytestmark = pytest.mark.fast

ROW = {
    "fp32": (8, 23, 3.4028234663852886e38),
    "fp16": (5, 10, 65504.0),
    "bf16": (8, 7, 3.3895313892515355e38),
    "fp8 e4m3": (4, 3, 448.0),
    "fp8 e5m2": (5, 2, 57344.0),
}
"""Bits of exponent and mantissa, and the largest number, as the formats' papers have them."""


def test_e1_the_formats_are_those_of_the_papers() -> None:
    """E1: the control is that no two formats are alike."""
    found = {name: format_of(dtype) for name, dtype in FORMATS.items()}
    assert {name: (each.exponent, each.mantissa, each.largest) for name, each in found.items()} == ROW
    assert len(set(found.values())) == len(ROW)


def by_counting(dtype: torch.dtype) -> Format:
    """Returns the format from all numbers that it has, written out: two neighbours near 1, the largest, and
    the smallest ones.
    """
    bits = torch.finfo(dtype).bits
    # without the sign
    patterns = torch.arange(2 ** (bits - 1), dtype=torch.int32).to({8: torch.uint8, 16: torch.int16}[bits])
    values = [value for value in patterns.view(dtype).double().tolist() if math.isfinite(value)]
    assert values == sorted(values) and values[0] == 0
    one = values.index(1.0)
    mantissa = sum(1 <= value < 2 for value in values).bit_length() - 1
    return Format(
        bits - 1 - mantissa, mantissa, values[-1], values[2**mantissa], values[1], values[one + 1] - 1
    )


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "fp32"])
def test_e1_the_formats_are_those_of_their_bit_patterns(name: str) -> None:
    """E1: the control is every other format."""
    alike = [other for other, dtype in FORMATS.items() if format_of(dtype) == by_counting(FORMATS[name])]
    assert alike == [name]


def test_e1_fp32_is_numpys() -> None:
    """E1: fp32 has too many numbers to write out."""
    judge, found = np.finfo(np.float32), format_of(torch.float32)
    assert (found.exponent, found.mantissa) == (judge.nexp, judge.nmant)
    expected = [
        float(each) for each in (judge.max, judge.smallest_normal, judge.smallest_subnormal, judge.eps)
    ]
    assert [found.largest, found.smallest_normal, found.smallest_subnormal, found.eps] == expected


def test_e1_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    """E1: a row for each format, with the figures of the papers."""
    assert main(["dtypes"]) == 0
    lines = [
        [word.strip() for word in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    ]
    assert {name: (bits, largest) for name, bits, largest, *_ in lines} == {
        name: (f"{exponent} / {mantissa}", f"±{largest:.6g}")
        for name, (exponent, mantissa, largest) in ROW.items()
    }
