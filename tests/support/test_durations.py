"""The seconds of tests are summed by folder and by file, the longest first."""

from __future__ import annotations

from tests.conftest import longest_first, unit
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


def test_units_that_took_longest_run_first_and_groups_stay_whole() -> None:
    """A group of folders is one unit, and what no run has taken yet comes last."""
    tests = [
        "tests/engine/test_a.py::one",
        "tests/engine/test_b.py::two",
        "tests/actors/test_c.py::x",
        "tests/gpu/test_d.py::y",
        "tests/test_e.py::z",
    ]
    order = longest_first(
        tests,
        {
            "tests/engine/test_a.py": 2.0,
            "tests/engine/test_b.py": 9.0,
            "tests/actors/test_c.py": 7.0,
            "tests/gpu/test_d.py": 3.0,
        },
    )
    assert sorted(order, key=order.__getitem__) == [
        "machine",
        "tests/engine/test_b.py",
        "tests/engine/test_a.py",
        "tests/test_e.py",
    ]
    assert unit("tests/actors/test_c.py::x") == unit("tests/gpu/test_d.py::y") == "machine"
    assert unit("tests/storage/test_s3.py::x") == unit("tests/data/test_data_on_s3.py::y") == "servers"
