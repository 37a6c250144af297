"""U1: a new run compares the engine with plain torch, refuses by name what differs, and nothing that is
right.
"""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from elastic.engine.blocks import sharding_table
from elastic.engine.compile import apply_compile
from elastic.errors import DataError, ModelError
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.checks.plain import TorchOptimizer
from elastic.train.checks.shapes import expect_shapes
from elastic.train.model import build_model
from elastic.train.session import make_session
from tests.support.plain_models import (
    ADAMW,
    BF16,
    WIDTH,
    WORDS,
    Assigned,
    Batch,
    Net,
    Numbers,
    counting,
    job_of,
    loss,
    tried,
)
from tests.support.toys import Own, toy_job

HERE = "tests.train.test_trial"

# ---- the trial


class Dotted(Net):
    """Writes through ``.data``, which torch does not count."""

    def before(self, t: Tensor) -> None:
        self.head.weight.data.clamp_(-0.5, 0.5)


class Counting(Net):
    calls = 0

    def before(self, t: Tensor) -> None:
        self.calls += 1


class CountingOwn(Own):
    """It counts its calls, and trains on the samples of :class:`~tests.support.toys.Sums`."""

    calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(tokens)


class Drawing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(1)

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) + torch.rand((), generator=self.draws)


class Averaging(Net):
    """A statistic in an attribute of an object, which nothing reads yet."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"mean": 0.0}

    def before(self, t: Tensor) -> None:
        self.seen["mean"] += 0.1 * (float(t.float().mean()) - self.seen["mean"])


class Centred(Net):
    """A model that the first samples initialise, which are others on each worker."""

    centre: Tensor | None = None

    def forward(self, t: Tensor) -> Tensor:
        x = self.embed(t)
        if self.centre is None:
            self.centre = x.detach().mean((0, 1))
        return self.head(x - self.centre)


class Tabled(Net):
    """A table in a plain attribute, and a module in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.others = torch.ones(3), [nn.Linear(3, 3)]

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) * self.table


class Twice(Net):
    """It uses a norm with statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, t: Tensor) -> Tensor:
        x = self.embed(t).flatten(0, 1)
        return self.head(self.norm(x) + self.norm(2 * x)).view(*t.shape, 3)


class Wide(Net):
    """It makes a tensor in float32 in forward."""

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.embed(t) + torch.ones(WIDTH))


class Sparse(Net):
    def forward(self, t: Tensor) -> Tensor:
        return self.head(F.embedding(t, self.embed.weight, sparse=True))


class Timed(Net):
    """A diffusion model's step, up to 1,000, as a number with a fraction."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(8, WIDTH)

    def forward(self, t: Tensor, when: Tensor) -> Tensor:
        angles = when.float()[:, None] * 0.4 ** torch.arange(4, device=when.device)
        wave = torch.cat((angles.sin(), angles.cos()), 1).to(self.time.weight.dtype)
        return self.head(self.embed(t) + self.time(wave)[:, None])


class TimedByItself(Timed):
    casts_inputs = False


class Times(Numbers):
    def read(self, ids: tuple[int, ...]) -> Batch:
        return super().read(ids) | {"when": torch.tensor([900.0 + 5.6 * (i % 17) for i in ids])}


def loss_of_times(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["t"], batch["when"])
    return F.cross_entropy(out.flatten(0, 1).float(), batch["y"].flatten(), reduction="sum"), batch[
        "y"
    ].numel()


class Rescaled(Net):
    """Halves a weight in evaluation, as RWKV does, by a way that torch does not count."""

    def before(self, t: Tensor) -> None:
        if not self.training:
            self.head.weight.data.mul_(0.5)


class Merged(Net):
    """Changes weights on its way to evaluation and back, as adapters do that are merged."""

    def train(self, mode: bool = True) -> Any:
        if self.training and not mode:
            self.head.weight.data.add_(1.0)
        elif mode and not self.training:
            self.head.weight.data.sub_(1.0)
        return super().train(mode)


class Anchored(Net):
    """Keeps the weights with which it began, and stays near them."""

    start: Tensor | None = None

    def forward(self, t: Tensor) -> Tensor:
        if self.start is None:
            self.start = self.head.weight.detach().clone()
        return super().forward(t) * (1 + (self.head.weight - self.start).square().sum())


class ByNumpy(Net):
    def before(self, t: Tensor) -> None:
        numpy.clip(self.head.weight.detach().numpy(), -0.5, 0.5, out=self.head.weight.detach().numpy())


class Multiplied(Net):
    """Its product has another backward pass where operations are watched."""

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) + self.embed(t).prod(-1, keepdim=True)


class Chosen(Net):
    """One of four experts computes each token, and rounding chooses another one now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(WIDTH, 4),
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
        )

    def forward(self, t: Tensor) -> Tensor:
        x = self.embed(t)
        chosen = self.gate(x).softmax(-1)
        every = torch.stack([expert(x) for expert in self.experts], -1)
        best = chosen.argmax(-1, keepdim=True)
        return self.head(
            x + every.gather(-1, best[..., None, :].expand(*x.shape, 1))[..., 0] * chosen.gather(-1, best)
        )


class Masked(Net):
    """Gives back a mask, from which the loss counts."""

    def forward(self, t: Tensor, mask: Tensor) -> Any:
        return super().forward(t), mask


def loss_by_a_mask(model: nn.Module, batch: Batch) -> Any:
    out, mask = model(batch["t"], torch.ones(1027))
    return F.cross_entropy(out.flatten(0, 1).float(), batch["y"].flatten(), reduction="sum"), mask.sum()


TIMED = {"loss": f"{HERE}:loss_of_times", "data": {"dataset": f"{HERE}:Times"}, **BF16}
SEEN: list[float] = []


def loss_with_a_memory(model: nn.Module, batch: Batch) -> Any:
    summed, count = loss(model, batch)
    SEEN.append(float(summed.detach()))
    return summed * (1 + 0.01 * len(SEEN)), count


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (Dotted, {}, r"changed the parameter 'head\.weight' of"),
        (Assigned, {}, r"changed the parameter 'head\.weight' of"),
        (Counting, {}, r"changes 'calls' of .* with each microbatch"),
        (Counting, {"reproducible": False}, r"changes 'calls' of .* with each microbatch"),
        (
            Net,
            {"loss": f"{HERE}:loss_with_a_memory", "reproducible": False},
            (r"another result after a second microbatch was computed"),
        ),
        (Drawing, {}, r"changes 'draws' of .* with each microbatch"),
        (Averaging, {}, r"changes 'seen' of .* with each microbatch"),
        (Centred, {}, r"'centre' is set by the first microbatch"),
        (
            Net,
            {"loss": f"{HERE}:loss_with_a_memory"},
            (r"another result after a second microbatch was computed .* something outside of the model"),
        ),
        (Tabled, {}, r"'table': a tensor in a plain attribute has no values.*; 'others': modules in a list"),
        (Twice, {}, r"used 'norm' of .* 2 times"),
        (Wide, BF16, r"precision = 'bf16' is no autocast"),
        (Sparse, {}, r"the gradient of 'embed\.weight' of .* is sparse"),
        (
            Timed,
            TIMED,
            (
                r"'when' of the batch is rounded to the format of precision = 'bf16'.*set "
                r"casts_inputs = False on the model"
            ),
        ),
        (Rescaled, {}, r"changed the parameter 'head\.weight' of"),
        (Merged, BF16, r"changed the parameter 'head\.weight' of"),
        (Anchored, {}, r"'start' is set by the first microbatch"),
        (ByNumpy, {}, r"changed the parameter 'head\.weight' of"),
        (
            Masked,
            {"loss": f"{HERE}:loss_by_a_mask", **BF16},
            (
                r"the count of a microbatch is 1027 in plain "
                r"torch, and 102\d in the engine"
            ),
        ),
    ],
)
def test_u1_the_trial_refuses_by_name(tmp_path: Path, kind: type, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tried(job_of(tmp_path, kind, **changes))


class Sighted(Net):
    """A model that does what many models do, and may: weight norm, a tied head, two tables that are computed
    once, an auxiliary loss in an attribute, a checkpoint of its own, attention and a recurrent layer with
    dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight
        self.drop, self.attend = (
            nn.Dropout(0.2),
            nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True),
        )
        self.recur = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("rope", None, persistent=False)
        self.table: Tensor | None = None

    def forward(self, t: Tensor) -> Tensor:
        if self.rope is None:
            self.rope = torch.arange(t.shape[1], device=t.device).cos()[:, None]
        if self.table is None or self.table.device != t.device:
            self.table = torch.arange(t.shape[1], device=t.device).sin()[:, None]
        x = self.embed(t)
        x = x + (self.rope + self.table).to(x.dtype)
        for layer in self.layers:
            x = x + self.drop(checkpoint(layer, x, use_reentrant=False))
        x = x + self.attend(x, x, x, need_weights=False)[0] + self.recur(x)[0] + self.normed(x)
        self.auxiliary = self.out(x).square().mean()
        return self.head(x)


def loss_with_more(model: nn.Module, batch: Batch) -> Any:
    summed, count = loss(model, batch)
    return summed + 0.1 * model.auxiliary.float(), count  # type: ignore[operator]


RIGHT: dict[str, dict[str, Any]] = {
    "much": {"model": f"{HERE}:Sighted", "loss": f"{HERE}:loss_with_more"},
    "much in bf16": {"model": f"{HERE}:Sighted", "loss": f"{HERE}:loss_with_more", **BF16},
    "much in fp16": {"model": f"{HERE}:Sighted", "loss": f"{HERE}:loss_with_more", "precision": "fp16"},
    "hooks": {"model": "tests.train.test_plain_torch:Warm"},
    "unused": {"model": "tests.train.test_plain_torch:Unused", "optim": ADAMW},
    "times": {"model": f"{HERE}:TimedByItself", **TIMED},
    "a product": {"model": f"{HERE}:Multiplied"},
    **{f"experts {seed}": {"model": f"{HERE}:Chosen", "seed": seed, **BF16} for seed in range(3)},
}
SHIPPED: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in bf16": BF16,
    "llama, not reproducible": {"reproducible": False},
    "llama, l2": {"optim": {"lr": 1e-2, "decay": "l2"}},
    "llama, again": {"recompute": "block", "offload": "weights", "activations": "int8"},
    "gpt2": {"model": "elastic.models.gpt2:build"},
    "gpt2, a small eps": {"model": "elastic.models.gpt2:build", "optim": {"lr": 1e-2, "eps": 1e-12}},
    "batch norm": {"model": "tests.support.toys:batch_normed", "model_args": {}},
    "muon": {"optim": {"kind": "muon", "lr": 1e-2}},
    "fp8": {"precision": "fp8", "model_args": {"vocab": 29, "dim": 32, "layers": 2, "heads": 2}},
}


@pytest.mark.parametrize("name", [*RIGHT, *SHIPPED])
def test_u1_the_trial_refuses_nothing_that_is_right(tmp_path: Path, name: str) -> None:
    job = job_of(tmp_path, Net, **RIGHT[name]) if name in RIGHT else toy_job(tmp_path, **SHIPPED[name])
    said = tried(job)
    assert said.startswith("compared with plain torch on 2 microbatches: loss, gradients"), said
    assert ("two updates" in said) is (job.precision == "fp32" and job.optim.kind != "muon"), said


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LIBRARY: dict[str, dict[str, Any]] = {
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "gpt_neox": SIZES,
}


@pytest.mark.parametrize("kind", LIBRARY)
def test_u1_the_trial_passes_models_of_transformers(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("transformers")
    args = {"config": {"model_type": kind, "vocab_size": 29, **LIBRARY[kind]}}
    said = tried(toy_job(tmp_path, model="elastic.models.transformers_lm:build", model_args=args))
    assert said.startswith("compared with plain torch on 2 microbatches"), said


def test_what_fails_in_plain_torch_too_is_left_to_the_first_step(tmp_path: Path) -> None:
    """The sentence is that of the loss, which is wrong for this model and is not that of the job's own loop."""
    said = tried(job_of(tmp_path, Net, loss="elastic.engine.loss:next_token"))
    assert said.startswith(
        "not compared with plain torch: loss = 'elastic.engine.loss:next_token' failed with KeyError"
    ), said


def test_where_memory_is_short_the_first_layers_stand_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import elastic.train.checks.plain as module

    job = toy_job(tmp_path)
    parameters = sum(
        each.nbytes
        for each in build_model(job, __import__("elastic.models.llama").models.llama.build).parameters()
    )
    monkeypatch.setattr(module, "_room", lambda device, job: 0.7 * module.TIMES * parameters)
    assert "2 of 4 layers, since memory is short" in (said := tried(job)) and "agree" in said, said
    monkeypatch.setattr(module, "_room", lambda device, job: 1000)
    assert tried(job).startswith("not compared with plain torch: both sides need")


def test_a_trial_leaves_no_trace(tmp_path: Path) -> None:
    """The bits of a run with and without are equal, and so are all generators."""
    hashes = []
    for trial in (True, False):
        job = job_of(tmp_path / str(trial), Sighted, loss=f"{HERE}:loss_with_more", trial=trial, steps=2)
        shown = list[object]()
        run_local(job, shown.append)
        assert any("compared with plain torch" in str(line) for line in shown) is trial
        run = Run.open(job)
        hashes.append(
            sorted(
                path.read_bytes()
                for path in run.checkpoints.export(run.version_at(2), tmp_path / f"{trial}.out")
            )
        )
    assert hashes[0] == hashes[1]
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    tried(job)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (
        random.getstate(),
        numpy.random.get_state()[1].tolist(),
    )  # type: ignore[index]


# ---- compiled blocks


class Numbered(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.mix = number, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x)) / (self.number + 1)


@pytest.mark.parametrize(
    "blocks",
    [[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))] * 2, [Numbered(n) for n in range(10)]],
)
def test_blocks_of_torch_itself_and_numbered_blocks_are_compiled(blocks: list[nn.Module]) -> None:
    """Torch compiles no function of its own by itself, and eight variants of one function; more was an error."""
    model = Net()
    model.layers = nn.ModuleList(blocks)
    t = Numbers().read((1, 2))["t"]
    expected = model(t)
    torch.compiler.reset()
    apply_compile(model, sharding_table(model), backend="aot_eager")
    torch.testing.assert_close(model(t), expected)
    torch.compiler.reset()


def test_compiled_blocks_get_microbatches_of_one_shape(tmp_path: Path) -> None:
    """Code that is compiled for the lengths that came first rounds by them, and these are others on each
    worker.
    """
    job = job_of(tmp_path, Net)
    with counting() as counters, closing(make_session(job, counters)) as session:
        for _ in range(2):
            expect_shapes(session, Net(), Numbers().read((1, 2)), (1, 2))
        with pytest.raises(
            DataError,
            match=(
                r"'t' of the samples \[3\] has the shape \[1, 6\], and that of "
                r"an earlier microbatch \[2, 6\]"
            ),
        ):
            expect_shapes(session, Net(), Numbers().read((3,)), (3,))


TWICE = """
from dataclasses import replace
from elastic.engine.optim.adamw import ADAMW, update

def twice(parts, grads, hyper):
    update(parts, grads, hyper)
    update(parts, grads, hyper)

RULE = replace(ADAMW, update=twice)
"""


def test_a_users_rule_that_is_a_copy_of_ours_is_not_compared_with_torchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has another update than the optimizer of torch that stands for ours, which is the control."""
    (tmp_path / "updates_twice.py").write_text(TWICE)
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.Linear(2, 2)
    assert TorchOptimizer.of(toy_job(tmp_path, optim={"kind": "updates_twice:RULE"}), model) is None
    assert TorchOptimizer.of(toy_job(tmp_path, optim={"kind": "adamw"}), model) is not None
