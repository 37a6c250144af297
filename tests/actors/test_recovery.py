"""Everything dies: all workers at once, or every process there is.  A user's own code survives a kill."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.view import View
from elastic.config.optimizers import OPTIMIZERS
from elastic.plan.memory_need import USABLE
from elastic.protocol.lineage import tip
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.model import build_model, builder_of
from tests.actors.conftest import DIED, DIES
from tests.support.chaos import (
    REDONE,
    Trial,
    Witness,
    alone,
    assert_nothing_left,
    exported_hash,
    formed,
    samples,
    trial,
)
from tests.support.commands import Command, seen, user_job, user_package
from tests.support.left import GONE_S
from tests.support.mischief import OUTLIVES_S
from tests.support.patience import PATIENCE_S
from tests.support.processes import Machine, Watched
from tests.support.toys import LIGHT, toy_job

# a Linear with a bias returns a view; nothing here writes into it
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def undisturbed(
    folder: Path, package: str, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[str, list[str]]:
    """Runs a user's job in this process.  Returns its hash, and what its loss saw."""
    user_package(folder, package)
    monkeypatch.syspath_prepend(folder)
    job = user_job(folder, package, trial=False, **changes)
    lines: list[str] = []
    assert run_local(job, lambda line: lines.append(str(line)))[0] == "Finished"
    saw = seen(folder)
    assert len(saw) == len(set(saw)) == job.steps * job.microbatches, (
        "every microbatch of every step has a loss of its own"
    )
    return exported_hash(job), saw


@pytest.mark.full  # a user's own code is killed in test_submit too
def test_own_model_is_killed_and_ends_with_the_bits_of_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U1, U3, U10: a model without a sharding table and a dataset, both outside of the repository."""
    expected, _ = undisturbed(tmp_path / "local", "mine", monkeypatch)
    job = user_job(
        tmp_path,
        "mine",
        data={"dataset": "mine.code:Walks", "args": {"read_s": 0.01}},
        faults=[{"point": "backward", "step": 6, "world_rank": 1}],
    )
    chaos = trial(job)
    assert (chaos.result.state, chaos.hash) == ("Finished", expected)
    (killed,) = chaos.witness.killed()
    (survivor,) = {"w1", "w2"} - {killed.worker}
    assert 0 < killed.final["step"] < job.steps - 1
    assert chaos.witness.seen[survivor].final["updates_applied"] == job.steps
    told = [line.text for line in chaos.lines if isinstance(line, Sentence)]
    (wrapped,) = [line for line in told if line.startswith("blocks: ")]
    assert "layers.0 … layers.2" in wrapped and wrapped.endswith("data parallel only")
    (log,) = Path(job.bucket).glob(f"{job.name}/logs/*/{killed.worker}.log")
    assert "killed by signal 9 (SIGKILL)" in log.read_text().splitlines()[0]
    assert_nothing_left(chaos)


def test_r1_a_death_is_seen_long_before_the_sockets_of_the_dead_close(tmp_path: Path) -> None:
    """A process with much pinned memory keeps its sockets open for seconds after its death; here another one
    that shares them does.
    """
    faults = [{"point": "backward", "step": 6, "world_rank": 1}]
    chaos = trial(
        toy_job(tmp_path / "killed", **LIGHT, loss="tests.support.mischief:outlived", faults=faults)
    )
    expected = alone(toy_job(tmp_path / "alone", name="local", **LIGHT))
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    (before,) = (line for line in chaos.lines if isinstance(line, StepLine) and line.step == 5)
    (told,) = (
        line
        for line in chaos.lines
        if isinstance(line, Sentence) and "is lost (its process died)" in line.text
    )
    assert told.at - before.at < OUTLIVES_S / 2


@pytest.mark.full
# torch's own, while it compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
@pytest.mark.parametrize(
    "changes",
    [
        {"batch_ramp": {"start": 4, "increment": 4, "samples": 80}},
        {"precision": "fp16"},
        {"precision": "fp8"},
        {"precision": "fp8-rowwise"},
        {"recompute": "block"},
        {"recompute": "selective", "compile": True},
        {"recompute": 0.5},
        {"parallel": {"zero": 2}},
        {"optim": {"lr": 1e-2, "moments": "bf16"}},
        {"model": "elastic.models.gpt2:build", "model_args": {"vocab": 29, "dim": 32, "length": 16}},
        {"model": "tests.support.toys:batch_normed", "model_args": {}},
    ],
    ids=str,
)
def test_a_kill_costs_no_bits_whatever_the_engine_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A9, A10, E3, E5: the only worker that holds a shard is killed while the batch grows, or under another
    setting of the engine.
    """
    settings = {"steps": 16, "parallel": {"dp_replicate": 1}, **changes}
    expected = alone(toy_job(tmp_path / "alone", name="local", **settings))
    chaos = trial(
        toy_job(tmp_path / "killed", **settings, faults=[{"point": "backward", "step": 6, "world_rank": 1}])
    )
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    assert len(chaos.witness.killed()) == 1 and chaos.losses[-1] < chaos.losses[0]
    assert_nothing_left(chaos)


@pytest.mark.full
def test_a13_a_kill_and_another_world_change_no_warning(tmp_path: Path) -> None:
    """A13: the only worker that holds a shard is killed between two records of a layer that has no gradient;
    one warning comes, the same as from one worker, and the norms of all records have the same bits.
    """
    model = {"model": "tests.engine.test_layers:multiplied_by_zero", "model_args": {}}
    settings = {"steps": 16, **model, "watch": {"every": 2, "patience": 5}, "parallel": {"dp_replicate": 1}}
    lines = list[Line]()
    run_local(toy_job(tmp_path / "alone", name="local", **settings), lines.append)
    (expected,) = (
        line.text for line in lines if isinstance(line, Sentence) and "the gradient of" in line.text
    )
    assert expected.startswith(
        "the gradient of layers.1 (0) is zero in 5 records in a row, the last of step 10: "
    )
    chaos = trial(
        toy_job(tmp_path / "killed", **settings, faults=[{"point": "backward", "step": 7, "world_rank": 1}])
    )
    assert chaos.result.state == "Finished" and len(chaos.witness.killed()) == 1
    assert {outcome.generation for outcome in chaos.ledger.values()} == {1, 2}
    told = [
        line.text for line in chaos.lines if isinstance(line, Sentence) and "the gradient of" in line.text
    ]
    assert len(told) == 1 and told[0].count("the gradient of") == 1 and expected in told[0]
    steps = {line.step: line.layers for line in lines if isinstance(line, StepLine)}
    assert {step: outcome.layer_norms for step, outcome in chaos.ledger.items()} == steps
    assert [step for step, norms in steps.items() if norms] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert_nothing_left(chaos)


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_the_state_of_every_optimizer_survives_a_kill(tmp_path: Path, kind: str) -> None:
    """A4: the only worker that holds a shard is killed; its moments come from host memory."""
    settings = {"steps": 16, "optim": {"kind": kind, "lr": 1e-2}, "parallel": {"dp_replicate": 1}}
    expected = alone(toy_job(tmp_path / "alone", name="local", **settings))
    job = toy_job(tmp_path / "killed", **settings, faults=[{"point": "backward", "step": 8, "world_rank": 1}])
    chaos = trial(job)
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    assert len(chaos.witness.killed()) == 1 and chaos.witness.total("healed_host_bytes") > 0
    assert chaos.losses[-1] < chaos.losses[0]
    assert_nothing_left(chaos)


def needing(device_bytes_a_parameter: float) -> float:
    """Returns the memory, in GB, of devices with so many bytes for each parameter of the toy model that may
    be used.
    """
    job = toy_job("/nowhere")
    elements = sum(parameter.numel() for parameter in build_model(job, builder_of(job)).parameters())
    return device_bytes_a_parameter * elements / USABLE / 1e9


@pytest.mark.parametrize(("room", "zero"), [(15, ", zero = 2"), pytest.param(13, "", marks=pytest.mark.full)])
def test_the_state_is_cut_as_the_devices_need_it(tmp_path: Path, room: float, zero: str) -> None:
    """Half of the state fits these devices, and the whole does not, so two workers share it although the job
    would let them replicate it. When one dies the other waits for the next one, and no bit is changed.

    With 15 bytes a parameter all weights in bf16 have room beside it, and are gathered once a step.  The
    control has 13: there blocks are gathered one by one.
    """
    settings = {"steps": 10, "precision": "bf16"}
    expected = alone(toy_job(tmp_path / "alone", name="local", **settings))
    workers = {"min": 1, "max": 2, "device_gb": needing(room)}
    job = toy_job(
        tmp_path, **settings, workers=workers, faults=[{"point": "backward", "step": 6, "world_rank": 1}]
    )
    chaos = trial(job)
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    assert [(len(each.members), each.layout) for each in formed(Run.open(job).records())] == [
        (2, (1, 2)),
        (2, (1, 2)),
    ]
    said = [line.text for line in chaos.lines if isinstance(line, Sentence)]
    assert any("requires that 2 or more workers share the state" in text for text in said)
    told = [text for text in said if "form generation" in text]
    assert len(told) == 2 and all(f"(1×2{zero}) at step" in each for each in told), told
    logs = [log.read_text().splitlines() for log in Path(job.bucket).glob(f"{job.name}/logs/*/*.log")]
    held = [line for log in logs for line in log if "it holds" in line]
    assert held and all(("of computing copies" in line) is bool(zero) for line in held), held
    assert len(chaos.witness.killed()) == 1
    assert_nothing_left(chaos)


def test_all_workers_die_at_once(all_died: Trial, tmp_path: Path) -> None:
    """H2, R14: without anybody's help the coordinator starts new workers, which go on from the bucket.

    Two blocks share a weight, and the workers share the state: a stage of ZeRO trains it that ``auto`` stands
    for.
    """
    assert_all_died(all_died, alone(toy_job(tmp_path, name="local", **DIED)), "bucket", range(DIES - 1, DIES))


@pytest.mark.full
def test_all_workers_die_at_once_and_leave_copies(tmp_path: Path, forty: Any) -> None:
    """H2, R14: the new workers go on from what the dead ones have left in the memory of their keeper."""
    data = {"dataset": "tests.support.toys:Sums", "args": {**forty.job.data.args, "read_s": 0.01}}
    settings = {
        "checkpoint": {"save_every": 100},
        "copies": {"copy_every": 1},
        "parallel": {"dp_replicate": 1},
    }
    job = toy_job(tmp_path, name="all-die", steps=forty.job.steps, data=data, **settings)

    def kill_all(witness: Witness, view: View) -> bool:
        if view.step < 11 or len(witness.seen) < 2:
            return False
        for each in witness.seen.values():
            os.kill(each.process.pid, signal.SIGSTOP)  # frozen first: none sees another die
        for each in witness.seen.values():
            each.process.kill()
        return True

    # world rank 0 reported step 11; the other may have been about to apply it
    assert_all_died(trial(job, kill_all), forty, "host", range(10, job.steps - 1))


def assert_all_died(chaos: Trial, expected: Any, tier: str, after: range) -> None:
    """Checks that both workers died after a step of ``after``, and that the next ones went on from ``tier``
    to the expected end.
    """
    steps, job = chaos.job.steps, chaos.job
    assert (chaos.result.state, chaos.hash, chaos.losses) == ("Finished", expected.hash, expected.losses)
    killed = {each.worker: each.final["step"] for each in chaos.witness.killed()}
    assert sorted(killed) == ["w1", "w2"] and all(step in after for step in killed.values()), killed
    assert [step for step, _ in samples(chaos.ledger)] == list(range(1, steps + 1))
    assert (
        steps * job.microbatches
        <= chaos.witness.total("microbatches_run")
        <= (steps + REDONE[tier](job) + 1) * job.microbatches
    )
    healed = [each for each in ("bucket", "host") if chaos.witness.total(f"healed_{each}_bytes")]
    assert healed == [tier]
    assert_nothing_left(chaos)


@pytest.mark.must_run_in_ci
def test_everything_is_killed_without_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: the same command goes on; every loss has the bits of the run that was never killed."""
    chain(tmp_path, monkeypatch, "chain", kills=1, seed=11, steps=10)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_everything_is_killed_at_twenty_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: twenty seeded random points."""
    for seed in range(10):
        chain(tmp_path / str(seed), monkeypatch, f"chain{seed}", kills=2, seed=seed, steps=16)


def chain(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, *, kills: int, seed: int, steps: int
) -> None:
    expected, saw = undisturbed(folder / "local", package, monkeypatch, steps=steps)
    user_package(folder, package)
    paced = {"read_s": 0.03}  # so that it does not end before it is killed
    job = user_job(
        folder, package, data={"dataset": f"{package}.code:Walks", "args": paced}, steps=steps, trial=False
    )
    rng, per_save = random.Random(seed), job.checkpoint.save_every * job.microbatches
    done, victims = 0, set[int]()
    before = Machine.now(str(folder), package)
    for _ in range(kills):  # each life gets beyond a save that the one before did not reach
        done += rng.randrange(per_save, 2 * per_save - job.microbatches)
        command = Command(folder, "train", "job.toml", "--local", warm=True)
        command.until(lambda done=done: len(seen(folder)) >= done)  # type: ignore[misc]
        (pid,) = {int(file.name) for file in (folder / "seen").iterdir()} - victims
        with Watched(pid) as victim:
            victim.kill()
            assert victim.wait(PATIENCE_S).signal is signal.SIGKILL and command.wait() != 0
        victims.add(pid)
    assert Command(folder, "train", "job.toml", "--local", warm=True).wait() == 0
    assert_same_losses(seen(folder), saw, redone=kills * (per_save + job.microbatches))
    assert exported_hash(job) == expected
    before.assert_nothing_left(str(folder), GONE_S)


@pytest.mark.full  # in test_submit a whole cluster is killed
def test_everything_is_killed_under_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1: driver, coordinator, workers, raylet and the cluster's store, all at once."""
    expected, saw = undisturbed(tmp_path / "local", "whole", monkeypatch)
    user_package(tmp_path, "whole")
    paced = {"dataset": "whole.code:Walks", "args": {"read_s": 0.02}}
    job = user_job(tmp_path, "whole", data=paced, trial=False)  # its losses would be seen, too
    before = Machine.now(str(tmp_path), "whole")
    kill_at = random.Random(7).randrange(7 * job.microbatches, 10 * job.microbatches)
    command = Command(tmp_path, "train", "job.toml", "--address", "local")
    command.until(lambda: len(seen(tmp_path)) >= kill_at)
    ends = command.kill_everything()
    assert ends and not (other := [end for end in ends if end.signal is not signal.SIGKILL]), other
    assert Command(tmp_path, "train", "job.toml", "--address", "local").wait() == 0
    assert_same_losses(seen(tmp_path), saw, redone=(2 * job.checkpoint.save_every + 1) * job.microbatches)
    assert exported_hash(job) == expected
    assert tip(Run.open(job).state().history.lineage).step == job.steps
    before.assert_nothing_left(str(tmp_path), GONE_S)


def assert_same_losses(found: list[str], expected: list[str], *, redone: int) -> None:
    """Checks the losses bit for bit, by the user's own record.

    At most ``redone`` microbatches may be done again, fewer than a run from step 0 would do.
    """
    assert set(found) == set(expected)
    assert len(expected) <= len(found) <= len(expected) + redone


def test_one_wrong_bit_is_seen() -> None:
    """The negative control of the check above."""
    expected = [f"{number:08x} {float(number).hex()}" for number in range(32)]
    assert_same_losses(expected + expected[:8], expected, redone=8)
    for wrong in (expected[:-1], [*expected, "0 0x1p0"], expected + expected[:9]):
        with pytest.raises(AssertionError):
            assert_same_losses(wrong, expected, redone=8)
