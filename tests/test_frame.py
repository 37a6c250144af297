"""The test suite keeps its own promises: no silent skip in CI, and a table of capabilities that cannot
flatter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import capabilities
from tests.capabilities import amiss, carried, carriers, noted, proofs, result, rows, scan, table
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
IDS = list(rows())

SUITE = """
import pytest

@pytest.mark.must_run_in_ci
def test_r14_needed():
    {needed}

def test_other():
    pytest.skip("no GPU")
"""


def run_suite(folder: Path, source: str, *options: str, ci: bool) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = must_run_in_ci\n")
    (folder / "test_suite.py").write_text(source)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CI": "true" if ci else "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-c",
        "pytest.ini",
        "--import-mode=importlib",
        *options,
        ".",
    ]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_test_that_must_run_may_not_be_skipped_in_ci_and_the_last_result_counts(tmp_path: Path) -> None:
    """Results are remembered for the table."""

    def ran(needed: str, *, ci: bool) -> tuple[int, str, bool]:
        done = run_suite(tmp_path, SUITE.format(needed=needed), ci=ci)
        cache = tmp_path / ".pytest_cache" / "v" / capabilities.RESULTS
        remembered = result("test_suite.py::test_r14_needed", capabilities.json.loads(cache.read_text()))
        return (
            done.returncode,
            remembered,
            "SKIPPED, BUT MUST RUN IN CI: test_suite.py::test_r14_needed" in done.stdout,
        )

    assert ran("pass", ci=True) == (0, "passed", False)
    assert ran("pytest.skip('no Ray')", ci=True) == (1, "skipped", True)
    assert ran("assert False", ci=False) == (1, "failed", False)
    assert ran("pytest.skip('no Ray')", ci=False)[:2] == (0, "skipped")


def test_a_test_that_crashes_in_a_shared_run_has_failed(tmp_path: Path) -> None:
    """The plugin xdist may run it once more, in the process that takes the place of the one that crashed."""
    crash = (
        "import os, pathlib\n    if not pathlib.Path('seen').exists():\n        "
        "pathlib.Path('seen').touch(); os.abort()"
    )
    done = run_suite(
        tmp_path, SUITE.format(needed=crash), "-p", "xdist.plugin", "-n", "1", "--dist", "loadgroup", ci=False
    )
    cache = tmp_path / ".pytest_cache" / "v" / capabilities.RESULTS
    assert done.returncode == 1
    assert result("test_suite.py::test_r14_needed", capabilities.json.loads(cache.read_text())) == "failed"


def test_nor_may_its_whole_module(tmp_path: Path) -> None:
    done = run_suite(
        tmp_path,
        "import pytest\npytest.importorskip('not_installed_anywhere')\n" + SUITE.format(needed="pass"),
        ci=True,
    )
    assert "SKIPPED, BUT MUST RUN IN CI: test_suite.py" in done.stdout
    assert done.returncode not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.mark.fast
def test_the_rows_are_those_of_the_list() -> None:
    assert len(IDS) == 142, "a row was added to tests/capabilities.tsv, or is gone"
    tests = scan(ROOT / "tests", IDS)
    assert [(name, test) for name, its in proofs().items() for test in its if test not in tests[name]] == []
    assert {"A1", "B17", "C8", "D16", "E6", "F8", "G4", "H4", "I2", "R22", "U11", "N13"} <= set(IDS)


@pytest.mark.fast
def test_ids_are_found_in_names_and_docstrings() -> None:
    assert carried("test_r14_each_sample_once", "", IDS) == ["R14"]
    assert carried("test_each_sample_once", "R14, H1: as it should be (not on H200 nor R140).", IDS) == [
        "H1",
        "R14",
    ]
    assert carried("test_start", "Nothing", IDS) == []
    source = (
        'class TestX:\n    "R1"\n    def test_a(self): ...\n    def help(self): "R2"\ndef test_u1_b(): ...\n'
    )
    assert list(carriers(source, "t.py", IDS)) == [("R1", "t.py::TestX::test_a"), ("U1", "t.py::test_u1_b")]


@pytest.mark.fast
def test_only_a_passing_test_proves() -> None:
    outcomes = {
        "a[1]": "passed",
        "a[2]": "passed",
        "b[1]": "passed",
        "b[2]": "failed",
        "c": "skipped",
    }
    tests = {"A": ["a", "c", "d"], "B": ["a", "b"], "C": ["c", "d"], "D": ["d"], "E": []}
    lines = list(table(dict.fromkeys(tests, "text"), tests, outcomes))
    assert [line.split()[1] for line in lines if line[0] in tests] == [
        "passed",
        "FAILED",
        "skipped",
        "not",
        "not",
    ]
    assert lines[-1] == "1 of 5 capabilities proven here (1 FAILED, 1 skipped, 2 not proven here)"
    shown = {
        "     passed           a": 2,
        "     FAILED           b": 0,
        "     failed           b": 1,
        "     skipped          c": 2,
    }
    assert {line: lines.count(line) for line in shown} == shown, "every test is shown with its own result"
    assert list(table({"A": "text"}, {"A": ["a"]}, outcomes))[-1] == "1 of 1 capabilities proven here"
    assert amiss(tests, outcomes, {"A": ["a", "c"]}) == ["B: b failed"], (
        "one that is skipped proves nothing, and hides nothing"
    )
    must = {"A": ["a", "d", "renamed"], "C": ["c"]}
    not_proven = ["A: d never run", "A: renamed does not carry this id", "C: all its tests were skipped"]
    assert amiss(tests, outcomes, must) == ["B: b failed", *not_proven]
    assert noted({"A": "text", "D": "other"}, tests, outcomes) == (
        "id\tcapability\tproven by\nA\ttext\ta\nD\tother\t\n"
    )


@pytest.mark.fast
def test_the_scan_finds_this_repositorys_own() -> None:
    assert any("test_imports.py::test_u8" in test for test in scan(ROOT / "tests", IDS)["U8"])
