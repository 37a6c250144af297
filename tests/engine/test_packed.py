"""Jobs that keep documents apart have the same bits in every world, and choose their kernels by the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.data.tokens import TokenDataset
from elastic.engine.kernels import apply_kernels
from elastic.job import Job
from elastic.kernels.attention import Kernel
from elastic.models import gpt2, llama
from elastic.plan.layout import Layout
from storage.datasets import Coding, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import numbered
from tests.support.ranks import Ranks
from tests.support.segments import train, train_here
from tests.support.toys import small_job

STEPS, END = 2, 28


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of documents of 0 to 33 words."""
    path = tmp_path_factory.mktemp("tokens")
    draw = torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 34, (60,), generator=draw).tolist()
    documents = numbered(
        *([*torch.randint(0, END, (length,), generator=draw).tolist(), END] for length in lengths)
    )
    write_dataset(ObjectStore.open(str(path)), documents, Coding("words", 29, END))
    return path


def job_on(tokens: Path, bucket: Path, documents: bool = True, **changes: Any) -> Job:
    return small_job(
        bucket, data={"args": {"path": str(tokens), "seq_len": 16, "documents": documents}}, **changes
    )


def test_gpt2_ends_with_the_same_bits(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    """Its positions are learned."""
    more = {
        "model": "elastic.models.gpt2:build",
        "model_args": {"vocab": 29, "dim": 32, "length": 16, "layers": 2},
    }
    one, two = (job_on(tokens, tmp_path / name, **more) for name in ("one", "two"))
    assert train_here(one, STEPS).hash == train(ranks, two, Layout(1, 2), STEPS).hash


def test_the_targets_of_a_step_are_those_of_its_documents(tokens: Path, tmp_path: Path) -> None:
    """A target counts unless its input ends a document.  The control: all count where documents are not kept
    apart, and bits are others.
    """
    kept, plain = (
        train_here(job_on(tokens, tmp_path / str(each), documents=each), 1) for each in (True, False)
    )
    outcome = kept.outcomes[0]
    assert plain.hash != kept.hash and plain.outcomes[0].tokens > outcome.tokens
    rows = TokenDataset(str(tokens), 16).read(tuple(id for ids in outcome.samples for id in ids))["tokens"]
    assert outcome.tokens == (rows[:, :-1] != END).sum() < rows[:, 1:].numel()


@pytest.mark.fast
@pytest.mark.parametrize("build", [llama.build, gpt2.build])
def test_the_job_chooses_flex_attention(build: Any, tmp_path: Path) -> None:
    """It is used on a GPU, in compiled blocks without dropout: within documents always, and else where the
    order of sums must be fixed.
    """

    def chosen(device: str = "cuda", dropout: float = 0.0, **settings: Any) -> tuple[Kernel, Kernel]:
        model = build(dropout=dropout)
        apply_kernels(model, torch.device(device), small_job(tmp_path, **{"compile": True} | settings))
        return model.attends, model.attends_in_documents

    assert chosen() == (Kernel.FLEX, Kernel.FLEX)
    assert chosen(reproducible=False) == (Kernel.TORCH, Kernel.FLEX)
    for settings in ({"device": "cpu"}, {"dropout": 0.1}, {"compile": False}):
        assert chosen(**settings) == (Kernel.TORCH, Kernel.TORCH)
    flash = {"attention": "flash-4", "precision": "bf16", "workers": {"gpus": 1}}
    assert chosen(**flash) == chosen(reproducible=False, **flash) == (Kernel.FLASH_4, Kernel.FLEX)
    assert chosen(compile=False, **flash) == (Kernel.FLASH_4, Kernel.TORCH)
    assert chosen(device="cpu", **flash) == (Kernel.TORCH, Kernel.TORCH)
