"""One table of settings and layouts: in every pair of them, worlds have the bits, losses, norms and rates of
one worker.

Errors of an engine lie in single settings and in pairs of them, seldom in three that must meet (Kuhn, Wallace
and Gallo 2004).  So rows are drawn until each pair of values that a job may have is in one of them, greedily
as in AETG (Cohen and others 1997), and each row is trained once: by one worker without what may change
nothing, and by the worlds of the row with it.  All that is promised of a world is asserted of that run.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations, groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.code.imports import load
from elastic.data.cursor import Cursor
from elastic.engine.optim.base import rule_of
from elastic.engine.optim.schedule import learning_rate
from elastic.engine.sync.ordered import OrderedReduction
from elastic.engine.world import World
from elastic.errors import JobError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.protocol.commit_record import Outcome, Validated
from elastic.runs.run import Run
from elastic.state import streaming
from storage.datasets import Coding, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import numbered
from tests.support.ranks import Ranks
from tests.support.segments import Part, Trained, segment, train, train_here
from tests.support.toys import toy_job

STEPS = 2
"""Steps of a row."""
SMALL = 1 << 14
"""Bytes of a group of offloaded state, so that the toy model's comes in many."""
BLOCK = 4 * 32 * 32 + 3 * 32 * 96 + 2 * 32
"""Elements of a block of the toy model."""
OWN, LION = "tests.engine.test_own_optimizer:MOMENTUM", "tests.support.own_optimizers:LION"
HELD_OUT = {"every": 1, "samples": 3, "dataset": "tests.support.toys:Sums", "args": {"samples": 50}}
DOCUMENTS, FILES = "(a dataset)", "(a folder)"
"""Words in whose place a row has a path."""


@dataclass(frozen=True)
class Leg:
    """One world of a row: its layout, its last step, the nodes of its members, and whether it has the free
    settings of the row.
    """

    layout: Layout
    last: int = STEPS
    nodes: str = ""
    free: bool = True


WORLDS: dict[str, tuple[int, tuple[Leg, ...]]] = {
    "2×1": (0, (Leg(Layout(2, 1)),)),
    "1×1, then 1×3": (1, (Leg(Layout(1, 3)),)),
    "2×2 on two nodes": (0, (Leg(Layout(2, 2), nodes="aabb"),)),
    "1×2, then 4×1 on two nodes": (0, (Leg(Layout(1, 2), 1), Leg(Layout(4, 1), nodes="abbb", free=False))),
    "1×1, then 3×1 on two nodes": (1, (Leg(Layout(3, 1), nodes="aba"),)),
    "1×4 on two nodes": (0, (Leg(Layout(1, 4), nodes="abbb"),)),
}
"""The worlds of a row, after the step at which the first one begins: from 0, or from the checkpoint of the
worker alone.
"""

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "optim": {
        "adamw": {},
        "muon": {"optim": {"kind": "muon", "lr": 1e-2, "momentum": 0.95}},
        "own": {"optim": {"kind": OWN, "lr": 1.0, "args": {"momentum": 0.9}}},
        "moments in bf16": {"optim": {"moments": "bf16"}},
        "adam": {"optim": {"decay": "l2"}},
        "sgd": {"optim": {"kind": "sgd"}},
        "adagrad": {"optim": {"kind": "adagrad"}},
        "rmsprop": {"optim": {"kind": "rmsprop", "decay": "l2"}},
        "lion": {"optim": {"kind": LION, "lr": 3e-3, "betas": [0.9, 0.99]}},
    },
    "precision": {
        **{each: {"precision": each} for each in ("fp32", "bf16", "fp16", "fp8", "fp8-rowwise")},
        "fp16, a scale of 100": {"precision": "fp16", "loss_scale": 100.0},
    },
    "recompute": {
        str(each): {"recompute": each} for each in ("none", "block", "sqrt", "selective", "attention", 0.5)
    },
    "activations": {each: {"activations": each} for each in ("keep", "offload", "int8", "fp8")},
    "offload": {
        **{each: {"offload": each} for each in ("none", "optimizer", "weights")},
        "files": {
            "offload": "optimizer",
            "offload_folder": FILES,
            "offload_buffer_gb": streaming.SHARES * SMALL / 1e9,
        },
    },
    "zero": {str(each): {"parallel": {"zero": each}} for each in (2, 1, 3)},
    "buckets": {str(each): {"parallel": {"bucket_elements": each}} for each in ("block", 2 * BLOCK)},
    "model": {
        "llama": {"model_args": {"vocab": 29, "dim": 32, "layers": 4, "heads": 2, "dropout": 0.1}},
        "own": {"model": "tests.support.toys:own", "model_args": {}},
        "batch norm": {"model": "tests.support.toys:batch_normed", "model_args": {}},
        "containers": {"model": "tests.engine.test_containers:Parts", "model_args": {}},
        "gpt2": {"model": "elastic.models.gpt2:build", "model_args": {"vocab": 29, "dim": 32, "length": 47}},
        "no dropout": {"model_args": {"vocab": 29, "dim": 32, "layers": 4, "heads": 2}},
    },
    "data": {
        "masked": {"data": {"dataset": "tests.support.toys:Sums", "args": {"samples": 32}}},
        "by length": {"data": {"dataset": "tests.engine.test_lengths:Skewed", "group_by_length": True}},
        "documents": {"data": {"args": {"path": DOCUMENTS, "seq_len": 16, "documents": True}}},
        "with replacement": {"data": {"dataset": "tests.support.toys:Sums", "sampling": "with_replacement"}},
    },
    "batch": {"even": {}, "grows": {"batch_ramp": {"start": 4, "increment": 2, "samples": 12}}},
    "blocks of the sum": {str(each): {"reduction": {"block": each}} for each in (1, 3)},
    "wire": {each: {"reduction": {"wire": each}} for each in ("fp32", "bf16")},
    "clip": {str(each): {"optim": {"clip_norm": each}} for each in (1.0, 0.1)},
    "layers": {"told": {"watch": {"every": 2}}, "not told": {"watch": {"every": 0}}},
    "validation": {"each step": {"validation": HELD_OUT}, "none": {}},
    "worlds": {each: {} for each in WORLDS},
}
"""The values of each setting.  The first one goes with every value of every other setting."""
SELDOM = {
    *(("optim", each) for each in ("adam", "sgd", "adagrad", "rmsprop", "lion")),
    *(
        ("precision", "fp16, a scale of 100"),
        ("recompute", "attention"),
        ("recompute", "0.5"),
        ("activations", "fp8"),
    ),
    *(("model", "gpt2"), ("model", "no dropout"), ("data", "with replacement")),
    *(("worlds", "1×1, then 3×1 on two nodes"), ("worlds", "1×4 on two nodes")),
}
"""Values that are close to others: each is in a row of the short table, and in all of its pairs in the long
one.
"""
UNFIT = {
    # sizes are no multiples
    **{
        ("model", each): (("precision", "fp8"), ("precision", "fp8-rowwise"))
        for each in ("own", "batch norm")
    },
    # they keep no documents apart
    ("data", "documents"): tuple(("model", each) for each in ("own", "batch norm", "containers")),
    ("precision", "fp8-rowwise"): (("activations", "int8"), ("activations", "fp8")),
}
"""Values that a job may have together, but that are not in a row: those that a model cannot have, and a known
gap.

The gap: with activations in eight bits, scales of rows that are held are compressed, too, while a pass that
casts offloaded weights makes its own.  So the bits of ``fp8-rowwise`` depend on ``offload``.
"""
CHANGES_NOTHING = ("recompute", "activations", "offload", "zero", "buckets", "layers", "validation")
FREE = ("offload", "zero", "buckets", "layers", "validation")
"""Settings on which no bit depends; those that may change where a run goes on."""

Item = tuple[str, str]
"""A setting and one of its values."""
Row = dict[str, str]


# ---- the table


def merged(values: Mapping[str, str]) -> dict[str, Any]:
    """Returns the changes of a job that these values are; sections are joined."""
    found: dict[str, Any] = {"optim": {"lr": 1e-2}}
    for name, value in values.items():
        for key, change in SETTINGS[name][value].items():
            found[key] = {**found.get(key, {}), **change} if isinstance(change, dict) else change
    return found


def job_of(bucket: Path | str, values: Mapping[str, str]) -> Job:
    return toy_job(bucket, global_batch=10, **merged(values))


def usual() -> Row:
    return {name: next(iter(values)) for name, values in SETTINGS.items()}


def pair(one: Item, other: Item) -> tuple[Item, ...]:
    return (one, other) if one < other else (other, one)


@lru_cache(1)
def pairs() -> dict[tuple[Item, ...], None]:
    """Returns all pairs of values that a job may have, in a fixed order."""
    unfit = {pair(one, other) for one, others in UNFIT.items() for other in others}
    found = {}
    for (one, its), (other, theirs) in combinations(SETTINGS.items(), 2):
        for each in (pair((one, value), (other, more)) for value in its for more in theirs):
            try:
                job_of("/nowhere", usual() | dict(each))
            except JobError:
                continue
            if each not in unfit:
                found[each] = None
    return found


def wanted(*, all_pairs: bool) -> list[tuple[Item, ...]]:
    """Returns what the rows of a table must have: pairs, and single values that are seldom."""
    if all_pairs:
        return [*pairs()]
    # after a save, too
    sharded = [pair(("optim", each), ("worlds", "1×1, then 1×3")) for each in SETTINGS["optim"]]
    return [(each,) for each in sorted(SELDOM)] + [
        each for each in pairs() if not SELDOM & {*each} or each in sharded
    ]


def parts_of(row: Row) -> Iterator[tuple[Item, ...]]:
    yield from ((each,) for each in row.items())
    yield from (pair(*each) for each in combinations(row.items(), 2))


@lru_cache
def table(*, all_pairs: bool, seed: int = 0) -> list[Row]:
    """Draws rows until they have all that is wanted: each time the best of several, which begin with
    something that is still missing.
    """
    draw, missing, rows = random.Random(seed), dict.fromkeys(wanted(all_pairs=all_pairs)), list[Row]()
    while missing:
        candidates = [filled(draw, dict(draw.choice([*missing])), missing) for _ in range(25)]
        rows.append(max(candidates, key=lambda row: sum(each in missing for each in parts_of(row))))
        for each in parts_of(rows[-1]):
            missing.pop(each, None)
    return rows


def filled(draw: random.Random, row: Row, missing: Mapping[tuple[Item, ...], None]) -> Row:
    """Adds the settings that are not in a row yet, in any order, each with the value by which the row gets
    most of what is missing.
    """
    for name in draw.sample([*SETTINGS], len(SETTINGS)):
        if name in row:
            continue
        fit = [
            value
            for value in SETTINGS[name]
            if all(pair((name, value), each) in pairs() for each in row.items())
        ]
        others = [*row.items()]

        def gain(value: str, name: str = name, others: Sequence[Item] = others) -> int:
            return (((name, value),) in missing) + sum(
                pair((name, value), each) in missing for each in others
            )

        row[name] = max(draw.sample(fit, len(fit)), key=gain)
    return {each: row[each] for each in SETTINGS}


@pytest.mark.fast
@pytest.mark.parametrize("all_pairs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_pair_is_in_a_row(all_pairs: bool) -> None:
    """All rows are jobs.  The control: a row less, and something is missing."""
    rows, needed = table(all_pairs=all_pairs), {*wanted(all_pairs=all_pairs)}
    for row in rows:
        job_of("/nowhere", row)
        assert all(each in pairs() for each in parts_of(row) if len(each) == 2), row
    assert needed <= {each for row in rows for each in parts_of(row)}
    assert not needed <= {each for row in rows[:-1] for each in parts_of(row)}
    assert {each for row in rows for each in row.items()} == {
        (name, value) for name, values in SETTINGS.items() for value in values
    }


# ---- the runs


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of documents of 0 to 33 words."""
    path, draw, end = tmp_path_factory.mktemp("documents"), torch.Generator().manual_seed(7), 28
    lengths = torch.randint(0, 34, (60,), generator=draw).tolist()
    words = ([*torch.randint(0, end, (length,), generator=draw).tolist(), end] for length in lengths)
    write_dataset(ObjectStore.open(str(path)), numbered(*words), Coding("words", 29, end))
    return path


def in_groups(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains a segment whose offloaded state passes in small groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "GROUP", SMALL)
        return segment(world, job, version, last)


def placed(bucket: Path, row: Row, documents: Path) -> Job:
    """Returns the job of a row, with its paths."""
    job = job_of(bucket, row)
    if job.data.args.get("path") == DOCUMENTS:
        job = job.replace(data=job.data.model_copy(update={"args": job.data.args | {"path": str(documents)}}))
    if job.offload_folder:
        bucket.mkdir(parents=True, exist_ok=True)
        job = job.replace(offload_folder=str(bucket))
    return job


def plain(row: Row) -> Row:
    """Returns a row without what may change nothing.

    With activations in eight bits it matters what is kept, and gradients that are computed in bf16 lose
    nothing on their way.
    """
    rounds = row["activations"] in ("int8", "fp8")
    names = [name for name in CHANGES_NOTHING if not rounds or name not in ("recompute", "activations")]
    return row | {name: usual()[name] for name in (*names, *(["wire"] if row["precision"] == "bf16" else []))}


def told(outcome: Outcome, *, layers: bool, validates: bool) -> tuple[Any, ...]:
    """Returns what every world must tell of a step."""
    validated: Validated | None = outcome.validated if validates else None
    of = (
        outcome.step,
        outcome.squared_norm,
        outcome.losses,
        outcome.counts,
        outcome.samples,
        outcome.finite,
        outcome.rescales,
    )
    return (*of, validated, outcome.layers if layers else ())


def check_members(trained: Trained, job: Job, leg: Leg) -> None:
    """Asserts what members tell of themselves: replicas are alike after each step, each microbatch runs once,
    and rates are those of the formula.
    """
    steps = [each.step for each in trained.outcomes]
    rates = [
        learning_rate(step, steps=12, peak=job.optim.lr, warmup=2, final=0.1, kind="cosine") for step in steps
    ]
    for rank, part in enumerate(trained.parts):
        assert part.outcomes == trained.outcomes and all(each.applies for each in part.outcomes)
        assert [each.layers for each in part.outcomes] == [each.layers for each in trained.outcomes], (
            "they are not compared above"
        )
        assert part.hashes == trained.parts[rank % leg.layout.dp_shard].hashes and len({*part.hashes}) == len(
            part.outcomes
        )
        assert [rate for rate, _ in groupby(part.rates)] == rates, (
            "offloaded state has an update for each group"
        )
    assert leg.layout.dp_shard == 1 or trained.parts[0].hashes != trained.parts[1].hashes
    assert sum(part.microbatches for part in trained.parts) == sum(
        len(each.losses) for each in trained.outcomes
    )


def check(ranks: Ranks, folder: Path, row: Row, documents: Path) -> None:
    """Trains a row, and asserts that its worlds do what one worker does."""
    begins, legs = WORLDS[row["worlds"]]
    alone, job = placed(folder / "alone", plain(row), documents), placed(folder / "worlds", row, documents)
    version, expected = Version(0, 0), list[Outcome]()
    if begins:
        first = train_here(alone, begins)
        shutil.copytree(
            alone.bucket,
            job.bucket,
            ignore=shutil.ignore_patterns("job.json", "export-*"),
            dirs_exist_ok=True,
        )
        version, expected = first.version, first.outcomes
    one = train_here(alone, STEPS, version)
    expected = [*expected, *one.outcomes]
    dataset: Any = load(alone.data.dataset)(**alone.data.args)
    lengths = dataset.lengths if alone.data.group_by_length else None
    cursor = Cursor(len(dataset), alone.batches(), alone.seed, alone.data.sampling, lengths)
    assert [tuple(chain(*each.samples)) for each in expected] == [
        cursor.ids(step) for step in range(1, STEPS + 1)
    ]
    assert [sum(map(len, each.samples)) for each in expected] == (
        [4, 6] if row["batch"] == "grows" else [10] * STEPS
    )
    for leg in legs:
        own = row if leg.free else row | {name: usual()[name] for name in FREE}
        found = train(
            ranks,
            placed(folder / "worlds", own, documents),
            leg.layout,
            leg.last,
            version,
            leg.nodes,
            in_groups,
        )
        check_members(found, job, leg)
        tells: Any = {"layers": own["layers"] == "told", "validates": own["validation"] != "none"}
        assert [told(each, **tells) for each in found.outcomes] == [
            told(each, **tells) for each in expected[version.step : leg.last]
        ]
        assert tells["validates"] or not any(each.validated for each in found.outcomes)
        assert tells["layers"] or not any(each.layers for each in found.outcomes)
        version = found.version
    assert found.hash == one.hash
    rule = rule_of(job)
    moments = {f"moment.{each}" for each in (*rule.moments, *(rule.matrix_moments or ()))}
    stored = {
        tensor.kind
        for tensor in Run.open(placed(folder / "worlds", own, documents)).checkpoints.open(version).tensors()
    }
    buffers = {"own": {"constant"}, "batch norm": {"constant", "buffer"}}.get(row["model"], set())
    assert stored == {"parameter", "scalar", *moments, *buffers}


def name_of(row: Row) -> str:
    """Returns the values of a row that are not usual."""
    short, own = (
        ("optim", "precision", "worlds"),
        (each for each in row.items() if each[1] != usual()[each[0]]),
    )
    return ", ".join(value if name in short else f"{name} {value}" for name, value in own)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws the rows when tests are collected, and not in each process that imports this file."""
    if "row" in metafunc.fixturenames:
        metafunc.parametrize("row", table(all_pairs=False), ids=name_of)


def test_worlds_do_what_one_worker_does(ranks: Ranks, tmp_path: Path, documents: Path, row: Row) -> None:
    """Promises 1 and 4, to the bit: state, losses, norms, counts, samples, and what is told of layers and of
    held-out samples.

    The settings and what they are of: optimizers and their states through a reshape (A3, A4, L13), rates that
    go on (A5), sampling (A2), dropout (A8), norms with statistics (A9, U6), a batch that grows (A10), layers
    (A13), replicas (B1, B2), lengths (B15), stages of ZeRO (C2, C3, C4), buckets (C7), formats (E3, E5, E6),
    recomputation (F1, F2), state and weights in host memory and in files (F3, F4), activations (F6),
    validation (L1), models without a table (U1), blocks of a sum on nodes (N7).
    """
    check(ranks, tmp_path, row, documents)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_worlds_do_what_one_worker_does_in_all_pairs(
    ranks: Ranks, tmp_path: Path, documents: Path, seed: int
) -> None:
    """All pairs of all values occur here, in tables that are drawn twice."""
    for number, row in enumerate(table(all_pairs=True, seed=seed)):
        try:
            check(ranks, tmp_path / str(number), row, documents)
        except AssertionError as error:
            raise AssertionError(f"row {number} of seed {seed}: {name_of(row)}") from error
        shutil.rmtree(tmp_path / str(number))


# ---- the controls


def test_each_value_that_should_change_the_bits_does(tmp_path: Path, documents: Path) -> None:
    """Negative control: what the hash of one worker must see, one at a time.  No two of them give the same
    bits.
    """
    changing = ("optim", "precision", "model", "data", "batch", "blocks of the sum", "wire", "clip")
    rows = [{name: value} for name in changing for value in SETTINGS[name] if value != usual()[name]]
    rows += [{"activations": "int8"}, {"activations": "fp8"}, {}]
    rows.remove({"precision": "fp16, a scale of 100"})
    jobs = [
        placed(tmp_path / str(number), plain(usual() | row), documents) for number, row in enumerate(rows)
    ]
    jobs = [
        job.replace(model_args=job.model_args | {"layers": 1}) if "layers" in job.model_args else job
        for job in jobs
    ]
    one: Any = jobs[-1].data.args
    more: list[dict[str, Any]] = [
        {"seed": 1},
        {"global_batch": 8},
        {"data": {"dataset": "tests.support.toys:Sums", "args": one | {"masked": False}}},
        {"data": {"dataset": "tests.engine.test_lengths:Skewed"}},
        {"data": {"args": {"path": str(documents), "seq_len": 16}}},
    ]
    jobs += [
        jobs[-1].replace(bucket=str(tmp_path / f"more {number}"), **changes)
        for number, changes in enumerate(more)
    ]
    hashes = [train_here(job, 1).hash for job in jobs]
    assert len({*hashes}) == len(hashes)
    assert (
        train_here(jobs[len(rows) - 1].replace(bucket=str(tmp_path / "again")), 1).hash
        == hashes[len(rows) - 1]
    )


def drifting(world: World, job: Job, version: Version, last: int) -> Part:
    """Trains a segment in which one member rounds its gradients to bf16 before they are summed."""
    genuine = OrderedReduction.reduce

    def reduce(self: OrderedReduction, grads: Tensor) -> Tensor | None:
        return genuine(self, grads.bfloat16().to(grads.dtype) if world.rank == 1 else grads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OrderedReduction, "reduce", reduce)
        return segment(world, job, version, last)


def test_gradients_of_one_member_that_drift_show(ranks: Ranks, tmp_path: Path, documents: Path) -> None:
    """E6: negative control of the worlds: the first losses are equal, and the norm and all that follows is
    not.
    """
    right, wrong = (placed(tmp_path / name, usual(), documents) for name in ("right", "wrong"))
    one, found = train_here(right, 2), train(ranks, wrong, Layout(2, 1), 2, how=drifting)
    assert (
        found.outcomes[0].losses == one.outcomes[0].losses
        and found.outcomes[0].squared_norm != one.outcomes[0].squared_norm
    )
    assert found.outcomes[1].losses != one.outcomes[1].losses and found.hash != one.hash
