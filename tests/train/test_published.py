"""An export is a folder that transformers and peft open: the libraries are the judges where they are
installed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.cli.checkpoint_commands import export
from elastic.data.prepare import prepare
from elastic.data.text_sources import Document
from elastic.data.tokenizer import Bytes, files_of, read_tokenizer
from elastic.errors import ElasticError, JobError
from elastic.job import Job
from elastic.models import gpt2, llama
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.errands import restored
from tests.support.toys import toy_job

TEXT = "What is a llama, and what is a qwen? Größe: 漢字 🎉\n" * 40
SMALL = {"vocab": 61, "dim": 32, "layers": 2, "heads": 4}
PRESETS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], str]] = {
    "llama": (
        llama.build,
        {**SMALL, "kv_heads": 2, "tied": False, "rope_base": 500_000, "rope_scaling": [8, 1, 4, 8]},
        "LlamaForCausalLM",
    ),
    "plain": (llama.build, SMALL, "LlamaForCausalLM"),
    "qwen3": (
        llama.build,
        {**SMALL, "head_dim": 16, "qk_norm": True, "norm_eps": 1e-6, "rope_base": 1e6},
        "Qwen3ForCausalLM",
    ),
    "gpt2": (gpt2.build, {**SMALL, "length": 24}, "GPT2LMHeadModel"),
    "post": (gpt2.build, {**SMALL, "length": 24, "norm": "post"}, "OpenAIGPTLMHeadModel"),
}
LM = "elastic.models.transformers_lm:build"
TINY = {
    **{
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    **{"intermediate_size": 48, "pad_token_id": None},
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets of the same text: its bytes, and tokens of a BPE."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(TEXT)
    prepare(folder / "text", str(folder / "bytes"))
    prepare(folder / "text", str(folder / "bpe"), bpe=290)
    return folder


def trained(folder: Path, model: Any, args: dict[str, Any], data: Any = None) -> Job:
    """Returns a job that has made two steps, on samples of a dataset or of the toy."""
    optim = {"lr": 1e-2, "weight_decay": 0.0}
    own = (
        {}
        if data is None
        else {
            "data": {
                "dataset": "elastic.data.tokens:TokenDataset",
                "args": {"path": str(data), "seq_len": 16},
            }
        }
    )
    settings = {
        "model": model,
        "model_args": args,
        "steps": 2,
        "global_batch": 4,
        "microbatch": 2,
        "optim": optim,
        **own,
    }
    job = toy_job(folder, **settings)
    assert run_local(job, lambda line: None)[0] == "Finished"
    return job


def ours(job: Job) -> nn.Module:
    run = Run.begun(job)
    version = run.newest()
    assert version is not None
    return restored(job, run.checkpoints.open(version))


def exported(job: Job, folder: Path, **how: Any) -> Path:
    export(job, folder, None, **how)
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def agree(theirs: Any, model: nn.Module, words: int = 61) -> None:
    """The logits agree; the control: of other weights they do not."""
    tokens = torch.randint(0, words, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        torch.testing.assert_close(theirs.eval()(input_ids=tokens).logits, expected, rtol=1e-5, atol=1e-5)
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        assert not torch.allclose(theirs(input_ids=tokens).logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", PRESETS)
def test_transformers_opens_our_own_models(kind: str, tmp_path: Path) -> None:
    """The logits are those of our model; the plain export keeps our names."""
    transformers = pytest.importorskip("transformers", reason="the judge is not installed")
    build, args, name = PRESETS[kind]
    job = trained(tmp_path / "run", f"{build.__module__}:build", args)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        exported(job, tmp_path / "a", transformers=True), output_loading_info=True
    )
    assert type(theirs).__name__ == name and not any(report.values())
    agree(theirs, ours(job))
    assert "embedding.weight" in load_file(exported(job, tmp_path / "b") / "model.safetensors")
    assert not (tmp_path / "b" / "config.json").exists()


@pytest.mark.fast
@pytest.mark.parametrize("kind", PRESETS)
def test_names_and_fields_of_our_own_models(kind: str) -> None:
    """Each tensor has another name than any other, and matrices of GPT-2 are transposed."""
    build, args, name = PRESETS[kind]
    model = build(**args)
    found = model.as_transformers()  # type: ignore[operator]
    shapes = {key: each.shape for key, each in model.named_parameters()}
    names = found.names(shapes)
    assert (
        found.config["architectures"] == [name] and json.loads(json.dumps(found.config))["vocab_size"] == 61
    )
    assert found.config.get("max_position_embeddings") == (64 if kind == "llama" else None)
    assert sorted(own for own, _ in names.values()) == sorted(shapes) and len(names) == len(shapes)
    first, second = (
        ("transformer.h.1.mlp.c_fc", "layers.1.w1")
        if build is gpt2.build
        else ("model.layers.1.mlp.gate_proj", "layers.1.feed_forward.w1")
    )
    assert names[f"{first}.weight"] == (f"{second}.weight", build is gpt2.build)


def test_an_export_of_transposed_names(tmp_path: Path) -> None:
    """The bytes are those of the plain export, as torch transposes them."""
    build, args, _ = PRESETS["gpt2"]
    job = trained(tmp_path / "run", f"{build.__module__}:build", args)
    plain = load_file(exported(job, tmp_path / "a") / "model.safetensors")
    turned = load_file(exported(job, tmp_path / "b", transformers=True) / "model.safetensors")
    assert len(turned) == len(plain) and turned["transformer.h.0.attn.c_attn.weight"].shape == (32, 96)
    assert torch.equal(turned["transformer.h.0.attn.c_attn.weight"], plain["layers.0.attention.qkv.weight"].T)
    assert torch.equal(turned["transformer.wte.weight"], plain["embedding.weight"])
    config = read(tmp_path / "b" / "config.json")
    assert (config["n_embd"], config["n_layer"], config["dtype"], config["eos_token_id"]) == (
        32,
        2,
        "float32",
        None,
    )


class Derived(llama.Llama):
    """A model that may compute something else."""


def derived() -> nn.Module:
    return Derived(**SMALL)


def test_a_model_that_is_none_of_transformers_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written then.  The plain export has neither a config nor a note."""
    for name, model in (("own", "tests.support.toys:own"), ("derived", derived)):
        job = trained(tmp_path / name, model, {})
        with pytest.raises(
            ElasticError, match=r"--transformers: model = .* has no equivalent in transformers"
        ):
            export(job, tmp_path / "no", None, transformers=True)
        assert not (tmp_path / "no").exists()
        capsys.readouterr()
        there = sorted(each.name for each in exported(job, tmp_path / f"{name}-plain").iterdir())
        assert (
            there == ["model.safetensors", "optimizer.safetensors"] and "note" not in capsys.readouterr().out
        )


def test_the_weights_are_written_without_code_and_data(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note says what is not there; --transformers needs the code.  The control: with both there is no note."""
    shutil.copytree(texts / "bytes", tmp_path / "data")
    job = trained(tmp_path / "run", f"{__name__}:failing", {**SMALL, "vocab": 257}, tmp_path / "data")
    capsys.readouterr()
    assert (
        len([*exported(job, tmp_path / "a", transformers=True).iterdir()]) == 6
        and "note" not in capsys.readouterr().out
    )
    shutil.rmtree(tmp_path / "data")
    monkeypatch.setitem(globals(), "FAILS", True)
    there = sorted(each.name for each in exported(job, tmp_path / "b").iterdir())
    assert there == ["model.safetensors", "optimizer.safetensors"]
    assert "without the files of a tokenizer: data.args.path = " in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ElasticError, match="the code is not as it was"):
        export(job, tmp_path / "c", None, transformers=True)


FAILS = False


def failing(**args: Any) -> nn.Module:
    if FAILS:
        raise RuntimeError("the code is not as it was")
    return llama.build(**args)


@pytest.mark.parametrize("coding", ["bytes", "bpe"])
def test_auto_tokenizer_opens_the_export(coding: str, texts: Path, tmp_path: Path) -> None:
    """It gives the tokens of the dataset, and text ends with its end of a document, also for a model of ours."""
    transformers = pytest.importorskip("transformers", reason="the judge is not installed")
    pytest.importorskip("tokenizers")
    job = trained(tmp_path / "run", "elastic.models.llama:build", {**SMALL, "vocab": 300}, texts / coding)
    folder = exported(job, tmp_path / "out", transformers=True)
    encoder = Bytes() if coding == "bytes" else read_tokenizer(texts / "bpe" / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ((_, tokens),) = encoder.encode([Document("text", TEXT.encode())])
    assert (
        tokenizer(TEXT)["input_ids"] == tokens[:-1].tolist()
        and tokenizer.decode(tokens[:-1].tolist()) == TEXT
    )
    assert (
        tokenizer.eos_token_id
        == encoder.coding.end_of_document
        == read(folder / "config.json")["eos_token_id"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (
        model.generation_config.eos_token_id == encoder.coding.end_of_document
        and model.config.max_position_embeddings == 16
    )
    assert model.generate(**tokenizer("What", return_tensors="pt"), max_new_tokens=3).shape[1] > 3


@pytest.mark.fast
def test_the_byte_tokenizer_as_a_file() -> None:
    """Each byte has a letter of its own, and its token is the byte."""
    files = files_of(Bytes())
    definition = json.loads(files["tokenizer.json"])
    assert sorted(definition["model"]["vocab"].values()) == [*range(256)] and definition["model"]["vocab"][
        "A"
    ] == ord("A")
    assert definition["model"]["merges"] == [] and [each["id"] for each in definition["added_tokens"]] == [
        256
    ]
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == definition["added_tokens"][0]["content"]
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    for text in (TEXT, "".join(map(chr, range(0x250)))):
        assert (
            bytes(tokenizer.encode(text).ids) == text.encode() and tokenizer.decode([*text.encode()]) == text
        )


def test_a_model_of_transformers_has_its_config_beside_it(texts: Path, tmp_path: Path) -> None:
    """The library opens it with the same logits, and ends texts as the data does.  Files that are there
    already are refused.
    """
    transformers = pytest.importorskip("transformers", reason="the library is not installed")
    job = trained(tmp_path / "run", LM, {"config": TINY}, texts / "bytes")
    folder = exported(job, tmp_path / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert (
        not any(report.values())
        and theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 256
    )
    agree(theirs, ours(job), 256)
    assert (
        read(folder / "config.json")["architectures"] == ["LlamaForCausalLM"]
        and "elastic" not in (folder / "config.json").read_text()
    )
    plain, named = (
        exported(job, tmp_path / name, transformers=name == "named") for name in ("plain", "named")
    )
    assert (plain / "model.safetensors").read_bytes() == (named / "model.safetensors").read_bytes()
    for each in ("model", "optimizer"):
        (folder / f"{each}.safetensors").unlink()
    with pytest.raises(JobError, match=r"has (?!model).*config\.json.* already"):
        export(job, folder, None)


class Wrapped(nn.Module):
    """A user's module that has a model of transformers in it, and with ``more`` something beside that;
    ``tied`` is not by its config.
    """

    def __init__(self, more: bool = False, tied: bool = False, wider: bool = False) -> None:
        import transformers

        super().__init__()
        self.inner = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**TINY))
        if more:
            self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.inner.lm_head.weight = self.inner.model.embed_tokens.weight
        if wider:
            self.inner.lm_head = nn.Linear(32, 303, bias=False)

    def init_weights(self) -> None:
        self.inner.init_weights()
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.inner(tokens, use_cache=False).logits
        return found * self.scale if hasattr(self, "scale") else found


def wrapped(**args: Any) -> nn.Module:
    return Wrapped(**args)


@pytest.mark.parametrize(
    "args", [{}, {"tied": True}, {"more": True}, {"wider": True}], ids=["whole", "tied", "more", "wider"]
)
def test_a_model_with_one_of_transformers_in_it(
    args: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only --transformers takes the names of the model inside, and only if that has all parameters, as its
    config says.
    """
    transformers = pytest.importorskip("transformers", reason="the library is not installed")
    job = trained(tmp_path / "run", f"{__name__}:wrapped", args)
    capsys.readouterr()
    there = sorted(each.name for each in exported(job, tmp_path / "plain").iterdir())
    assert there == [
        "model.safetensors",
        "optimizer.safetensors",
    ] and "from_pretrained cannot open this export" in " ".join(capsys.readouterr().out.split())
    if args.keys() & {"more", "wider"}:
        said = (
            r"'scale' is outside of the LlamaForCausalLM"
            if "more" in args
            else r"built from the config has no 'lm_head.weight', or one of another shape"
        )
        with pytest.raises(ElasticError, match=said):
            export(job, tmp_path / "named", None, transformers=True)
        return
    folder = exported(job, tmp_path / "named", transformers=True)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    agree(theirs, ours(job), 29)


def adapted(path: str, head: str = "", other: bool = False) -> nn.Module:
    """The example's model; with ``head`` that module is trained whole and kept by peft, with ``other`` a norm
    trains and is not kept.
    """
    from peft import LoraConfig, inject_adapter_in_model

    from elastic.models import transformers_lm
    from examples.lora import name_in_files

    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=[head] if head else None
    )
    model = inject_adapter_in_model(config, transformers_lm.build(path=path))
    model.model.norm.weight.requires_grad_(other)
    return transformers_lm.with_weights(
        model,
        path,
        lambda name: (
            "" if "modules_to_save" in name else name_in_files(name).replace(".original_module.", ".")
        ),
    )


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A tiny model that transformers made and saved, with a tokenizer and what it samples by."""
    transformers = pytest.importorskip("transformers", reason="the library is not installed")
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    model.generation_config.do_sample, model.generation_config.top_k = True, 7
    model.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize("head", ["", "lm_head"], ids=["example", "saved"])
def test_peft_opens_adapters(head: str, base: str, tmp_path: Path) -> None:
    """It puts them on the folder that training began with, with the same logits, and so does transformers.
    The control: the base alone.
    """
    transformers, peft = (
        pytest.importorskip("transformers"),
        pytest.importorskip("peft", reason="the library is not installed"),
    )
    build = f"{__name__}:adapted" if head else "examples.lora:build"
    job = trained(tmp_path / "run", build, {"path": base, **({"head": head} if head else {"rank": 4})})
    folder, tokens = exported(job, tmp_path / "out"), torch.randint(0, 29, (2, 16))
    assert sorted(each.name for each in folder.iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "model.safetensors", "optimizer.safetensors")
    ]
    about, tensors = read(folder / "adapter_config.json"), load_file(folder / "adapter_model.safetensors")
    assert (about["r"], about["base_model_name_or_path"], about["task_type"], about["peft_type"]) == (
        4,
        base,
        "CAUSAL_LM",
        "LORA",
    )
    assert tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"].shape == (4, 32)
    assert len(tensors) == 8 + bool(head)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        expected, control = ours(job)(tokens), plain(tokens).logits
        theirs = peft.PeftModel.from_pretrained(plain, folder)
        torch.testing.assert_close(theirs.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        whole = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(whole.eval()(tokens).logits, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(control, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of peft
def test_what_trains_beside_adapters_is_told(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="the library is not installed")
    job = trained(tmp_path / "run", f"{__name__}:adapted", {"path": base, "other": True})
    capsys.readouterr()
    folder = exported(job, tmp_path / "out")
    said = " ".join(capsys.readouterr().out.split())
    assert "'model.norm.weight' is trained, but is not part of peft's adapters" in said
    assert not list(folder.glob("adapter*"))


def test_what_training_does_not_change_comes_from_the_folder_it_began_with(
    base: str, texts: Path, tmp_path: Path
) -> None:
    """It is how a model samples, and the tokenizer's settings if it is that of the data.  The control: the
    tokenizer of another text.
    """
    transformers = pytest.importorskip("transformers", reason="the library is not installed")
    pytest.importorskip("tokenizers")
    (Path(base) / "tokenizer.json").write_bytes((texts / "bpe" / "tokenizer.json").read_bytes())
    (Path(base) / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "chat_template": "{{ messages }}",
            }
        )
    )
    for coding, template in (("bpe", "{{ messages }}"), ("bytes", None)):
        job = trained(tmp_path / coding, LM, {"path": base, "pretrained": True}, texts / coding)
        folder = exported(job, tmp_path / f"{coding}-out")
        assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == template
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert theirs.generation_config.top_k == 7
        agree(theirs, ours(job), 256)
