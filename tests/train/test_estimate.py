"""The command `elastic estimate` tells what the classes of a member's memory take, as the tensors themselves
do.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cli import main
from elastic.engine import recomputation as memory
from elastic.engine.loss import next_token
from elastic.engine.peak import peak_bytes
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build
from elastic.plan.layout import Layout
from elastic.plan.memory_need import Transient
from elastic.train.checks.estimate import (
    by_recompute,
    by_stage,
    classes,
    gigabytes,
    least_of,
    needs,
    of_job,
    tensors_of_job,
    unnamed_policy,
)
from elastic.train.checks.preflight import preflight
from elastic.train.machine.device import need_of
from elastic.train.model import build_model, builder_of
from elastic.train.session import opened
from tests.support.job_file import to_toml
from tests.support.peaks import each_once
from tests.support.ranks import Ranks
from tests.support.segments import member
from tests.support.toys import toy_job

MODEL = {"vocab": 64, "dim": 64, "layers": 2, "heads": 2}
DEEP = {"vocab": 29, "dim": 64, "layers": 3, "heads": 2}
OPTIM = {"lr": 1e-2}
JOBS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "moments": {"precision": "bf16", "optim": {**OPTIM, "moments": "bf16"}},
    "momentum": {"optim": {**OPTIM, "kind": "sgd", "momentum": 0.9}},
    "deferred": {"precision": "bf16", "reproducible": False, "parallel": {"zero": 1}},
    "whole": {"precision": "bf16", "parallel": {"zero": 2}},
}


@pytest.fixture(scope="module", autouse=True)
def each_peak_once() -> Iterator[None]:
    with each_once():
        yield


def held(world: World, job: Job) -> tuple[dict[str, int], dict[str, set[torch.dtype]]]:
    """Returns the bytes of the live storages of each class, and the dtypes of weights and moments."""
    with member(world, job, Version(0, 0)) as me:
        me.step()
        dtypes: dict[str, set[torch.dtype]] = {}
        for (kind, _), value in me.state.shard.values.items():
            dtypes.setdefault(kind.partition(".")[0], set()).add(value.dtype)
        return dict(me.session.meter.held), dtypes


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("layout", [Layout(1, 1), Layout(1, 2), Layout(2, 1)], ids=str)
def test_c1_the_estimate_is_what_the_storages_take(
    ranks: Ranks, tmp_path: Path, layout: Layout, name: str
) -> None:
    """C1: every class within 2 %.  The control: with other moments it is not so.

    Deferred sums are whole while they are added, and have been shared when the storages are looked at.  The two
    sums of embedding and head, a weight of both ends, are one by then.
    """
    job = toy_job(tmp_path, model_args=MODEL, **JOBS[name])
    expected = classes(job, tensors_of_job(job), layout.dp_shard)
    both_ends = 4 * MODEL["vocab"] * MODEL["dim"]
    expected["gradients"] -= both_ends if name == "deferred" else both_ends // layout.dp_shard
    if name == "deferred":
        expected["gradients"] //= layout.dp_shard
    other = toy_job(
        tmp_path, model_args=MODEL, **JOBS["fp32" if name in ("moments", "momentum") else "moments"]
    )
    wrong = classes(other, tensors_of_job(other), layout.dp_shard)
    for found, dtypes in ranks.run(layout, held, job):
        assert found == pytest.approx(expected, rel=0.02)
        assert found["moments"] != pytest.approx(wrong["moments"], rel=0.02)
        assert dtypes["parameter"] == {torch.float32}
        assert dtypes["moment"] == {torch.bfloat16 if name == "moments" else torch.float32}


def test_c1_seven_billion_parameters_take_112_gb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--params", "7e9"]) == 0
    said = capsys.readouterr().out
    assert "112.0 GB" in said
    assert (
        "14.0 GB of bf16 weights, 14.0 GB of bf16 gradients, 84.0 GB of float32 weights and moments" in said
    )
    assert "28.0 GB of float32 weights, 28.0 GB of float32 gradients, 56.0 GB of float32 moments" in said


def test_each_stage_shares_what_it_names(tmp_path: Path) -> None:
    """Stage 0 shares nothing, 1 the state, 2 the sums, too, and 3 the weights that compute.

    An old part beside the new one, while a world forms, may take more.
    """
    job = toy_job(tmp_path, model_args={**MODEL, "tied": False}, precision="bf16", reproducible=False)
    count = sum(
        tensor.shape[0] * (tensor.shape[1] if len(tensor.shape) > 1 else 1)
        for tensor in tensors_of_job(job)
        if tensor.kind == "parameter"
    )
    # of the updates that left a parameter alone
    counts = sum(4 for tensor in tensors_of_job(job) if tensor.kind == "parameter")
    for shards, sizes in by_stage(job, tensors_of_job(job), 4):
        held = [
            18 * count,
            (12 / shards + 4 + 2) * count,
            (16 / shards + 2) * count,
            16 / shards * count + (2 * count if shards == 1 else 0),
        ]
        form = (
            [0, (24 / shards + 2) * count, (24 / shards + 2) * count, 24 / shards * count]
            if shards > 1
            else [0] * 4
        )
        assert sizes == pytest.approx([max(pair) for pair in zip(held, form, strict=True)], abs=8 + counts)


def job_file(folder: Path, text: str = "") -> Path:
    file = folder / "job.toml"
    file.write_text(f'name = "big"\nbucket = "{folder}/bucket"\nprecision = "bf16"\n{text}')
    return file


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["estimate", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
def test_an_axis_that_does_not_compute_yet_is_refused_as_by_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    sentences = []
    for command in ("estimate", "train"):
        assert main([command, str(job_file(tmp_path)), f"--parallel.{axis}", "2"]) == 1
        sentences.append(capsys.readouterr().out)
    assert sentences[0] == sentences[1] and f"parallel.{axis} = 2" in sentences[0]


def test_a_job_file_is_told_without_its_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(
        job_file(
            tmp_path,
            'model_args = {preset = "llama3-8b"}\n[workers]\nmax = 8\n[data.args]\npath = "none"\n',
        )
    )
    line = said(capsys, file)
    assert "8,030,261,248 parameters; the state takes 96.4 GB" in line and "--workers.device-gb 80" in line
    assert (
        "if each worker has the whole state, it holds 32.1 GB of weights" in line
        and "the memory that a microbatch takes is not known: data." in line
    )
    assert "if 4 of 8 workers share the state" in said(capsys, file, "--workers.device-gb", "80")
    # beside 24.1 GB of an older world's state, and 24.1 of the new one's, 16.1
    for device_gb, whole in (("80", True), ("60", False)):
        line = said(capsys, file, "--precision", "bf16", "--workers.device-gb", device_gb)
        assert "if 4 of 8 workers share the state" in line
        assert ("zero = 2: a device has room" in line) is whole and (
            "16.1 GB of computing copies" in line
        ) is whole
    line = said(capsys, file, "--workers.device-gb", "8")
    assert "it does not fit: 8 workers with 8.0 GB each are too few" in line and "zero = 3" in line


@pytest.mark.parametrize(
    ("folder", "where"), [("/disk", "files of /disk"), ("", "host memory")], ids=["files", "memory"]
)
def test_state_that_is_offloaded_is_told_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, where: str
) -> None:
    """Weights, moments and copies are named with their place; none of them counts as the device's."""
    settings = {
        "offload": "optimizer",
        "offload_folder": folder,
        "parallel": {"zero": 2},
        "workers": {"max": 1},
    }
    file = tmp_path / "job.toml"
    args = {**MODEL, "tied": False}
    file.write_text(to_toml(toy_job(tmp_path, model_args=args, precision="bf16", **settings)))
    line = said(capsys, str(file))
    assert (
        f"of weights in {where}, " in line
        and f"of moments in {where}, " in line
        and f"state in {where} and saves take " in line
    )
    assert ("host memory" in line) == (not folder)
    count = int(line.partition(" parameters")[0].rpartition(" ")[2].replace(",", ""))
    assert f"; {gigabytes((2 + 4) * count)} on its device" in line, "weights to compute with, and gradients"


def test_a_job_file_is_told_with_what_auto_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All samples of a data set are a step of many microbatches, whose sums stay."""
    model = "{vocab = 29, dim = 64, layers = 3, heads = 2}"
    data = '[data]\ndataset = "tests.support.toys:Sums"\n[workers]\nmax = 8\n'
    file = str(job_file(tmp_path, f'global_batch = "all"\nmicrobatch = 24\nmodel_args = {model}\n{data}'))
    for device_gb, policy in (("0.00385", "block"), ("0.0051", "selective"), ("0.0070", "none")):
        line = said(capsys, file, "--workers.device-gb", device_gb)
        assert (
            f"recompute = '{policy}': 2 or more workers" in line
            and "if 2 of 8 workers share the state" in line
        )
        assert "workers that must share the state" in line
    line = said(capsys, file)
    assert (
        "more while a microbatch is computed" in line
        and "name this memory, say --workers.device-gb 80" in line
    )
    assert "workers that must share the state" not in line and "not known" not in line, (
        "what nobody knows has no column"
    )


def test_what_a_microbatch_takes_is_told_for_what_auto_tries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the memory of devices is known, so is the number of workers that must share the state: fewer, if
    more is computed again.
    """
    job = toy_job(
        tmp_path, model_args=DEEP, microbatch=16, global_batch=32, workers={"max": 8, "device_gb": 0.006}
    )
    found = by_recompute(job)
    assert [*found] == ["none", "selective", "block"]
    sizes, least = (
        [need.transient.alone for need in found.values()],
        [least_of(job, need) for need in found.values()],
    )
    assert sizes[0] > 1.2 * sizes[1] > 1.2**2 * sizes[2]
    assert least[0] > least[2] >= 1
    batch = opened(job).read(tuple(range(16)))
    model_of = build(**DEEP)
    model_of.init_weights()
    saved: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    own = {parameter.untyped_storage().data_ptr() for parameter in model_of.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        next_token(model_of, batch)
    counted = sum(size for place, size in saved.items() if place not in own)
    assert sizes[0] == pytest.approx(counted, rel=0.1), "torch's own count of what a forward pass saves"


def test_stage_3_needs_memory_for_what_it_gathers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It gathers embedding and head, and two blocks, so more comes and goes than in stage 1, which keeps all
    weights to compute with.
    """
    job = toy_job(
        tmp_path,
        model_args=MODEL,
        precision="bf16",
        reproducible=False,
        workers={"min": 2, "max": 8},
        recompute="block",
    )
    (third,), (first,) = (needs(job.in_stage(zero), ["block"]).values() for zero in (3, 1))
    rest = sum(
        each.numel() for name, each in build(**MODEL).named_parameters() if not name.startswith("layers.")
    )
    assert (
        third.transient.shared - first.transient.shared >= 2 * rest
        and third.gathered == 0 < first.gathered == first.computing
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    part = said(capsys, str(tmp_path / "job.toml"), "--workers.device-gb", "1", "--recompute", "0.5")
    assert "recompute = 0.5: " in part, "as it is written in a job"


def test_with_more_members_the_sums_shrink_and_activations_do_not(tmp_path: Path) -> None:
    """A block of two microbatches has two sums of all gradients, which may be larger than activations, and of
    which a member has its part.

    The control is what was counted before: what comes and goes beside half of the sums is too little for an
    eighth of the state.
    """
    job = toy_job(
        tmp_path,
        model_args=MODEL,
        workers={"min": 2, "max": 8},
        recompute="block",
        reduction={"block": 2},
        global_batch=96,
    )
    job, batch = job.in_stage(3), opened(job).read(tuple(range(job.microbatch_size)))

    def peak(shards: int) -> int:
        return peak_bytes(
            partial(build_model, job, builder_of(job)), job, next_token, batch, torch.device("cpu"), shards
        )

    (need,) = needs(job, ["block"]).values()
    taken = {shards: need.held(shards) - need.summed(shards) + peak(shards) for shards in (2, 4, 8)}
    assert need.of_a_member(8) == taken[8] and all(
        need.of_a_member(shards) >= size for shards, size in taken.items()
    )
    halves = replace(need, transient=Transient(0, peak(2) - need.summed(2)))
    assert halves.of_a_member(8) < 0.95 * taken[8]


def test_a_weight_of_both_ends_has_two_sums(tmp_path: Path) -> None:
    """Embedding and head are one weight, larger than all blocks.  As much comes and goes beside the sums for any
    number of members.  The control: beside one sum of each weight it would not be so.
    """
    args = {**MODEL, "vocab": 4096}
    job = toy_job(tmp_path, model_args=args, workers={"max": 8}, recompute="block").in_stage(2)
    batch = {name: each[:1, :9] for name, each in opened(job).read((0,)).items()}
    builder, cpu = partial(build_model, job, builder_of(job)), torch.device("cpu")
    need, one_sum = (need_of(job.replace(numerics=each), tensors_of_job(job)) for each in (6, 5))
    assert need.gradients - one_sum.gradients == 4 * args["vocab"] * args["dim"]
    peaks = {shards: peak_bytes(builder, job, next_token, batch, cpu, shards) for shards in (2, 4, 8)}
    assert len({peak - need.summed(shards) for shards, peak in peaks.items()}) == 1
    assert len({peak - one_sum.summed(shards) for shards, peak in peaks.items()}) == 3


def test_a_number_that_does_not_fit_is_told_as_a_job_writes_it(tmp_path: Path) -> None:
    job = toy_job(tmp_path, model_args=DEEP, microbatch=16, recompute=0.2, workers={"max": 2})
    tensors = tensors_of_job(job)
    part, block = (need.of_a_member(2) for need in needs(job, [0.2, "block"]).values())
    limited = job.replace(workers={"max": 2, "device_gb": (part + block) / 2e9})
    line = [*of_job(limited, tensors, by_recompute(limited))][-1]
    assert re.match(
        r"it does not fit with recompute = 0\.2: 2 workers .*; with recompute = 'block' it fits", line
    )


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
# torch's own, while it compiles
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_reproducible_job_is_told_which_policy_it_must_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controls: where it may choose, where it fits, where it has named one, and where no policy would
    help.
    """
    job = toy_job(
        tmp_path, model_args={**DEEP, "layers": 2}, microbatch=16, workers={"min": 8, "max": 8}, compile=True
    )
    by_policy = needs(job, ["none", "block"])
    most, least = (by_policy[policy].of_a_member(8) for policy in ("none", "block"))
    assert most > 1.2 * least
    limited = job.replace(workers=job.workers.model_copy(update={"device_gb": (most + least) / 2e9}))
    fits = r"with recompute = '(block|selective)' it fits from (\d) workers on"
    file = tmp_path / "job.toml"
    file.write_text(to_toml(limited))
    line = said(capsys, str(file))
    told = re.search(
        (
            rf"it does not fit with recompute = 'none': 8 workers with .* too few; {fits}; set "
            r"recompute by hand, since compile"
        ),
        line,
    )
    assert told, line
    noted = [note for note in preflight(limited).notes if "recompute" in note]
    assert len(noted) == 1 and re.search(
        (
            rf"^recompute = 'auto' keeps all activations with these settings.*{fits}; set recompute "
            r"by hand, since compile"
        ),
        noted[0],
    )
    named = limited.replace(recompute=told[1])
    assert [least_of(named, need) for need in by_recompute(named).values()] == [int(told[2])]
    roomy = limited.replace(workers=job.workers.model_copy(update={"device_gb": 2 * most / 1e9}))
    for other in (
        named,
        roomy,
        limited.replace(reproducible=False),
        limited.replace(workers={"max": 8, "device_gb": 1e-5}),
    ):
        assert not unnamed_policy(other)
    assert "set recompute by hand" not in said(capsys, str(file), "--workers.device-gb", "0.00001")


def test_settings_with_which_a_job_fits_are_named_and_do_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge is the estimate of the job with what is named.  The controls: a device that nothing fits, and
    one that is large enough.
    """
    job = toy_job(tmp_path, model_args=MODEL, precision="bf16", recompute="block", workers={"max": 2})
    (need,) = needs(job, ["block"]).values()
    needed = need.of_a_member(2)
    (tmp_path / "job.toml").write_text(to_toml(job))

    def of(part: float, *words: str) -> str:
        return said(
            capsys, str(tmp_path / "job.toml"), "--workers.device-gb", f"{part * needed / 1e9:.9f}", *words
        )

    line = of(0.97)
    assert re.search(
        (
            r"it does not fit: 2 workers with .* each are too few; it fits with optim.moments = 'bf16' from "
            r"[12] workers? on, or"
        ),
        line,
    )
    more = re.search(r"or with workers.max = (\d+) or more", line)
    assert more and int(more[1]) > 2
    assert f"{more[1]} or more workers with" in of(0.97, "--workers.max", more[1])
    assert "it does not fit" in of(0.97, "--workers.max", str(int(more[1]) - 1))
    offloaded = re.search(r"with offload = '(\w+)' and parallel.zero = 2 from (\d) workers? on", line)
    assert offloaded, line
    for words in (["--optim.moments", "bf16"], ["--offload", offloaded[1], "--parallel.zero", "2"]):
        assert " can train" in of(0.97, *words), words
    assert re.search(r"it does not fit: 1 worker with .* is too few(;|\s)", of(0.97, "--workers.max", "1"))
    assert "it fits" not in of(0.001)
    assert "fit" not in of(1.2).partition("memory of a worker's device")[0]


@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_does_not_warn_of_what_the_policy_chooses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The controls: other words of the same logger are told, and without the filter it does warn."""
    logger = logging.getLogger(memory.CHOOSES)
    warned = "Detected that context_fn is passed"
    job = toy_job(tmp_path, model_args={**DEEP, "layers": 1}, compile=True)
    with caplog.at_level(logging.WARNING, memory.CHOOSES):
        logger.addHandler(caplog.handler)  # torch's loggers do not pass records on
        try:
            needs(job, ["selective"])
            assert warned not in caplog.text
            logger.warning("something else")
            assert "something else" in caplog.text
            logger.removeFilter(memory._is_news)
            logger.warning("%s to torch.utils.checkpoint", warned)
            assert warned in caplog.text
        finally:
            logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("estimate", "takes a job file, or --params and a number"),
        ("estimate --params -3", "--params = -3 is no number of parameters"),
        ("estimate job.toml --params 7", "takes a job file, or --params and a number"),
        ("estimate --params 7 --seed 1", "--seed 1 has no effect without a job file"),
    ],
)
def test_a_line_that_says_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main(words.split()) == 1
    assert said in capsys.readouterr().out
