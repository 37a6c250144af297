"""An average of the weights is a kind of state: torch's in plain training, with the same bits in every layout
and after a loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from actors.cli.checkpoint_commands import export
from actors.launch import launch
from elastic.errors import JobError
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.alone.revisit import evaluate_here
from storage.slices import AVERAGE
from tests.support.carried import hash_after_healing
from tests.support.plain_models import ADAMW, HALVES, STEPS, TWO, Net, Numbers, job_of, loss, plainly
from tests.support.ranks import Ranks
from tests.support.segments import train_each, train_here
from tests.support.toys import small_job

DECAY = 0.75


def averaged_job(folder: Path, average: float = DECAY, **changes: Any) -> Job:
    return job_of(folder, Net, optim={**ADAMW, "average": average}, **changes)


class Averaging(torch.optim.AdamW):
    """It averages after each step as a loop of plain torch would."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        groups = [{"params": [each], "weight_decay": 0.1 * (each.dim() >= 2)} for each in parameters]
        super().__init__(groups, lr=1e-2, betas=(0.9, 0.999))
        self.own = nn.ParameterList(parameters)
        self.averaged = AveragedModel(self.own, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.averaged.update_parameters(self.own)


def kept(job: Job, kind: str = "average") -> dict[str, Tensor]:
    """Returns the averages of the exported state of the last step."""
    found = load_file(Path(job.bucket) / f"export-{STEPS}" / "optimizer.safetensors")
    return {name.partition("/")[2]: value for name, value in found.items() if name.startswith(f"{kind}/")}


def test_the_average_is_torchs(tmp_path: Path) -> None:
    """One worker, which is stopped half way.  The control: another decay."""
    job, other = averaged_job(tmp_path / "a"), averaged_job(tmp_path / "b", 0.5)
    train_here(job, STEPS, train_here(job, STEPS // 2).version)
    train_here(other, STEPS)
    made = list[Averaging]()

    def averaging(parameters: Any) -> torch.optim.Optimizer:
        made.append(Averaging(parameters))
        return made[0]

    names, wrong = [*plainly(Net, averaging)], kept(other)
    found = kept(job)
    assert len(found) == len(names)
    for name, value in zip(names, made[0].averaged.module.parameters(), strict=True):
        torch.testing.assert_close(found[name], value.detach(), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(wrong[name], value, rtol=1e-6, atol=1e-6)


def test_the_average_has_the_same_bits_in_every_layout_and_changes_no_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The hash is of all state.  A run without it has no new tensor, and the same weights and moments as one
    with it.
    """
    one, without = averaged_job(tmp_path / "one"), averaged_job(tmp_path / "none", 0.0)
    hashed, plain = train_here(one, STEPS), train_here(without, STEPS)
    for number, (layout, changes) in enumerate(
        [
            (TWO, {}),
            (HALVES, {"zero": 2}),
            (HALVES, {"zero": 3}),
            (HALVES, {"zero": 2, "offload": "optimizer"}),
        ]
    ):
        offload = {"offload": changes.pop("offload")} if "offload" in changes else {}
        job = averaged_job(tmp_path / str(number), parallel=changes, **offload)
        assert [each.hash for each in train_each(ranks, [job], layout, STEPS)] == [hashed.hash], changes
    stored = [
        Run.open(job).checkpoints.open(made.version).tensors()
        for job, made in ((one, hashed), (without, plain))
    ]
    assert {each.kind for each in stored[1]} == {"parameter", "moment.exp_avg", "moment.exp_avg_sq", "scalar"}
    assert {each.kind for each in stored[0]} - {each.kind for each in stored[1]} == {
        AVERAGE
    } and plain.hash != hashed.hash
    for kind in ("exp_avg", "exp_avg_sq"):
        assert kept(one, kind).keys() == kept(without, kind).keys()
        assert all(torch.equal(value, kept(without, kind)[name]) for name, value in kept(one, kind).items())


def test_the_average_is_healed_from_members(ranks: Ranks, tmp_path: Path) -> None:
    """A member that had nothing gets it from memory; every slice is compared with that of the bucket."""
    optim = {"average": DECAY}
    assert hash_after_healing(ranks, small_job(tmp_path / "b", global_batch=8, optim=optim), STEPS) == (
        train_here(small_job(tmp_path / "a", global_batch=8, optim=optim), STEPS).hash
    )


def test_the_average_of_a_model_with_a_table_is_read_from_the_bucket(tmp_path: Path) -> None:
    """A checkpoint does not say how its tensors may be cut, and the state does."""
    optim = {"average": DECAY}
    stopped, whole = (small_job(tmp_path / name, global_batch=8, optim=optim) for name in ("a", "b"))
    version = train_here(stopped, STEPS // 2).version
    assert train_here(stopped, STEPS, version).hash == train_here(whole, STEPS).hash


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.bfloat16()


def test_the_average_of_16_bits_has_32(tmp_path: Path) -> None:
    """A frozen tensor has none."""
    job = job_of(tmp_path, Half, optim={**ADAMW, "average": 0.999}, trial=False)
    train_here(job, STEPS)
    found = kept(job)
    assert {each.dtype for each in found.values()} == {torch.float32} and not [
        name for name in found if name.startswith("head.")
    ]
    assert any(not torch.equal(each, each.bfloat16().float()) for each in found.values())


def test_commands_take_the_average_if_asked(tmp_path: Path) -> None:
    """The export has the averages, and the loss is that of plain torch with them.  The control: the weights."""
    aside = {"every": STEPS, "dataset": "tests.support.plain_models:Numbers", "samples": 6}
    job = averaged_job(tmp_path, validation=aside)
    run_local(job, lambda line: None)
    for name, average in (("average", True), ("weights", False)):
        export(job, tmp_path / name, None, average=average)
    averages, weights = (load_file(tmp_path / name / "model.safetensors") for name in ("average", "weights"))
    stored = load_file(tmp_path / "weights" / "optimizer.safetensors")
    assert averages.keys() == weights.keys()
    for name, value in averages.items():
        assert torch.equal(value, stored[f"average/{name}"]) and not torch.equal(value, weights[name])
    version, plain = evaluate_here(job)
    assert evaluate_here(job, average=True)[1].loss != plain.loss
    net: Any = Net()
    net.load_state_dict(averages)
    summed, count = loss(net, Numbers().read(tuple(range(6))))
    assert evaluate_here(job, average=True) == (
        version,
        type(plain)(pytest.approx(summed.item(), rel=1e-5), count),
    )


@pytest.mark.parametrize("settings", [{}, {"offload": "optimizer"}], ids=str)
def test_a_branch_begins_an_average_with_the_weights(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The step after its base takes the weights into them."""
    job = averaged_job(tmp_path, 0.0, checkpoint={"save_every": 1, "keep_last": 0}, **settings)
    run_local(job, lambda line: None)
    averaged = averaged_job(tmp_path, checkpoint={"save_every": 1, "keep_last": 0}, **settings)
    launch(averaged, local=True, branch=True, resume=STEPS - 1, show=lambda line: None)
    export(averaged, tmp_path / "base", str(STEPS - 1))
    export(averaged, tmp_path / f"export-{STEPS}", None)
    base, after = (
        load_file(tmp_path / folder / "model.safetensors") for folder in ("base", f"export-{STEPS}")
    )
    averages = kept(averaged)
    assert averages.keys() == after.keys()
    for name, value in averages.items():
        torch.testing.assert_close(value, base[name].lerp(after[name], 1 - DECAY), rtol=1e-6, atol=1e-7)
        assert not torch.equal(value, after[name]), "the control"


def test_without_an_average_none_is_given(tmp_path: Path) -> None:
    job = averaged_job(tmp_path, 0.0, validation={"every": STEPS})
    run_local(job, lambda line: None)
    with pytest.raises(
        JobError,
        match=(
            r"--average: the checkpoint of step 4 .* has no average of the weights, since "
            r"optim\.average was 0; leave --average out"
        ),
    ):
        export(job, tmp_path / "out", None, average=True)
    with pytest.raises(JobError, match=r"--average: .* since optim\.average = 0; leave --average out"):
        evaluate_here(job, average=True)
    with pytest.raises(JobError, match=r"optim\.average = 1\.0 must be less than 1"):
        averaged_job(tmp_path, 1.0)
