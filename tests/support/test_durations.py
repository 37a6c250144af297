"""The seconds of tests are summed by folder and by file, the longest first."""

from __future__ import annotations

from tests.support.durations import longest

SECONDS = {
    "tests/a/test_x.py::one": 1.0,
    "tests/a/test_y.py::two[b::c/d]": 2.5,
    "tests/b/test_z.py::three": 3.0,
    "tests/test_w.py::four": 0.5,
}


def test_the_longest_comes_first() -> None:
    assert [line.split() for line in longest(SECONDS, 2)] == [
        ["3.5", "s", "2", "tests", "tests/a"],
        ["3.0", "s", "1", "tests", "tests/b"],
        ["0.5", "s", "1", "tests", "tests/test_w.py"],
    ]
    assert [line.split()[-1] for line in longest(SECONDS, 3)] == [
        f"tests/{name}.py" for name in ("b/test_z", "a/test_y", "a/test_x", "test_w")
    ]
