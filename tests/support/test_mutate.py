"""Breaks the product on purpose, one small change at a time: the tests of its file must notice each.

``NAMED`` is kept by hand.  Its mutants once passed all tests, or were drawn: they break rules that the
simulator does not run, or that unit tests must notice as well.  Each is made in a copy of the tree, never in
the checkout.  The rules that the simulator runs are broken in ``tests/sim``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commands import ROOT

LIMIT_S = 120.0
"""Seconds for the tests of one mutant.  A mutant that takes longer hangs, and counts as noticed."""
COPIED = ("actors", "elastic", "examples", "storage", "tests", "pyproject.toml", "README.md")
"""The files and folders that the tests of a copy of the tree need."""

SETTLING = (
    "            self._wait()\n            self._held_up_s += time.monotonic() - began\n        "
    "self._wait()\n        sent, asks"
)
NAMED: tuple[tuple[str, ...], ...] = (
    (
        "the client does not check the server's proof",
        "elastic/state/wire.py",
        "        if not proven:\n",
        "        if False:\n",
        "tests/state/test_wire.py",
    ),
    (
        "every norm is finite",
        "elastic/train/record.py",
        "torch.isfinite(norm).double()",
        "torch.ones_like(norm)",
        *("tests/train/test_transaction.py", "-k", "finite"),
    ),
    (
        "no look at the fence once the state is there",
        "elastic/protocol/member.py",
        '        self.go_on("healed")\n',
        "",
        *("tests/protocol/test_member.py", "-k", "fence"),
    ),
    (
        "no look at the fence between two slices",
        "elastic/train/loop.py",
        "        self._leave_if_fenced()\n        self.session.faults.strike",
        "        self.session.faults.strike",
        *("tests/train/test_trainer.py", "-k", "between_two_slices"),
    ),
    (
        "every copy of the world before still counts",
        "elastic/protocol/copy_schedule.py",
        "return copy if copy is not None and copy.version <= plan.version else None",
        "return copy",
        "tests/protocol/test_copy_schedule.py",
    ),
    (
        "a save's snapshot copies nothing",
        "elastic/state/snapshot.py",
        "            room.copy_(value)\n            digests",
        "            digests",
        *("tests/state/test_copies.py", "-k", "filled_from_copies or two_versions"),
    ),
    (
        "the update does not wait for the snapshot",
        "elastic/state/snapshot.py",
        SETTLING,
        SETTLING.replace("self._wait()", "pass"),
        *("tests/state/test_copies.py", "-k", "is_not_committed_while or tried_once_more"),
    ),
    (
        "what members held counts after Go",
        "elastic/control/edges.py",
        "    membership.hold(decision, {worker: () for worker in plan.members})\n",
        "",
        "tests/control/test_forming.py",
    ),
    (
        "the lease counts five seconds longer",
        "elastic/protocol/member.py",
        "not settled and now > self.lease_until:",
        "not settled and now > self.lease_until + 5:",
        "tests/protocol/test_member.py",
    ),
    (
        "a tree gives zero",
        "elastic/engine/norm.py",
        "    return values.squeeze(-1)\n",
        "    return values.squeeze(-1) * 0\n",
        *("tests/engine/test_norm.py", "-k", "tree_is_what"),
    ),
    (  # this and the next six were drawn by somebody who moved no test, when much of the suite moved
        "sums in another order than that of the samples",
        "elastic/engine/sync/ordered.py",
        "places = sorted(range(len(owners)), key=owners.__getitem__)",
        "places = sorted(range(len(owners)))",
        "tests/engine/test_ordered.py",
    ),
    (
        "weights that visit the device stay there",
        "elastic/engine/parameters/visits.py",
        "if number or last:",
        "if number and last:",
        "tests/engine/test_visits.py",
    ),
    (
        "a pass without gradients has a part in stage 3",
        "elastic/engine/parameters/split.py",
        "parts = each.runs or each.passes",
        "parts = each.passes",
        "tests/engine/test_unlike_microbatches.py",
    ),
    (
        "what is small is clipped before the commit",
        "elastic/engine/optim/base.py",
        "torch.where(norm > most, most / norm, 1.0)",
        "torch.where(norm < most, most / norm, 1.0)",
        "tests/engine/test_muon.py",
    ),
    (
        "evidence of what was committed is thrown away",
        "elastic/control/stopping.py",
        "\n    commits.all_committed(decision, event.outcomes)\n",
        "\n",
        "tests/control/test_fence.py",
    ),
    (
        "a lease of another generation counts",
        "elastic/protocol/member.py",
        "if granted and generation == self.generation and self.went:",
        "if granted and self.went:",
        "tests/protocol/test_member.py",
    ),
    (
        "dropout depends on the place of a microbatch",
        "elastic/train/step.py",
        "state.seeds.begin(step, 0 if index is None else index)",
        "state.seeds.begin(step, round_)",
        "tests/engine/test_bits.py",
    ),
    (  # these are what was wrong of a world with other axes than those of data
        "seats with equal cells are one seat",
        "elastic/plan/seats.py",
        "where[self.first[number]].append((row, place))",
        "where[number].append((row, place))",
        "tests/plan/test_seats.py",
    ),
    (
        "a gradient goes the way of another data group",
        "elastic/plan/routes.py",
        "self.group = layout.data_group(rank)",
        "self.group = layout.data_group(0)",
        *("tests/engine/test_ordered.py", "-k", "columns or own_nodes"),
    ),
    (
        "copies have the size of the first cell",
        "elastic/train/session.py",
        "slot_sizes(tensors, largest_cells(layout))[0]",
        "slot_sizes(tensors, sorted(largest_cells(layout))[:1])[0]",
        *("tests/state/test_toy_axes.py", "-k", "slot or sized"),
    ),
    (
        "members with other columns are replicas",
        "elastic/control/corruption.py",
        "cell_of(saving.layout, rank), digests",
        'Cell(cell_of(saving.layout, rank).partition("tp")[0]), digests',
        *("tests/state/test_toy_axes.py", "-k", "replicas"),
    ),
)
"""The mutants that once passed all tests, and those that were drawn: name, file, old text, new text, and
pytest's arguments.

Two of them are two places now, and are broken in each.
"""


def broken(name: str, file: str, old: str, new: str) -> str:
    """Returns the source of ``file`` with ``new`` for ``old``, which stands there exactly once.

    Raises :class:`LookupError` otherwise: then think about the mutant again.
    """
    source = (ROOT / file).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise LookupError(f"{name}: {old!r} is {source.count(old)} times in {file}, not once")
    return source.replace(old, new)


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [each[:4] for each in NAMED],
    ids=[each[0].replace(" ", "-") for each in NAMED],
)
def test_a_named_mutant_can_still_be_made(name: str, file: str, old: str, new: str) -> None:
    compile(broken(name, file, old, new), file, "exec")


def test_a_mutant_whose_text_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="is 0 times in"):
        broken("stale", "elastic/engine/norm.py", "return no such text", "")
    with pytest.raises(LookupError, match="times in"):
        broken("ambiguous", "elastic/engine/norm.py", "return ", "")


# ---- the mutants meet the tests


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a copy of what the tests need."""
    folder = tmp_path_factory.mktemp("mutants")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                folder / name,
                ignore=shutil.ignore_patterns("__pycache__", "results", ".*_cache"),
            )
        else:
            shutil.copy(ROOT / name, folder / name)
    yield folder
    shutil.rmtree(folder)


def verdict(tests: Sequence[str], folder: Path) -> str:
    """Runs ``tests`` with the code in ``folder``; returns "" if they passed, or what noticed."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
            *tests,
        ],
        cwd=folder,
        # a mutant's bytecode is not for the next one
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = child.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT_S:g} s"
    finally:
        with suppress(ProcessLookupError):
            # it leads a session of its own: only what these tests started
            os.killpg(child.pid, signal.SIGKILL)
    if child.returncode == 5:
        raise LookupError(f"{' '.join(tests)} chooses no test")
    failed = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if child.returncode == 0 else (failed or told.splitlines()[-1:] or ["it said nothing"])[0]


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(NAMED)), ids=[each[0].replace(" ", "-") for each in NAMED])
def test_a_named_mutant_is_noticed(copy: Path, number: int) -> None:
    """The control: without it, the same tests pass."""
    name, file, old, new, *tests = NAMED[number]
    assert verdict(tests, copy) == ""
    (copy / file).write_text(broken(name, file, old, new), encoding="utf-8")
    try:
        assert verdict(tests, copy).startswith(("FAILED", "no end"))
    finally:
        shutil.copy(ROOT / file, copy / file)
