"""Breaks the product on purpose, one small change at a time, and says which changes no test notices.

    python -m tests.support.mutate --named                      the mutants that once passed all tests
    python -m tests.support.mutate --seed 17 --count 30         drawn ones

Each mutant is made in a copy of the tree, never in the checkout, and meets the tests that cover its file (``COVER``).  These are a small
part of all tests, so a survivor is a question and no proof.  It is killed by a test, or excused in ``EXCUSED`` in one sentence.  The same
seed draws the same mutants from the same source.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

from tests.support.commands import ROOT

LIMIT_S = 300.0
"""Seconds for the tests of one mutant.  A mutant that takes longer hangs, and counts as noticed."""
COPIED = ("actors", "elastic", "examples", "storage", "tests", "pyproject.toml", "README.md")
"""The files and folders that the tests of a copy of the tree need."""

COVER: dict[str, tuple[str, ...]] = {
    "actors/coordinator.py": ("tests/actors/test_dismissed.py", "tests/test_threads.py", "tests/actors/test_stop.py"),
    "actors/journal_replicas.py": ("tests/actors/test_journal_replicas.py",),
    "actors/keeper.py": ("tests/actors/test_dismissed.py", "tests/actors/test_relay.py", "tests/actors/test_recovery.py"),
    "actors/logs.py": ("tests/actors/test_logs.py",),
    "actors/perform.py": ("tests/actors/test_perform.py", "tests/actors/test_recovery.py", "-k", "test_perform or all_workers_die"),
    "actors/processes.py": ("tests/actors/test_processes.py", "tests/test_log_folder.py"),
    "actors/relay.py": ("tests/actors/test_relay.py",),
    "actors/signals.py": ("tests/actors/test_signals.py",),
    "actors/worker.py": ("tests/actors/test_dismissed.py", "tests/actors/test_recovery.py"),
    "elastic/state/digest.py": ("tests/state/test_copies.py", "-k", "digests or bent"),
    "elastic/state/heal.py": ("tests/state/test_heal.py",),
    "elastic/state/hosts.py": ("tests/state/test_copies.py", "tests/state/test_heal.py"),
    "elastic/state/keeper_store.py": ("tests/state/test_buddies.py", "tests/state/test_copies.py", "tests/state/test_node_memory.py"),
    "elastic/state/node_memory.py": ("tests/state/test_node_memory.py",),
    "elastic/state/region.py": ("tests/state/test_region.py", "tests/state/test_saves_end.py", "tests/state/test_node_memory.py"),
    "elastic/state/shard.py": ("tests/state/test_heal.py",),
    "elastic/state/snapshot.py": (
        *("tests/state/test_copies.py", "tests/state/test_saves_end.py", "tests/state/test_node_memory.py"),
        "tests/state/test_buddies.py",
    ),
    "elastic/state/staging.py": ("tests/state/test_copies.py",),
    "elastic/state/uploader.py": ("tests/state/test_uploads.py",),
    "elastic/state/uploads.py": ("tests/state/test_uploads.py",),
    "elastic/state/wire.py": ("tests/state/test_wire.py",),
    "elastic/train/apply_fence.py": ("tests/train/test_apply_fence.py",),
    "elastic/train/blame.py": ("tests/train/test_blame.py",),
    "elastic/train/demands.py": ("tests/train/test_preflight.py",),
    "elastic/train/faults.py": ("tests/train/test_faults.py",),
    "elastic/train/local.py": (
        *("tests/golden/test_golden.py", "tests/train/test_preflight.py"),
        *("-k", "golden_ones or kept_run or was_moved"),
    ),
    "elastic/train/loop.py": ("tests/train/test_trainer.py",),
    "elastic/train/machine/interface.py": ("tests/train/test_interface.py",),
    "elastic/train/machine/limits.py": ("tests/train/test_limits.py",),
    "elastic/train/model.py": ("tests/train/test_model_args.py", "tests/state/test_heal.py"),
    "elastic/train/orders.py": ("tests/train/test_orders.py", "tests/train/test_trainer.py"),
    "elastic/train/preflight.py": ("tests/train/test_preflight.py",),
    "elastic/train/step.py": ("tests/train/test_transaction.py", "tests/engine/test_loss.py"),
    "storage/background.py": ("tests/storage/test_background.py",),
    "storage/checkpoints/": (
        *("tests/storage/test_checkpoints.py", "tests/storage/test_index.py", "tests/storage/test_cover.py"),
        "tests/storage/test_damage.py",
    ),
    "storage/datasets/": ("tests/data/test_datasets.py", "tests/data/test_prepare.py", "tests/data/test_loader.py"),
    "storage/documents.py": ("tests/storage/test_journal.py", "tests/storage/test_checkpoints.py"),
    "storage/journal/": (
        *("tests/storage/test_journal.py", "tests/storage/test_claims.py", "tests/storage/test_replicas.py"),
        "tests/storage/test_long_journal.py",
    ),
    "storage/objects/folder.py": ("tests/storage/test_objects.py",),
    "storage/objects/fsspec.py": ("tests/storage/test_backends.py", "tests/storage/test_remote.py"),
    "storage/objects/memory.py": ("tests/storage/test_objects.py",),
    "storage/objects/remote.py": ("tests/storage/test_remote.py",),
    "storage/objects/selftest.py": ("tests/storage/test_selftest.py",),
    "storage/objects/urls.py": ("tests/storage/test_urls.py",),
}
"""Maps a file, or a folder, to the arguments of pytest that choose its tests.

Left out are files whose tests all need clusters, a GPU or an S3 server: the coordinator, keeper, worker and cluster in ``actors``, pinned
memory in ``elastic/state/pins.py``, ``storage/objects/s3.py``.
"""
NEEDS_A_GPU = ("_Pinned",)
"""Classes in covered files that only an accelerator runs."""

EXCUSED: dict[str, str] = {
    "elastic/train/machine/interface.py, faster_than: `0` → `1` in "
    '`return f"{best} runs at {speeds[best]} Mb/s, {name} at {mine}" if mine > 0 and speeds[best] >= 5 * mine else ""`': (
        "No interface runs at 1 Mb/s; one of unknown speed has less than 1."
    ),
    "storage/datasets/datasets.py, _Index._flush: `True` → `False` in "
    "`columns = [pa.array(column, kind) for column, kind in zip(zip(*self._rows, strict=True), INDEX.types, strict=True)]`": (
        "Every row is made with as many columns as the schema has; the check is for who changes it."
    ),
    "elastic/state/node_memory.py, copies_here: `0` → `1` in "
    "`coming = sum(max(wanted - written, 0) for wanted, written in sizes.values())`": "One byte for each region changes no decision.",
    "elastic/train/demands.py, initialising: `takes_s < TELLING_S` → `takes_s <= TELLING_S` in `if takes_s < TELLING_S:`": (
        "No estimate hits the limit to the last bit."
    ),
    "elastic/state/heal.py, _messages: `part.nbytes > MESSAGE` → `part.nbytes >= MESSAGE` in "
    "`rows = part.split(max(1, MESSAGE * len(part) // part.nbytes)) if part.nbytes > MESSAGE and part.shape else (part,)`": (
        "What is just as large as a message is split into itself."
    ),
    "elastic/state/uploads.py, Uploads.__init__: `True` → `False` in "
    '`threading.Thread(target=self._run, name="uploads", daemon=True).start()`': "A keeper ends by os._exit or by Ray's kill.",
    "elastic/train/loop.py, Trainer._end_world: `self._slow.daemon = True` → `pass`": (
        "A worker ends by os._exit, which waits for no thread."
    ),
    "actors/perform.py, Group._keeper_lost: `0` → `1` in "
    "`_later(0, partial(self._kill_keeper, keeper))  # otherwise the node could get no other keeper`": (
        "The node gets its next keeper a second later."
    ),
    "actors/relay.py, Orders.lost: `each.at >= since` → `each.at > since` in `if each.at >= since:`": (
        "No order is as old as that to the last bit."
    ),
    'elastic/state/region.py, Region.create: `1` → `2` in `words[HEADER.index(f"{name}_step")] = -1`': (
        "Any negative step stands for no copy."
    ),
    "elastic/state/staging.py, _Stage.__init__: "
    "`self.memory, self.gone = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event()` → `pass`": (
        "Only a GPU has stages; tests/gpu/test_copies.py fills them."
    ),
}
"""Maps the name of a surviving mutant to the sentence that excuses it."""


@dataclass(frozen=True)
class Mutant:
    """A mutant replaces ``old``, which stands in ``file`` at byte ``at``, by ``new``.  ``tests`` are pytest's arguments."""

    name: str
    file: str
    at: int
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: bytes) -> bytes:
        """Returns the source of the mutant.  Raises :class:`LookupError` if ``old`` is not where it was."""
        old = self.old.encode()
        if source[self.at : self.at + len(old)] != old:
            raise LookupError(f"{self.name}: {self.old!r} is not at byte {self.at} of {self.file}")
        return source[: self.at] + self.new.encode() + source[self.at + len(old) :]


# ---- the mutants with a name


def patch(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """Returns a mutant whose ``old`` stands in ``file`` exactly once.  Raises :class:`LookupError` otherwise: then think about it again."""
    source = (ROOT / file).read_bytes()
    if source.count(old.encode()) != 1:
        raise LookupError(f"{name}: {old!r} is {source.count(old.encode())} times in {file}, not once")
    return Mutant(name, file, source.index(old.encode()), old, new, tests)


SETTLING = "            self._wait()\n            self._held_up_s += time.monotonic() - began\n        self._wait()\n        sent, asks"
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
        "elastic/train/step.py",
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
        "    membership.hold(decision, {worker: () for worker in plan.members})\n    if isinstance(decision.run.state, Forming) and",
        "    if isinstance(decision.run.state, Forming) and",
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
)
"""The mutants that passed all tests on 2026-11-23: name, file, old text, new text, and pytest's arguments.

Two of them are two places now, and are broken in each.
"""


def named() -> list[Mutant]:
    """Returns the mutants of ``NAMED``."""
    return [patch(name, file, old, new, *tests) for name, file, old, new, *tests in NAMED]


# ---- drawn mutants

OPPOSITE: dict[type[ast.cmpop], str] = {
    **{ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
}
SPOKEN = frozenset({"print", "say", "_say", "warn"})
"""Calls that only tell a human something; whether they are there is a matter of taste, not of right and wrong."""


def covered() -> list[str]:
    """Returns the files of which there are tests in ``COVER``.  Raises :class:`LookupError` for a row without a file."""
    found = []
    for name in COVER:
        files = sorted((ROOT / name).rglob("*.py")) if name.endswith("/") else [ROOT / name]
        if not files or not all(file.exists() for file in files):
            raise LookupError(f"COVER names {name}, which is not there")
        found += [str(file.relative_to(ROOT)) for file in files if file.stat().st_size]
    return found


def tests_of(file: str) -> tuple[str, ...]:
    """Returns pytest's arguments for the tests that cover ``file``."""
    return next(tests for name, tests in COVER.items() if file.startswith(name))


def every() -> list[Mutant]:
    """Returns all mutants of the covered files; Python may refuse a few."""
    return [mutant for file in covered() for mutant in mutants(file, (ROOT / file).read_bytes())]


def draw(seed: int, count: int) -> list[Mutant]:
    """Returns ``count`` mutants that Python can compile: each statement and expression that can be broken is equally likely."""
    everything = every()
    random.Random(seed).shuffle(everything)
    return list(islice((mutant for mutant in everything if _compiles(mutant.applied((ROOT / mutant.file).read_bytes()))), count))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "<mutant>", "exec")
    except SyntaxError:
        return False
    return True


def mutants(file: str, source: bytes) -> Iterator[Mutant]:
    """Yields all mutants of one file, in a fixed order; Python may refuse a few."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    for node, where in _places(ast.parse(source)):
        if where.split(".")[0] in NEEDS_A_GPU:
            continue
        for new in _broken(node, source, span):
            first, last = span(node)
            old = source[first:last].decode()
            line = source[starts[node.lineno - 1] : starts[node.lineno]].decode().strip()
            name = f"{file}, {where}: {_short(old)} → {_short(new)}" + (f" in `{line}`" if line != old else "")
            yield Mutant(name, file, first, old, new, tests_of(file))


def _places(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yields the statements and expressions inside functions, with the function's name; no docstring, annotation or decorator."""

    def below(node: ast.AST, where: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    yield from below(child, f"{where}.{child.name}".strip("."))
                elif isinstance(child, ast.AST):
                    text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                    if not text and isinstance(child, ast.stmt | ast.expr) and where and not isinstance(node, ast.JoinedStr):
                        yield child, where
                    if not text and not isinstance(node, ast.JoinedStr):
                        yield from below(child, where)

    yield from below(tree, "")


def _broken(node: ast.stmt | ast.expr, source: bytes, span: object) -> Iterator[str]:
    """Yields the texts that may take the place of ``node``."""
    assert callable(span)

    def text(part: ast.stmt | ast.expr) -> str:
        first, last = span(part)
        return source[first:last].decode()

    match node:
        case ast.Compare(left, [operator], [right]):
            yield f"{text(left)} {OPPOSITE[type(operator)]} {text(right)}"
            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                yield f"{text(left)} {dict(Lt='<=', LtE='<', Gt='>=', GtE='>')[type(operator).__name__]} {text(right)}"
        case ast.BoolOp(operator, [first, *others]):
            yield (" or " if isinstance(operator, ast.And) else " and ").join(map(text, (first, *others)))
        case ast.UnaryOp(ast.Not(), operand):
            yield text(operand)
        case ast.BinOp(left, ast.Add() | ast.Sub() as operator, right):
            yield f"{text(left)} {'-' if isinstance(operator, ast.Add) else '+'} {text(right)}"
        case ast.Constant(bool(value)):
            yield str(not value)
        case ast.Constant(int(value)):
            yield str(value + 1)
        case ast.Constant(float(value)):
            yield repr(value * 2 + 1)
        case ast.If(test, _, []) | ast.While(test):
            first, last = span(node)
            begin, end = span(test)
            yield source[first:begin].decode() + f"not ({text(test)})" + source[end:last].decode()
        case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
            yield "return None"
        case ast.Expr(ast.Call(function)) if (getattr(function, "attr", None) or getattr(function, "id", "")) not in SPOKEN:
            yield "pass"
        case ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield "pass"
        case ast.Call(ast.Name("min" | "max" as name)):
            first, last = span(node)
            yield ("max" if name == "min" else "min") + source[first + 3 : last].decode()


def _short(text: str) -> str:
    return f"`{' '.join(text.split())[:100]}`"


# ---- how they meet the tests


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """Gives a copy of what the tests need, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results", ".*_cache"))
            else:
                shutil.copy(ROOT / name, copy / name)
        yield copy


def environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a process that imports the code in ``folder``, and leaves no bytecode of a mutant to the next one."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def verdict(tests: Sequence[str], folder: Path, limit_s: float = LIMIT_S) -> str:
    """Runs ``tests`` in ``folder``; returns "" if they passed, or what noticed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    child = subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        told, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # it leads a session of its own: only what these tests started
    if child.returncode == 0:
        return ""
    if child.returncode == 5:
        raise LookupError(f"{' '.join(tests)} chooses no test")
    failed = [line for line in told.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or told.splitlines()[-1:] or ["it said nothing"])[0]


def survivors(chosen: Sequence[Mutant], limit_s: float = LIMIT_S) -> list[Mutant]:
    """Runs each mutant's tests, and returns the mutants that none noticed and ``EXCUSED`` does not name.

    Raises :class:`AssertionError` if the tests fail without any mutant, because then they notice nothing.
    """
    left, sound = [], set[tuple[str, ...]]()
    with copy_of_the_tree() as copy:
        for mutant in chosen:
            if mutant.tests not in sound:
                assert not (why := verdict(mutant.tests, copy, 4 * limit_s)), f"without a mutant, {' '.join(mutant.tests)} fails: {why}"
                sound.add(mutant.tests)
            file = copy / mutant.file
            source = file.read_bytes()
            file.write_bytes(mutant.applied(source))
            why = verdict(mutant.tests, copy, limit_s)
            file.write_bytes(source)
            excuse = EXCUSED.get(mutant.name, "")
            print(f"{'noticed ' if why else 'excused ' if excuse else 'SURVIVES'}  {mutant.name}\n          {why or excuse}", flush=True)
            if not why and not excuse:
                left.append(mutant)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--named", action="store_true", help="the mutants with a name")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--count", type=int, default=0, help="number of mutants that are drawn")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants that are tested at once, each in a copy of its own")
    known = parser.parse_args()
    chosen = sorted([*(named() if known.named else ()), *draw(known.seed, known.count)], key=lambda mutant: mutant.tests)
    shares = [chosen[at * len(chosen) // known.jobs : (at + 1) * len(chosen) // known.jobs] for at in range(known.jobs)]
    with ThreadPoolExecutor(known.jobs) as pool:
        left = [mutant for found in pool.map(survivors, shares, repeat(known.limit)) for mutant in found]
    print(f"{len(left)} of {len(chosen)} mutants survive")
    raise SystemExit(bool(left))


if __name__ == "__main__":
    main()
