"""Sequences and tokens that a model does not know are told by a sentence, before they end a worker in a
kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.engine.loss import next_token
from elastic.errors import JobError, ModelError
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from storage.datasets import Coding, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import numbered
from tests.support.toys import toy_job

GPT2 = ("elastic.models.gpt2:build", {"vocab": 29, "dim": 16, "layers": 1, "heads": 2, "length": 16})
SMALL = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def theirs(kind: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return "elastic.models.transformers_lm:build", {"config": {"model_type": kind, **SMALL, **more}}


POSITIONS = [
    GPT2,
    theirs("gpt2", n_positions=16),
    theirs("opt", max_position_embeddings=16, ffn_dim=16, word_embed_proj_dim=16),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens")
    write_dataset(ObjectStore.open(str(path)), numbered([*range(28)] * 40), Coding("words", 29, 28))
    return path


def job_on(tokens: Path, bucket: Path, model: tuple[str, dict[str, Any]], seq_len: int, **more: Any) -> Any:
    if "transformers" in model[0]:
        pytest.importorskip("transformers", reason="the models of this test are not installed")
    data = {"args": {"path": str(tokens), "seq_len": seq_len}}
    return toy_job(bucket, model=model[0], model_args=model[1], data=data, **more)


@pytest.mark.parametrize("model", POSITIONS, ids=["ours", "gpt2", "opt"])
def test_samples_longer_than_the_positions_are_refused_before_a_worker_starts(
    tokens: Path, tmp_path: Path, model: tuple[str, dict[str, Any]]
) -> None:
    """The control: samples as long as the positions."""
    said = (
        r"^seq_len = 17 of the dataset is longer than the longest sequence of the model, 16; lower "
        r"data\.args\.seq_len to 16, or raise length, .* to 17$"
    )
    with pytest.raises(ModelError, match=said):
        preflight(job_on(tokens, tmp_path, model, 17))
    preflight(job_on(tokens, tmp_path, model, 16))


def test_rotary_positions_have_no_end(tokens: Path, tmp_path: Path) -> None:
    llama = theirs("llama", max_position_embeddings=16, intermediate_size=16, num_key_value_heads=2)
    preflight(job_on(tokens, tmp_path, llama, 17))


def test_so_are_samples_that_are_held_out(tokens: Path, tmp_path: Path) -> None:
    held_out = {
        "every": 1,
        "dataset": "elastic.data.tokens:TokenDataset",
        "args": {"path": str(tokens), "seq_len": 17},
    }
    with pytest.raises(ModelError, match=r"^seq_len = 17 of the dataset is longer"):
        preflight(job_on(tokens, tmp_path, GPT2, 16, validation=held_out))


def test_code_of_ones_own_may_do_otherwise_with_samples(tokens: Path, tmp_path: Path) -> None:
    """A loss may cut samples to what the model reads.  The control: ours, above."""
    preflight(job_on(tokens, tmp_path, GPT2, 17, loss=f"{__name__}:of_the_first"))


def of_the_first(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return next_token(model, {"tokens": batch["tokens"][:, :17]})


class Numbers:
    """A user's dataset, which does not say how large its tokens are; the largest is in the last samples."""

    def __init__(self, largest: int) -> None:
        self.largest = largest

    def __len__(self) -> int:
        return 64

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([[*range(8), self.largest if id > 40 else 9] for id in ids])}

    def fingerprint(self) -> str:
        return f"numbers {self.largest}"


def test_a_token_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    """Its vocabulary is known by its tokens alone.  The control: the largest that the model knows."""

    def trained(largest: int) -> str:
        data = {"dataset": f"{__name__}:Numbers", "args": {"largest": largest}}
        job = toy_job(tmp_path, name=f"to-{largest}", model=GPT2[0], model_args=GPT2[1], data=data, steps=2)
        return run_local(job, lambda line: None)[0]

    with pytest.raises(
        JobError,
        match=(
            r"samples \[.*\] have the token 29, but the model has only the tokens 0 to 28; set .* to "
            r"30 or more"
        ),
    ):
        trained(29)
    assert trained(28) == "Finished"


def test_so_is_one_that_is_held_out(tmp_path: Path) -> None:
    """The control: the largest that the model knows."""

    def trained(largest: int) -> str:
        data = {"dataset": f"{__name__}:Numbers", "args": {"largest": 28}}
        held_out = {"every": 1, "dataset": f"{__name__}:Numbers", "args": {"largest": largest}}
        job = toy_job(
            tmp_path,
            name=f"held-{largest}",
            model=GPT2[0],
            model_args=GPT2[1],
            data=data,
            validation=held_out,
            steps=2,
        )
        return run_local(job, lambda line: None)[0]

    with pytest.raises(
        JobError,
        match=(
            r"^validation\.dataset = .*: samples \[.*\] have the token 29, but the model has only the "
            r"tokens 0 to 28"
        ),
    ):
        trained(29)
    assert trained(28) == "Finished"
