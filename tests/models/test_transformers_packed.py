"""A packed sample computes with a model of transformers what its documents compute one by one, or the job is
refused before it starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.engine.kernels import apply_kernels
from elastic.engine.loss import next_token
from elastic.errors import ModelError
from elastic.kernels.attention import Kernel
from elastic.plan.layout import Layout
from elastic.train.checks.preflight import preflight
from storage.datasets import Coding, write_dataset
from storage.objects import ObjectStore
from tests.data.texts import numbered
from tests.models.test_packed import assert_kept_apart, one_by_one, packed, samples
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import toy_job

pytest.importorskip("transformers", reason="the models of these tests are not installed")
transformers_lm = pytest.importorskip("elastic.models.transformers_lm")

SMALL = {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GATED,
    "qwen3": {**GATED, "tie_word_embeddings": True},
    "gpt2": SMALL,
}
REFUSED: dict[str, dict[str, Any]] = {
    "mistral": {**GATED, "sliding_window": 4096},
    "gemma3_text": {**GATED, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4096},
    "gemma2": GATED,
    "bloom": SMALL,
    "rwkv": {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 2},
}
"""Models with windows wider than any sample here, in all layers or some, with soft caps, with biases of
positions, and a recurrent one.
"""

each_model = pytest.mark.parametrize("kind", CONFIGS)


def made(kind: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    with torch.device("meta"):
        model: Any = transformers_lm.build({"model_type": kind, **CONFIGS[kind], **more})
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    model.init_weights()
    # not the small initial values, with which nothing depends much on anything
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model.to(dtype)


@each_model
def test_losses_and_gradients_are_those_of_the_documents_alone(kind: str) -> None:
    assert_kept_apart(made(kind))


@each_model
@pytest.mark.parametrize("fuses", [False, True])
def test_the_loss_asks_for_no_token_of_the_next_document(kind: str, fuses: bool) -> None:
    model, (texts, batch) = made(kind, torch.float32), samples()
    assert hasattr(model, "fuses_loss")
    model.fuses_loss = fuses  # type: ignore[assignment]
    expected, targets = one_by_one(model, texts)
    loss, count = next_token(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert count == targets


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@each_model
def test_flex_attention_keeps_them_apart(kind: str) -> None:
    """The job may choose it for a model without dropout of attention and with heads that are large enough,
    and for no other.
    """
    model, (_, batch) = made(kind, torch.float32), samples()
    with torch.no_grad():
        expected = packed(model, batch)
        model.attends_in_documents = Kernel.FLEX  # type: ignore[assignment]
        torch.testing.assert_close(packed(model, batch), expected, rtol=1e-5, atol=0)
    rate = {"attn_pdrop": 0.1} if kind == "gpt2" else {"attention_dropout": 0.1}
    assert not hasattr(made(kind, **rate), "attends_in_documents")
    assert not hasattr(made(kind, num_attention_heads=8, head_dim=8), "attends_in_documents")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of documents of 1 to 34 tokens."""
    path, draw = tmp_path_factory.mktemp("tokens"), torch.Generator().manual_seed(7)
    lengths = torch.randint(0, 34, (60,), generator=draw).tolist()
    documents = numbered(
        *([*torch.randint(0, 28, (length,), generator=draw).tolist(), 28] for length in lengths)
    )
    write_dataset(ObjectStore.open(str(path)), documents, Coding("words", 29, 28))
    return path


def job_on(tokens: Path, bucket: Path, config: dict[str, Any], documents: bool = True) -> Any:
    data = {"args": {"path": str(tokens), "seq_len": 16, "documents": documents}}
    return toy_job(
        bucket, model="elastic.models.transformers_lm:build", model_args={"config": config}, data=data
    )


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_cannot_keep_them_apart_is_refused_before_a_worker_starts(
    tokens: Path, tmp_path: Path, kind: str
) -> None:
    """The control: without documents it is not."""
    config = {"model_type": kind, **REFUSED[kind]}
    said = (
        rf"^data\.args\.documents = true: this '{kind}' of transformers .* the documents of a sample "
        r"cannot be kept apart; set data\.args\.documents to false, or use a model"
    )
    with pytest.raises(ModelError, match=said):
        preflight(job_on(tokens, tmp_path, config))
    preflight(job_on(tokens, tmp_path, config, documents=False))


@each_model
def test_a_model_that_can_is_not(tokens: Path, tmp_path: Path, kind: str) -> None:
    preflight(job_on(tokens, tmp_path, {"model_type": kind, **CONFIGS[kind]}))


class Plain(nn.Linear):
    """A user's model that knows nothing of documents."""

    def init_weights(self) -> None:
        self.reset_parameters()


def built() -> nn.Module:
    return Plain(4, 4)


def test_any_other_model_that_takes_no_documents_is_refused_there_too(tokens: Path, tmp_path: Path) -> None:
    job = job_on(tokens, tmp_path, {}).replace(model=f"{__name__}:built", model_args={})
    with pytest.raises(ModelError, match=r"forward\(\) of Plain has no argument 'documents'"):
        preflight(job)


def test_worlds_end_with_the_same_bits(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    """The control: with documents that are not kept apart, the weights are others."""
    config = {"model_type": "qwen3", **CONFIGS["qwen3"]}
    runs = [train(ranks, job_on(tokens, tmp_path / str(n), config), Layout(1, n), 2) for n in (1, 2)]
    assert runs[0].hash == runs[1].hash
    assert (
        train(ranks, job_on(tokens, tmp_path / "plain", config, documents=False), Layout(1, 1), 2).hash
        != runs[0].hash
    )


def test_the_engine_chooses_for_them(tmp_path: Path) -> None:
    model = made("llama")
    apply_kernels(model, torch.device("cuda"), toy_job(tmp_path, compile=True))
    assert model.attends_in_documents is Kernel.FLEX
