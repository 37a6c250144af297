"""L9: what users get wrong in a model, a loss and data ends before the first step, with one sentence that
names their line.
"""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from actors.cli import main
from elastic.engine.loss import next_token
from tests.support.commands import ROOT
from tests.support.job_file import to_toml
from tests.support.toys import Own, Sums, small_job, toy_job

HERE = "tests.train.test_mistakes"
FRAME = r"\(in \S+/test_mistakes\.py, line \d+\)"


def mean(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    total, terms = next_token(model, batch)
    return total / terms


def mean_and_one(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    total, terms = next_token(model, batch)
    return total / terms, 1


def detached(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    total, terms = next_token(model, batch)
    return total.detach(), terms


def not_a_number(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    total, terms = next_token(model, batch)
    return total / 0 * 0, terms


def counted_in_words(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return next_token(model, batch)[0], "16"


def no_terms(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return next_token(model, batch)[0], 0


def other_names(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return next_token(model, {"tokens": batch["input_ids"]})


class Listed(Sums):
    def read(self, ids: tuple[int, ...]) -> Any:
        return list(super().read(ids).values())


class Shorter(Sums):
    def read(self, ids: tuple[int, ...]) -> Any:
        return {"tokens": super().read(ids)["tokens"][:-1]}


class Floats(Sums):
    def read(self, ids: tuple[int, ...]) -> Any:
        return {"tokens": super().read(ids)["tokens"].float()}


class OtherKeys(Sums):
    calls = count()

    def read(self, ids: tuple[int, ...]) -> Any:
        return super().read(ids) | {f"extra {next(self.calls)}": torch.zeros(len(ids))}


class Broken(Sums):
    def read(self, ids: tuple[int, ...]) -> Any:
        raise OSError("the disk is gone")


class NoLength:
    def read(self, ids: tuple[int, ...]) -> Any:
        return {"tokens": torch.zeros(len(ids), 17, dtype=torch.int64)}

    def fingerprint(self) -> str:
        return "none"


class NoFingerprint:
    def __len__(self) -> int:
        return 64

    def read(self, ids: tuple[int, ...]) -> Any:
        return {"tokens": torch.zeros(len(ids), 17, dtype=torch.int64)}


class Wrong(Own):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(super().forward(tokens))  # 29 columns into a matrix of 19 rows


class Turned(Own):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).transpose(0, 1)


def turned(**args: Any) -> nn.Module:
    return Turned(**args)


def wrong_shapes(**args: Any) -> nn.Module:
    return Wrong(**args)


class Raising(Own):
    def forward(self, tokens: Tensor) -> Tensor:
        raise ValueError("a mistake of my own")


def raising(**args: Any) -> nn.Module:
    return Raising(**args)


_layers = count(2)


def another_each_time(**args: Any) -> nn.Module:
    return Own(layers=next(_layers), **args)


def nothing(**args: Any) -> None:
    return None


def failing(**args: Any) -> nn.Module:
    return nn.Linear(args["hidden"], 3)


def no_init(**args: Any) -> nn.Module:
    return nn.Linear(3, 3)


def own(**args: Any) -> nn.Module:
    return Own(**args)


class Frozen(Own):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def frozen(**args: Any) -> nn.Module:
    return Frozen(**args)


def half(**args: Any) -> nn.Module:
    return Own(**args).half()


def sparse(**args: Any) -> nn.Module:
    model = Own(**args)
    model.embed = nn.Embedding(29, 19, sparse=True)
    return model


class Greedy(Own):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * torch.empty(10**15)[0]


class Elsewhere(Own):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * torch.ones(29).cuda()


def greedy(**args: Any) -> nn.Module:
    return Greedy(**args)


def elsewhere(**args: Any) -> nn.Module:
    return Elsewhere(**args)


MISTAKES = {
    "loss is of Python": (
        {"loss": "builtins:len"},
        (
            r"loss = 'builtins:len' failed with TypeError: len\(\) "
            r".*; it gets the model and a"
        ),
    ),
    "model takes too much memory": (
        {"model": "greedy"},
        rf"can't allocate memory.* {FRAME}; .* lower microbatch, set recompute to 'block'",
    ),
    "model takes another device": (
        {"model": "elsewhere"},
        (
            rf"CUDA.* {FRAME}; .* register it as a buffer "
            r"\(self\.register_buffer"
        ),
    ),
    "loss is one mean": (
        {"loss": "mean"},
        (
            r"loss = '\S+:mean' returned a tensor of shape \[\]; it must "
            r"return \(sum, count\)"
        ),
    ),
    "loss is a mean and 1": (
        {"loss": "mean_and_one"},
        (
            r"loss = '\S+': for 2 samples it returns the count 1, but the two halves have the counts 1 "
            r"and 1"
        ),
    ),
    "loss is detached": (
        {"loss": "detached"},
        (r"loss = '\S+:detached' returned a sum without a gradient: the sum was detached"),
    ),
    "loss is NaN": (
        {"loss": "not_a_number"},
        (
            r"with the weights of init_weights\(\) the first microbatch "
            r"loses nan"
        ),
    ),
    "count is a text": (
        {"loss": "counted_in_words"},
        (
            r"returned \(a tensor of shape \[\], str '16'\); it "
            r"must return \(sum, count\)"
        ),
    ),
    "count is 0": (
        {"loss": "no_terms"},
        (
            r"the first microbatch loses 9\d\.\d+, and the count is 0; it must "
            r"return"
        ),
    ),
    "loss asks for another name": (
        {"loss": "other_names"},
        (
            rf"failed with KeyError: 'input_ids' {FRAME}; "
            r".* a batch of \['tokens'\]"
        ),
    ),
    "read returns a list": (
        {"data": "Listed"},
        (
            r"data\.dataset = '\S+:Listed': read\(\) returned a list for the 2 ids \[\d+, \d+\]; it must return "
            r"a dictionary"
        ),
    ),
    "read returns too few rows": (
        {"data": "Shorter"},
        (
            r"read\(\) returned 'tokens' of shape \[1, 17\] for "
            r"the 2 ids"
        ),
    ),
    "read returns floats": (
        {"data": "Floats"},
        r"FloatTensor .* \(in \S+, line \d+\); .* 'tokens' \[2, 17\] of float32",
    ),
    "read returns other names": (
        {"data": "OtherKeys"},
        r"torch\.float32 \[2\] as 'extra \d', and at the next call nothing; it must",
    ),
    "read raises": (
        {"data": "Broken"},
        (
            r"samples \[\d+, \d+\] cannot be read: OSError: the disk is gone "
            rf"{FRAME}"
        ),
    ),
    "dataset has no length": (
        {"data": "NoLength"},
        (
            r"data\.dataset = '\S+:NoLength' has no __len__\(\); a dataset has len\(\), read\(ids\), "
            r"fingerprint\(\)"
        ),
    ),
    "dataset has no fingerprint": (
        {"data": "NoFingerprint"},
        (
            r"data\.dataset = '\S+:NoFingerprint' has no "
            r"fingerprint\(\)"
        ),
    ),
    "model has wrong shapes": (
        {"model": "wrong_shapes"},
        rf"RuntimeError: mat1 .* {FRAME}; the microbatch had 'tokens' \[2, 17\]",
    ),
    "model returns the sequence first": (
        {"model": "turned"},
        (
            r"the model returned a tensor of shape \[16, 2, \d+\] and float32 for tokens \[2, 16\], "
            r"but loss = .* needs a tensor of logits"
        ),
    ),
    "model raises": ({"model": "raising"}, rf"ValueError: a mistake of my own {FRAME}"),
    "model is another each time": (
        {"model": "another_each_time"},
        (
            r"builds another model at each call: the "
            r"parameter 'layers\.\d"
        ),
    ),
    "model is none": ({"model": "nothing"}, r"returned a NoneType; it must return a torch.nn.Module"),
    "model does not know its arguments": (
        {"model": "failing"},
        (
            rf"failed with KeyError: 'hidden' {FRAME}; "
            r"correct the arguments"
        ),
    ),
    "model has no init_weights": ({"model": "no_init"}, r"has no init_weights\(\) method; add a method"),
    "eps is 0 in the model's format": (
        {"model": "half"},
        (
            r"optim\.eps = 1e-08 is 0 in float16, the format of '\S+' in '\S+:half', so an update would divide "
            r"by zero; keep the weights"
        ),
    ),
    "gradients are sparse": (
        {"model": "sparse"},
        (
            r"'embed' of '\S+:sparse' has sparse = True, .* leave "
            r"sparse out"
        ),
    ),
    "nothing learns": (
        {"model": "frozen"},
        (
            r"returned a sum without a gradient: .* no parameter of "
            r".*:frozen"
        ),
    ),
}


def written(folder: Path, parts: dict[str, str]) -> str:
    changes: dict[str, Any] = {
        name: parts.get(name, default) for name, default in (("model", "own"), ("loss", ""))
    }
    changes = {name: code if ":" in code else f"{HERE}:{code}" for name, code in changes.items()}
    if "loss" not in parts:
        del changes["loss"]
    data = (
        {"dataset": f"{HERE}:{parts['data']}"} if "data" in parts else {"dataset": "tests.support.toys:Sums"}
    )
    job = toy_job(folder / "bucket", name="wrong", model_args={}, data=data, steps=4, **changes)
    path = folder / "job.toml"
    path.write_text(to_toml(job))
    return str(path)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_l9_a_mistake_ends_before_the_first_step_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """L9.  The user's own frame is in the sentence where an error was raised in their code; the control
    follows below.
    """
    monkeypatch.chdir(tmp_path)
    parts, said = MISTAKES[mistake]
    assert main(["train", written(tmp_path, parts), "--local"]) == 1
    shown = capsys.readouterr()
    last, text = shown.out.splitlines()[-1], shown.out + shown.err
    assert last.startswith("elastic: ") and re.search(said, last), text
    assert not re.search(r"step +\d+/", text), "no step was done"
    assert not re.search(rf'File "{ROOT}/(elastic|actors|storage)/', text), (
        f"a traceback has no frames of ours: {text}"
    )


def gradient_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """A right loss, which differentiates by itself: it fails without gradients."""
    total, terms = next_token(model, batch)
    (grad,) = torch.autograd.grad(total, [next(model.parameters())], create_graph=True)
    return total + grad.square().sum() * 0, terms


@pytest.mark.parametrize(
    "parts", [{}, {"loss": "gradient_penalty"}], ids=["own model", "a loss that differentiates"]
)
def test_the_control_without_a_mistake_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", written(tmp_path, parts), "--local"]) == 0


def test_l9_another_name_is_taken_while_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L9: a mistake burns no name.  The control: once there is a checkpoint, other settings need a word."""
    monkeypatch.chdir(ROOT)
    losses = ("mean", "mean_and_count", "mean_and_one")
    wrong, right, another = (
        to_toml(small_job(tmp_path / "bucket", steps=2, loss=f"{HERE}:{loss}")) for loss in losses
    )
    for text, code, said in (
        (wrong, 1, "it must return (sum, count)"),
        (right, 0, "toy has saved no step yet, so it begins anew at step 0, as branch 2: loss = "),
        (another, 1, "has other settings"),
    ):
        (tmp_path / "job.toml").write_text(text)
        assert main(["train", str(tmp_path / "job.toml"), "--local"]) == code
        assert said in capsys.readouterr().out


def mean_and_count(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return next_token(model, batch)
