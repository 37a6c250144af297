"""Blocks whose list holds containers: what is called in these are the blocks, so that memory policies and
stage 3 act on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.engine.activations import apply_activations
from elastic.engine.blocks import sharding_table
from elastic.engine.parallelize import parallelize
from elastic.engine.world import World
from elastic.errors import ModelError
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout
from elastic.train.blame import classify
from elastic.train.checks.preflight import preflight
from elastic.train.model import build_model, builder_of
from tests.engine.test_memory import Watch, grads_of, measured, same, wrapped
from tests.support.ranks import Ranks
from tests.support.segments import train, train_here
from tests.support.toys import small_job

KINDS: dict[str, Any] = {
    "list": lambda mix, feed: nn.ModuleList([mix, feed]),
    "dict": lambda mix, feed: nn.ModuleDict({"mix": mix, "feed": feed}),
}


class Parts(nn.Module):
    """A model that calls the parts of its layers, which are containers and have no ``forward``."""

    def __init__(
        self,
        kind: str = "list",
        vocab: int = 29,
        dim: int = 16,
        layers: int = 3,
        dropout: float = 0.1,
        **_: Any,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, dim), nn.Linear(dim, vocab)
        feeds = (
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(layers)
        )
        self.layers = nn.ModuleList(
            KINDS[kind](nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Dropout(dropout)), feed)
            for feed in feeds
        )

    def init_weights(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            for part in layer.children():
                x = x + part(x)
        return self.head(x)


class Named(Parts):
    """Names its blocks itself."""

    def __init__(self, blocks: Sequence[str], **args: Any) -> None:
        super().__init__(**args)
        self.blocks = tuple(blocks)

    def sharding(self) -> ShardingTable:
        return ShardingTable(self.blocks)


class Turned(Parts):
    """A model with a weight whose memory is by columns, which FSDP2 refuses."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.head.weight = nn.Parameter(self.head.weight.detach().t().contiguous().t())


@pytest.mark.fast
def test_what_is_called_in_a_container_is_a_block() -> None:
    """The control: a list of blocks that are called, one of them twice, stays as it is."""
    assert sharding_table(Parts(layers=2)).blocks == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")
    assert sharding_table(Parts("dict", layers=1)).blocks == ("layers.0.mix", "layers.0.feed")
    plain, block = nn.Module(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain.layers = nn.ModuleList([block, block])
    assert sharding_table(plain).blocks == ("layers.0", "layers.1")


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_memory_policies_act_on_containers(kind: str) -> None:
    """They keep fewer bytes, from live storages, and the gradients have the same bits.  With int8 they do
    not: the policy is there.
    """

    def build(**args: Any) -> nn.Module:
        return Parts(kind, **args)

    everything, _, _, wanted = measured("none", kind=build)
    for policy in ("selective", "block", "sqrt"):
        kept, _, _, found = measured(policy, kind=build)
        assert kept < 0.8 * everything, policy
        assert same(found, wanted)
    model = wrapped("none", kind=build)
    apply_activations(model, sharding_table(model), "int8")
    with Watch(model) as watch:
        loss = model(torch.arange(128).view(2, 64) % 17).square().sum()
        assert watch.living() < 0.8 * everything
    loss.backward()
    assert not same(grads_of(model), wanted)


def job_of(folder: Path, model: type[Parts] = Parts, **changes: Any) -> Job:
    changes = {"model_args": {}, "workers": {"max": 4}, **changes}
    return small_job(folder, model=f"{__name__}:{model.__name__}", **changes)


def test_a_container_in_a_table_of_ones_own_is_refused(tmp_path: Path) -> None:
    """No worker has started then.  The control names its children."""
    with pytest.raises(
        ModelError,
        match=(
            r"^sharding\(\) of Named names 'layers.1', a ModuleList, .* has no "
            r"forward\(\); name"
        ),
    ):
        preflight(job_of(tmp_path, Named, model_args={"blocks": ["layers.0.1", "layers.1"]}))
    preflight(job_of(tmp_path, Named, model_args={"blocks": ["layers.0.1", "layers.1.0", "layers.1.1"]}))


def refused(world: World, job: Job) -> tuple[str, str]:
    """Returns what the error of wrapping the model is blamed on, and the signature.  Its weight gets the
    order in memory that it had.
    """
    model = build_model(job, builder_of(job))
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    try:
        parallelize(model, world, job)
    except NotImplementedError as error:
        return classify(error, lambda: None, forming=True)
    return "", ""


def test_what_the_library_refuses_of_a_model_is_no_peers_error(ranks: Ranks, tmp_path: Path) -> None:
    """It says so in the same files in which it waits for peers.  The control: with the usual order in memory
    it trains, split or not.
    """
    job = job_of(tmp_path, Turned, parallel={"zero": 3})
    for cause, signature in ranks.run(Layout(1, 2), refused, job):
        assert cause == "job" and signature.startswith("NotImplementedError at ")
    assert train(ranks, job, Layout(1, 2), 1).hash == train_here(job_of(tmp_path / "one", Turned), 1).hash
