"""U5: a model of transformers goes on from weights in a folder, whole or by LoRA, with the library and peft
as judges.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from elastic.data.cursor import Cursor
from elastic.errors import ModelError
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.runs.run import Run
from elastic.train.checks.preflight import preflight
from elastic.train.model import build_model, builder_of
from tests.support.chaos import alone
from tests.support.ranks import Ranks
from tests.support.segments import train
from tests.support.toys import Sums, toy_job

transformers = pytest.importorskip(
    "transformers", reason="the library whose models are trained is not installed"
)
STEPS = 6
LM = "elastic.models.transformers_lm:build"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A tiny Llama that transformers made and saved."""
    torch.manual_seed(5)
    shape = {
        "vocab_size": 29,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    config = transformers.LlamaConfig(**shape, pad_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def judged(model: nn.Module, job: Job, logits: Callable[[Tensor], Tensor], seed: int = 0) -> list[float]:
    """Trains with torch alone on the same samples, a whole batch at a time."""
    (beta1, beta2), trained = (
        job.optim.betas,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
    )
    optimizer = torch.optim.AdamW(trained, lr=job.optim.lr, betas=(beta1, beta2), weight_decay=0.0)
    dataset, found = Sums(**job.data.args), []
    cursor = Cursor(len(dataset), int(job.global_batch), seed)
    for step in range(1, job.steps + 1):
        tokens = dataset.read(cursor.ids(step))["tokens"]
        inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:]
        optimizer.zero_grad()
        mean = F.cross_entropy(logits(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1)
        mean.backward()
        nn.utils.clip_grad_norm_(trained, job.optim.clip_norm)
        optimizer.step()
        found.append(mean.item())
    return found


def job_of(bucket: Path, **settings: Any) -> Job:
    optim = {"lr": 1e-2, "weight_decay": 0.0}
    return toy_job(bucket, steps=STEPS, **{"optim": optim, "schedule": {"kind": "constant"}, **settings})


def test_u5_a_run_begins_with_the_weights_of_a_folder(folder: str, tmp_path: Path) -> None:
    """U5: the losses are those of the library's ``from_pretrained`` and torch.  The control: without
    ``pretrained`` they are others.
    """
    job = job_of(tmp_path / "a", model=LM, model_args={"path": folder, "pretrained": True})
    losses = alone(job).losses
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = judged(theirs, job, lambda inputs: theirs(inputs).logits)
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    control = alone(job_of(tmp_path / "b", model=LM, model_args={"path": folder})).losses
    with pytest.raises(AssertionError):
        torch.testing.assert_close(control, wanted, rtol=1e-3, atol=1e-5)


def exported(job: Job) -> dict[str, Tensor]:
    run = Run.open(job)
    version = run.newest()
    assert version is not None
    files = run.checkpoints.export(version, Path(job.bucket) / "exported")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_u5_lora_trains_adapters_alone(folder: str, tmp_path: Path, ranks: Ranks) -> None:
    """U5: frozen bytes are those of the folder, and only adapters have moments; the losses are those of peft
    and torch.

    The bits are the same for two workers, with whole and with cut state.  The control: the adapters
    themselves have changed.
    """
    peft = pytest.importorskip("peft", reason="the library that adds the adapters is not installed")
    settings = {"model": "examples.lora:build", "model_args": {"path": folder, "rank": 4}}
    job = job_of(tmp_path / "a", **settings)
    here = alone(job)
    for layout in (Layout(1, 1), Layout(1, 2), Layout(2, 1)):
        assert train(ranks, job_of(tmp_path / str(layout), **settings), layout, STEPS).hash == here.hash, (
            layout
        )

    torch.manual_seed(0)
    ours = builder_of(job)(**job.model_args)
    ours.init_weights()
    begun = {
        name: parameter.detach().clone()
        for name, parameter in ours.named_parameters()
        if parameter.requires_grad
    }
    assert len(begun) == 8 and all("lora_" in name for name in begun)
    ended = exported(job)
    before = load_file(Path(folder) / "model.safetensors")
    frozen = {name: tensor for name, tensor in ended.items() if name.replace(".base_layer.", ".") in before}
    assert len(frozen) == len(before) and all(
        torch.equal(each, before[name.replace(".base_layer.", ".")]) for name, each in frozen.items()
    )
    moments = {name for name in ended if "exp_avg" in name}
    assert len(moments) == 2 * len(begun) and all("lora_" in name for name in moments)
    assert not any(torch.equal(ended[name], value) for name, value in begun.items())

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    )
    theirs.load_state_dict({f"base_model.model.{name}": value for name, value in begun.items()}, strict=False)
    torch.testing.assert_close(
        here.losses, judged(theirs, job, lambda inputs: theirs(inputs).logits), rtol=1e-4, atol=1e-5
    )
    assert here.losses[-1] < here.losses[0]


def careless(path: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.fast
def test_u5_from_pretrained_in_build_gets_a_sentence(folder: str, tmp_path: Path) -> None:
    """U5: it says what to do.  The control: another error of a builder gets the usual words."""
    job = toy_job(tmp_path, model=f"{__name__}:careless", model_args={"path": folder})
    with pytest.raises(
        ModelError,
        match=(r"built on the meta device, .* read the weights in init_weights\(\); .* pretrained = true"),
    ):
        build_model(job, careless)
    with pytest.raises(ModelError, match=r"correct the arguments, or the model$"):
        build_model(toy_job(tmp_path, model=job.model, model_args={"path": 3}), careless)


@pytest.mark.fast
def test_u5_weights_that_do_not_fit_are_refused_before_any_worker(folder: str, tmp_path: Path) -> None:
    """U5: each gets a sentence with the tensor, or the folder."""

    def refused(said: str, **model_args: Any) -> None:
        with pytest.raises(ModelError, match=said):
            preflight(toy_job(tmp_path / "run", model=LM, model_args={"pretrained": True, **model_args}))

    refused("pretrained = true needs path", config={"model_type": "llama"})
    wide = {"vocab_size": 31}
    refused(
        r"'model.embed_tokens.weight' has the shape \[29, 32\] in .*, and \[31, 32\] in the model",
        path=folder,
        config=wide,
    )
    refused(
        r"have no 'model.layers.2.\S+', which the model needs", path=folder, config={"num_hidden_layers": 3}
    )
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    refused(
        rf"'{re.escape(str(tmp_path / 'bare'))}' has no \*\.safetensors files, .*hf download",
        path=str(tmp_path / "bare"),
    )


@pytest.mark.fast
def test_u5_weights_in_several_files_and_another_format(folder: str, tmp_path: Path) -> None:
    """U5: bf16 in two files gives the float32 values of bf16."""
    from elastic.models import transformers_lm

    stored = {
        name: tensor.bfloat16() for name, tensor in load_file(Path(folder) / "model.safetensors").items()
    }
    names = sorted(stored)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    for number, part in enumerate((names[:5], names[5:])):
        save_file({name: stored[name] for name in part}, tmp_path / "two" / f"model-{number}.safetensors")
    model = transformers_lm.build(path=str(tmp_path / "two"), pretrained=True)
    model.init_weights()
    assert all(torch.equal(parameter, stored[name].float()) for name, parameter in model.named_parameters())
