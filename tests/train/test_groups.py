"""Groups of parameters have the learning rates and the weight decays that plain torch gives its groups, in
every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.errors import JobError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.checks.preflight import preflight
from tests.support.plain_models import HALVES, STEPS, TWO, Net, job_of, plainly, values_of
from tests.support.ranks import Ranks
from tests.support.segments import train_each, train_here

GROUPS = [
    {"names": ["*.bias"], "weight_decay": 0.25, "lr_scale": 2.0},
    {"names": ["layers.0.*", "embed.*"], "lr_scale": 0.5},
    {"names": ["head.*"], "weight_decay": 0.0},
]
"""Their weight decays are 0.25, then 0.1 as of the job, then none; all others have that of the job."""


class Muon:
    """The two optimizers of torch that are ours of that name."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        matrices = [group for group in groups if group["is_matrix"]]
        muon = torch.optim.Muon(matrices, momentum=0.5, adjust_lr_fn="match_rms_adamw")
        self.both = (
            muon,
            torch.optim.AdamW([group for group in groups if not group["is_matrix"]], betas=(0.9, 0.95)),
        )

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def step(self) -> None:
        for each in self.both:
            each.step()


TORCH: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "adamw": (lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.999)), {"betas": [0.9, 0.999]}),
    "sgd": (lambda groups: torch.optim.SGD(groups, momentum=0.5), {"momentum": 0.5, "decay": "l2"}),
    "adagrad": (lambda groups: torch.optim.Adagrad(groups, eps=1e-8), {"decay": "l2"}),
    "rmsprop": (lambda groups: torch.optim.RMSprop(groups, alpha=0.9), {"betas": [0.5, 0.9], "decay": "l2"}),
    "muon": (Muon, {"momentum": 0.5}),
}
"""Optimizers of torch, and the settings of ours that compute the same."""


def grouped(kind: str, *, groups: bool) -> Callable[[Any], torch.optim.Optimizer]:
    """Returns what makes the optimizer of torch, with the groups or without."""

    def made(parameters: Any) -> Any:
        found = []
        for (name, _), each in zip(Net().named_parameters(), parameters, strict=True):
            scale, decay = 1.0, 0.1 if each.dim() >= 2 else 0.0
            if groups and name.endswith("bias"):
                scale, decay = 2.0, 0.25
            elif groups and name.startswith(("layers.0.", "embed.")):
                scale = 0.5
            elif groups and name.startswith("head."):
                decay = 0.0
            is_matrix = name.startswith("layers.") and each.dim() == 2
            found.append(
                {"params": [each], "lr": 1e-2 * scale, "weight_decay": decay, "is_matrix": is_matrix}
            )
        return TORCH[kind][0](found)

    return made


def groups_job(folder: Path, kind: str, **changes: Any) -> Job:
    optim = {
        "kind": kind,
        "lr": 1e-2,
        "weight_decay": 0.1,
        "clip_norm": 1e9,
        "groups": GROUPS,
        **TORCH[kind][1],
    }
    return job_of(folder, Net, **{"optim": optim, **changes})


@pytest.mark.parametrize("kind", TORCH)
def test_groups_are_those_of_torch(tmp_path: Path, kind: str) -> None:
    """One worker, which is stopped half way.  The control: torch without the groups."""
    job = groups_job(tmp_path, kind)
    train_here(job, STEPS, train_here(job, STEPS // 2).version)
    found, expected, without = (
        values_of(job),
        *(plainly(Net, grouped(kind, groups=groups)) for groups in (True, False)),
    )
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
        is_plain = name.startswith("layers.1.") and name.endswith("weight")
        assert is_plain or not torch.allclose(value, without[name], rtol=1e-5, atol=1e-6), name


def test_groups_have_the_same_bits_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Muon has a prepared update, and AdamW state in the memory of the node too.  The control: without groups
    the bits are others.
    """
    cases: list[tuple[Layout, dict[str, Any]]] = [
        (TWO, {}),
        (HALVES, {"parallel": {"zero": 2}}),
        (HALVES, {"parallel": {"zero": 3}}),
        (HALVES, {"parallel": {"zero": 2}, "offload": "optimizer"}),
    ]
    one = {
        kind: train_here(groups_job(tmp_path / kind, kind), STEPS).hash for kind in ("adamw", "muon", "sgd")
    }
    for number, (layout, changes) in enumerate(cases):
        jobs = [groups_job(tmp_path / f"{kind} {number}", kind, **changes) for kind in one]
        assert [each.hash for each in train_each(ranks, jobs, layout, STEPS)] == [*one.values()], changes
    plain = groups_job(tmp_path / "plain", "adamw")
    assert (
        train_here(plain.replace(optim=plain.optim.model_copy(update={"groups": ()})), STEPS).hash
        != one["adamw"]
    )


class Shared(Net):
    """The norm of one layer is frozen, and two layers share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0][0].requires_grad_(False)  # type: ignore[index, union-attr]
        self.layers[1][2].bias = self.layers[0][2].bias  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([["*.bais"]], r"optim\.groups\[0\]\.names: '\*\.bais' matches no parameter of"),
        ([["head.weigth"]], r"'head\.weigth' matches no parameter of .*; did you mean 'head\.weight'\?"),
        (
            [["*"], ["head.*"]],
            (
                r"optim\.groups\[1\]\.names: 'head\.\*' matches only parameters of earlier groups, "
                r"such as 'head\.weight'"
            ),
        ),
        ([["layers.0.0.*"]], r"'layers\.0\.0\.\*' matches only frozen parameters"),
        (
            [["layers.0.2.bias"], ["layers.1.2.bias"]],
            (
                r"'layers\.1\.2\.bias' matches only parameters of earlier groups, such as "
                r"'layers\.0\.2\.bias'"
            ),
        ),
    ],
)
def test_a_pattern_that_gives_its_group_nothing_is_refused(
    tmp_path: Path, names: list[list[str]], said: str
) -> None:
    """Before any worker starts.  The control: a group with the second name of a shared parameter has that."""
    with pytest.raises(JobError, match=said):
        preflight(job_of(tmp_path, Shared, optim={"groups": [{"names": each} for each in names]}))
    job = job_of(tmp_path, Shared, optim={"groups": [{"names": ["layers.1.2.bias"]}]})
    assert "layers.1.2.bias        1        6" in "\n".join(preflight(job).notes)
