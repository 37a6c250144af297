"""U6: a buffer that a model changes behind torch's back is refused; its value would depend on which worker
computed which microbatch.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.engine.world import World
from elastic.errors import StateChanged
from elastic.ids import Version
from elastic.train.gauges.counters import Counters
from elastic.train.model import build_model, tensors_of
from elastic.train.session import make_session
from elastic.train.warmup import warm_up
from tests.support.segments import member
from tests.support.toys import BatchNormed, Own, toy_job

HERE = "tests.train.test_buffers"


class Activated(nn.BatchNorm1d):
    """A norm with a ``forward`` of its own, as ``BatchNormAct2d`` of timm has one: torch counts no change of
    its statistics.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(
            F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
            )
        )


class WithActivated(BatchNormed):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            assert isinstance(layer.norm, nn.BatchNorm1d)
            layer.norm = Activated(layer.norm.num_features)


class Averaging(Own):
    """A model with a running mean that it writes by ``.data``, as codebooks of vector quantisation are
    written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(29))

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        self.average.data.lerp_(out.detach().mean((0, 1)), 0.1)
        return out


class Flagged(Own):
    """A model that fills a table when it first runs, unless a flag says that this was done; and it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filled", torch.tensor(True))
        self.register_buffer("table", torch.ones(29))

    def forward(self, tokens: Tensor) -> Tensor:
        if not self.filled:
            self.table.fill_(1.0)
            self.filled.fill_(True)
        return super().forward(tokens) * self.table


MODELS = [
    (f"{HERE}:WithActivated", r"layers\.0\.norm\.running_mean"),
    (f"{HERE}:Averaging", "average"),
    (f"{HERE}:Flagged", ""),
    ("tests.support.toys:own", ""),
    ("tests.support.toys:batch_normed", ""),
]


@pytest.mark.parametrize(("model", "refused"), MODELS)
def test_a_warm_up_refuses_a_buffer_that_changes_unseen(tmp_path: Path, model: str, refused: str) -> None:
    """It has no other members, for which a comparison of values could wait.  The controls change none, or
    leave it to the engine.
    """
    job = toy_job(tmp_path, model=model, model_args={}, workers={"max": 2})
    session = make_session(job, Counters(tmp_path / "counters", create=True))
    tensors = tensors_of(build_model(job, session.builder), session.rule)
    with pytest.raises(StateChanged) if refused else nullcontext() as error:
        warm_up(session, tensors, torch.device("cpu"))
    session.close()
    assert error is None or re.search(f"changed the buffer '{refused}' of", str(error.value))


@pytest.mark.parametrize(("model", "refused"), MODELS)
def test_so_does_the_first_step_of_a_worker_without_others(tmp_path: Path, model: str, refused: str) -> None:
    world = World.alone(torch.device("cpu"))
    try:
        refusal = (
            pytest.raises(StateChanged, match=f"changed the buffer '{refused}' of")
            if refused
            else nullcontext()
        )
        with member(world, toy_job(tmp_path, model=model, model_args={}), Version(0, 0)) as me, refusal:
            me.step()
    finally:
        world.close()
