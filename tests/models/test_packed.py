"""A packed sample computes what its documents compute one by one, each alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.errors import ModelError
from elastic.kernels.attention import Kernel, attention_mask, causal_attention, document_mask, positions_of
from elastic.models import gpt2, llama

VOCAB, END = 31, 30
MODELS = {
    "llama": (
        llama.build,
        {
            "vocab": VOCAB,
            "dim": 32,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "rope_scaling": (8, 1, 4, 16),
            "tied": False,
        },
    ),
    "qwen3": (
        llama.build,
        {"vocab": VOCAB, "dim": 32, "layers": 2, "heads": 4, "head_dim": 16, "qk_norm": True},
    ),
    "gpt2": (gpt2.build, {"vocab": VOCAB, "dim": 32, "layers": 2, "heads": 4, "length": 64}),
}
LENGTHS = ([9, 1, 1, 14, 2, 6], [1, 33 - 1], [20, 13])
"""Documents of three samples of 33 tokens, with the token that ends them: empty ones are 1 long, and each
sample ends with a border.
"""

each_model = pytest.mark.parametrize("name", MODELS)


def made(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> nn.Module:
    build, args = MODELS[name]
    torch.manual_seed(4)
    model: nn.Module = build(**args, **more)
    # not the small initial values, with which nothing depends much on anything
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.3)
    return model.to(dtype)


def samples() -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Returns the documents of each sample, and the batch of the samples."""
    torch.manual_seed(5)
    texts = [
        [torch.cat((torch.randint(0, END, (length - 1,)), torch.tensor([END]))) for length in lengths]
        for lengths in LENGTHS
    ]
    numbers = [
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS
    ]
    return texts, {
        "tokens": torch.stack([torch.cat(text) for text in texts]),
        "documents": torch.stack(numbers).int(),
    }


def one_by_one(model: nn.Module, texts: list[list[Tensor]]) -> tuple[Tensor, int]:
    """Returns the sum of the losses of documents that are alone in their batch, and the number of their
    targets.
    """
    losses = [
        F.cross_entropy(model(text[None, :-1])[0], text[1:], reduction="sum")
        for sample in texts
        for text in sample
        if len(text) > 1
    ]
    return torch.stack(losses).sum(), sum(len(text) - 1 for sample in texts for text in sample)


def packed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the sum of the losses of the packed samples in the dtype of the model."""
    tokens, documents = batch["tokens"], batch["documents"]
    logits, same = model(tokens[:, :-1], documents=documents[:, :-1]), documents[:, 1:] == documents[:, :-1]
    return F.cross_entropy(logits[same], tokens[:, 1:][same], reduction="sum")


def found(loss: Tensor, model: nn.Module) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def assert_kept_apart(model: nn.Module) -> None:
    """Compares losses and gradients with those of the documents alone, to 1e-10 in float64.

    The controls: without documents, and with a border that is moved by a token, they differ.
    """
    texts, batch = samples()
    expected = found(one_by_one(model, texts)[0], model)
    for mine, theirs in zip(found(packed(model, batch), model), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    others = {
        "without": lambda documents: torch.zeros_like(documents),
        "moved": lambda documents: documents.roll(1, 1),
    }
    for change in others.values():
        other = found(packed(model, {**batch, "documents": change(batch["documents"])}), model)
        assert all(
            (mine - theirs).norm() > 1e-3 * theirs.norm()
            for mine, theirs in zip(other, expected, strict=True)
        )


@each_model
def test_losses_and_gradients_are_those_of_the_documents_alone(name: str) -> None:
    assert_kept_apart(made(name))


@pytest.mark.parametrize("module", [llama, gpt2])
def test_positions_begin_anew(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Learned positions that do not begin anew change the loss.  Of rotary ones only the differences count,
    so only roundings change.
    """
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]])
    assert positions_of(documents).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    model, (_, batch) = made("gpt2" if module is gpt2 else "llama"), samples()
    right = packed(model, batch)
    monkeypatch.setattr(
        module, "positions_of", lambda documents: torch.arange(documents.shape[1]).expand_as(documents)
    )
    apart = (packed(model, batch) - right).abs() / right
    assert apart > 1e-3 if module is gpt2 else 0 < apart < 1e-5


@each_model
@pytest.mark.parametrize("fuses", [False, True])
def test_the_loss_asks_for_no_token_of_the_next_document(name: str, fuses: bool) -> None:
    """The control: without documents all tokens but the first are asked for."""
    model, (texts, batch) = made(name, torch.float32), samples()
    model.fuses_loss = fuses
    loss, count = next_token(model, batch)
    expected, targets = one_by_one(model, texts)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert count == targets
    other, more = next_token(model, {"tokens": batch["tokens"]})
    assert more == batch["tokens"][:, 1:].numel() > targets and not torch.allclose(other, expected, rtol=1e-2)


class Plain(nn.Module):
    """A user's model that knows nothing of documents."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, VOCAB)


def test_a_model_that_takes_no_documents_is_refused() -> None:
    """It would train on other sequences than the user asked for."""
    batch = samples()[1]
    fixes = r"set data\.args\.documents = false, use a model of elastic\.models\.llama or gpt2, or add"
    with pytest.raises(ModelError, match=rf"forward\(\) of Plain has no argument 'documents'; {fixes}"):
        next_token(Plain(), batch)
    next_token(Plain(), {"tokens": batch["tokens"]})


@each_model
def test_documents_have_no_influence_on_others(name: str) -> None:
    """The second document keeps its bits when the first one changes, with dropout too.  The control: both are
    one document.
    """
    model, tokens = made(name, torch.float32, dropout=0.2).train(), torch.randint(0, VOCAB, (1, 40))
    for documents, stays in (((torch.arange(40) >= 17).int()[None], True), (torch.zeros(1, 40).int(), False)):
        logits = []
        for first in (tokens[:, :17], (tokens[:, :17] + 1) % VOCAB):
            torch.manual_seed(6)
            logits.append(model(torch.cat((first, tokens[:, 17:]), 1), documents=documents))
        assert torch.equal(logits[0][:, 17:], logits[1][:, 17:]) is stays
        assert not torch.equal(logits[0][:, :17], logits[1][:, :17])


# ---- attention by itself, at lengths beyond the blocks of its kernels


def inputs(seq: int, chance: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values, with two heads to each key, and documents."""
    torch.manual_seed(seq)
    q, k, v = (torch.randn(2, heads, seq, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v, (torch.rand(2, seq) < chance).cumsum(1, dtype=torch.int32)


@pytest.mark.parametrize("ordered", [False, True])
def test_flash_attention_gives_each_head_its_own_keys_where_the_order_counts(
    ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own flash kernel, on a CPU, stands for flash-attention 4.  The judge is the default, in the
    same precision.
    """
    q, k, v, _ = inputs(200, 0.0, torch.float64)
    heads: list[int] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        heads.append(k.shape[1])
        return attend(q, k, v, **options)

    expected = causal_attention(q, k, v, None, 0.0)
    judged = [expected, *torch.autograd.grad(expected.square().sum(), (q, k, v))]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(
        "elastic.kernels.attention.torch.are_deterministic_algorithms_enabled", lambda: ordered
    )
    out = causal_attention(q, k, v, Kernel.FLASH_4, 0.0)
    torch.testing.assert_close([out, *torch.autograd.grad(out.square().sum(), (q, k, v))], judged)
    assert heads == [4 if ordered else 2]


@pytest.mark.parametrize("chance", [0.0, 0.002, 0.05, 1.0])
def test_attention_within_documents_is_that_of_each_document(chance: float) -> None:
    """The judge cuts the sample into its documents.  The control: attention over the whole sample, unless
    that is one document.
    """
    q, k, v, documents = inputs(1100, chance, torch.float64)
    out = causal_attention(q, k, v, attention_mask(documents, documents, Kernel.TORCH), 0.0)
    parts = [
        [causal_attention(*each, None, 0.0) for each in cut(row, q, k, v, documents)] for row in range(2)
    ]
    expected = torch.cat([torch.cat(row, dim=2) for row in parts])
    weight = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((each * weight).sum(), (q, k, v)) for each in (out, expected))
    for mine, judge in zip((out, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(mine, judge, rtol=1e-10, atol=1e-10)
    assert torch.allclose(out, causal_attention(q, k, v, None, 0.0)) is (chance == 0.0)


def cut(row: int, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> list[tuple[Tensor, ...]]:
    """Returns the queries, keys and values of each document of a sample."""
    lengths = torch.unique_consecutive(documents[row], return_counts=True)[1].tolist()
    return list(zip(*(each[row : row + 1].split(lengths, dim=2) for each in (q, k, v)), strict=True))


LISTS = [
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
]


@pytest.mark.parametrize("seq", [1, 100, 128, 200, 640])
def test_the_block_mask_is_that_of_torch(seq: int) -> None:
    """The judge looks at every pair of tokens.  The control: the mask of other documents."""
    from torch.nn.attention.flex_attention import create_block_mask

    for chance in (0.0, 0.01, 0.2, 1.0):
        documents, other = (inputs(seq, chance, torch.float32)[3] for chance in (chance, 0.02))
        mine = document_mask(documents)
        judge = create_block_mask(mine.mask_mod, 2, None, seq, seq, device="cpu")
        assert all(torch.equal(getattr(mine, each), getattr(judge, each)) for each in LISTS)
        assert (mine.shape, mine.BLOCK_SIZE) == (judge.shape, judge.BLOCK_SIZE)
        if seq == 640 and chance in (0.0, 1.0):
            assert not all(
                torch.equal(getattr(document_mask(other), each), getattr(judge, each)) for each in LISTS
            )


def test_documents_may_have_any_numbers() -> None:
    """No block is missing where documents do not count up, and those that need no mask are the right ones."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents = torch.tensor([[7], [-3], [7], [0], [0], [-3]]).expand(6, 100).reshape(1, 600)
    mine = document_mask(documents)
    judge = create_block_mask(mine.mask_mod, 1, None, 600, 600, device="cpu")
    assert all(
        torch.equal(getattr(mine, each), getattr(judge, each)) for each in LISTS if each.startswith("full")
    )
    assert bool((mine.to_dense() >= judge.to_dense()).all())


@pytest.mark.full
@pytest.mark.filterwarnings("default::DeprecationWarning")  # of torch's compiler, about torch
def test_flex_attention_is_the_default_with_a_mask() -> None:
    """CPUs have its forward pass only.  New documents compile nothing anew.  The control: without documents."""
    compiled: Callable[..., Tensor] = torch.compile(causal_attention, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for chance in (0.01, 0.05, 0.0, 0.5):
        q, k, v, documents = (each.detach() for each in inputs(700, chance, torch.float32))
        out = compiled(q, k, v, document_mask(documents), 0.0)
        torch.testing.assert_close(
            out, causal_attention(q, k, v, attention_mask(documents, documents, Kernel.TORCH), 0.0)
        )
        assert torch.allclose(out, causal_attention(q, k, v, None, 0.0), atol=1e-4) is (chance == 0.0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
