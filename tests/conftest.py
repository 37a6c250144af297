"""This file keeps the results of every test run for ``tests/capabilities.py``, and makes sure that CI skips
nothing that it must show.
"""

from __future__ import annotations

import compileall
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.capabilities import RESULTS
from tests.support import budgets
from tests.support.durations import KEY, known, longest

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Torch computes with one thread in this process too, as in workers.  Two threads that wait for each other by
spinning, while other processes have the cores, made tests of small models four times slower, and took four
times the time of the processor.  It is set before torch is imported."""

pytest_plugins = ["tests.support.buckets", "tests.support.worlds"]

MUST = "must_run_in_ci"

settings.register_profile("elastic", deadline=None, derandomize=True)  # a red test is red again the next time
settings.load_profile("elastic")

COUNTED = "counted"
"""The property of a report with the numbers of :mod:`tests.support.budgets` that its test has taken."""
_counted = pytest.StashKey[dict[str, Counter[str]]]()
_outcomes = pytest.StashKey[dict[str, str]]()
_seconds = pytest.StashKey[dict[str, float]]()
_skipped = pytest.StashKey[list[str]]()
_status = pytest.StashKey[int]()
_compiled = pytest.StashKey[str]()
"""The folder of what torch has compiled in a whole run: its processes share it, and what earlier runs have
left does not matter.
"""


FAST = ("architecture", "control", "data", "plan", "sim")
"""Folders of tests without Ray or GPUs, and mostly without processes; with the files beside them they are
``pytest -m fast``.
"""


GROUPS = {
    "actors": "machine",
    "examples": "machine",
    "gpu": "machine",
    "state": "memory",
    "train": "memory",
    "sim": "simulations",
    "storage/test_s3.py": "servers",
    "storage/test_s3_checkpoints.py": "servers",
    "storage/test_selftest.py": "servers",
    "data/test_data_on_s3.py": "servers",
}
"""The group of the tests of a folder, or of a file: they use the machine as a whole, since they start clusters
or measure its memory, or they share what takes long to make, as an S3 server does.  One process runs a whole
group, in order; all other files are dealt one by one.
"""


def unit(nodeid: str) -> str:
    """Returns the tests that one process runs together: a group, or else a file."""
    file = nodeid.partition("::")[0]
    below = file.removeprefix("tests/")
    folder, _, rest = below.partition("/")
    return GROUPS.get(below) or (GROUPS.get(folder, file) if rest else file)


def has_a_cluster(item: pytest.Item) -> bool:
    """Returns whether the module of a test starts a cluster in place of the one that the others share.

    Such modules come last in their group: after each of them the shared cluster would have to start again.
    """
    return hasattr(getattr(item, "module", None), "local_cluster")


def longest_first(nodeids: Iterable[str], known: Mapping[str, float]) -> dict[str, float]:
    """Returns the order of units: those that took longest come first, so that all processes end together.  A
    new file comes last.
    """
    seconds = dict.fromkeys(map(unit, nodeids), 0.0)
    for file, duration in known.items():
        if unit(file) in seconds:
            seconds[unit(file)] += duration
    return {name: -seconds[name] for name in seconds}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Lets three processes share a whole run, by :func:`unit`: tests that wait leave a core idle, and runs
    have two.

    A run of chosen files, and the long tests, stay in this process.
    """
    return 3 if _whole(config) else 0


def _whole(config: pytest.Config) -> bool:
    """Returns whether all tests run that run by default."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.option.markexpr == "not full"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives units to processes, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return ByUnit(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    order = longest_first([item.nodeid for item in items], known())
    items.sort(key=lambda item: (order[unit(item.nodeid)], unit(item.nodeid), has_a_cluster(item)))
    # the user's way first, where there are GPUs
    items.sort(key=lambda item: item.path != here / "gpu" / "test_main_path.py")
    for item in items:
        folder = item.path.relative_to(here).parts[:-1] if item.path.is_relative_to(here) else ("elsewhere",)
        if (not folder or folder[0] in FAST) and not item.get_closest_marker("full"):
            item.add_marker("fast")


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # thousands of tests are not garbage; Python would look at them again and again


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_outcomes], config.stash[_skipped], config.stash[_seconds], config.stash[_counted] = (
        {},
        [],
        {},
        defaultdict(Counter),
    )
    budgets.begin()
    config.pluginmanager.register(Results(config))
    if sys.dont_write_bytecode and not _distributed(config):
        _compile()
    if _whole(config) and not _distributed(config):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_compiled] = tempfile.mkdtemp(prefix="compiled-")


def _compile() -> None:
    """Writes the bytecode of our packages once, where the environment forbids Python to do it.

    The tests start thousands of processes, and each of them would compile all that it imports: 0.3 s of the
    processor.
    """
    here = Path(__file__).parent
    for folder in (
        here.parent / "elastic",
        here.parent / "actors",
        here.parent / "storage",
        here / "support",
    ):
        compileall.compile_dir(folder, quiet=2)


@pytest.fixture(autouse=True)
def no_cluster_of_another_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only the group of clusters find those of this machine: beside it, runs of the same names live
    there.
    """
    if unit(request.node.nodeid) != "machine" and "ray" in sys.modules:
        # Ray clears the cache of its own
        monkeypatch.setattr("ray._private.services.find_gcs_addresses", cache(set))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append((COUNTED, budgets.taken()))


class Results:
    """Notes every report, also those that come from another process of the run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        nodeid, seconds = report.nodeid, self.config.stash[_seconds]
        seconds[nodeid] = seconds.get(nodeid, 0.0) + report.duration
        for name, numbers in report.user_properties:
            if name == COUNTED:
                self.config.stash[_counted]["/".join(nodeid.split("/")[:2]).partition("::")[0]].update(
                    numbers
                )  # type: ignore[arg-type]
        outcomes = self.config.stash[_outcomes]
        # its end may fail, too
        if (report.when == "call" or report.outcome != "passed") and outcomes.get(nodeid) != "failed":
            outcomes[nodeid] = report.outcome
        if report.skipped and MUST in report.keywords:
            self.config.stash[_skipped].append(nodeid)


def _distributed(config: pytest.Config) -> bool:
    """Returns whether this process runs a share of the tests for another one, which keeps the results."""
    return hasattr(config, "workerinput")


def _skipped_whole(config: pytest.Config) -> list[str]:
    """Returns modules that were skipped before their tests and marks were known, but whose source names the
    mark.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = reporter.stats.get("skipped", []) if reporter else []
    modules = [report.nodeid for report in reports if isinstance(report, pytest.CollectReport)]
    return [module for module in modules if MUST in (config.rootpath / module).read_text(encoding="utf-8")]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if _distributed(config):
        return
    cache = getattr(config, "cache", None)  # absent under -p no:cacheprovider
    if cache is not None:
        cache.set(RESULTS, {**({} if _whole(config) else cache.get(RESULTS, {})), **config.stash[_outcomes]})
        cache.set(KEY, {nodeid: round(seconds, 3) for nodeid, seconds in config.stash[_seconds].items()})
    config.stash[_skipped] += _skipped_whole(config)
    if config.stash[_skipped] and os.environ.get("CI"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    config.stash[_status] = int(session.exitstatus)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    seconds, counted = config.stash[_seconds], config.stash[_counted]
    if _whole(config) and seconds:
        terminalreporter.section(
            f"where the time went: {sum(seconds.values()) / 60:.1f} process-minutes, set-up and end included"
        )
        terminalreporter.write("\n".join((*longest(seconds, 2), "", *longest(seconds, 3), "")))
        terminalreporter.section("what was started")
        terminalreporter.write("\n".join((*budgets.lines(counted), "")))
        for sentence in budgets.above(counted):
            terminalreporter.write_line(sentence, yellow=True)
    if _whole(config):
        # once more, shortly, at the end: who reads the log of a machine elsewhere looks there first
        for report in (*terminalreporter.stats.get("failed", ()), *terminalreporter.stats.get("error", ())):
            terminalreporter.section(report.nodeid)
            terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-25:]))
    for nodeid in config.stash[_skipped]:
        terminalreporter.write_line(f"SKIPPED, BUT MUST RUN IN CI: {nodeid}", red=True)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves at once.  Otherwise one whole run in three ended with a segmentation fault, after all tests had
    passed and were reported: a thread that outlived the interpreter (Ray, torch, botocore and the servers of
    the tests all leave some) jumped into freed memory. Commands that the tests start are processes of their
    own: they end as they do for users, and their exit codes are checked.
    """
    if _compiled in config.stash:
        shutil.rmtree(config.stash[_compiled], ignore_errors=True)
    if _status in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_status])
