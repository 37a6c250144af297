"""GPT-2 with norms before its parts or after the sums: torch's own layers are the judge, and what the places
are for is measured.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.models import gpt2
from elastic.plan.layout import Layout
from tests.support.ranks import Ranks
from tests.support.segments import train, train_here
from tests.support.toys import toy_job

ARGS = {"vocab": 29, "dim": 32, "layers": 3, "heads": 4, "length": 16}
WORDS = {
    **{"attention_norm": "norm1", "feed_forward_norm": "norm2", "w1": "linear1", "w2": "linear2"},
    **{"attention.qkv.": "self_attn.in_proj_", "attention.out": "self_attn.out_proj"},
}
"""Our names of a block's parts, and torch's."""


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def torchs(model: nn.Module, first: bool) -> nn.TransformerEncoder:
    """Returns torch's layers with the weights of ours."""
    layer = nn.TransformerEncoderLayer(
        32, 4, 128, 0.0, gelu, batch_first=True, norm_first=first, dtype=torch.float64
    )
    made = nn.TransformerEncoder(
        layer, 3, nn.LayerNorm(32, dtype=torch.float64) if first else None, enable_nested_tensor=False
    )
    values = {
        name: value for name, value in model.state_dict().items() if name.startswith(("layers.", "norm."))
    }
    for ours, theirs in WORDS.items():
        values = {name.replace(ours, theirs): value for name, value in values.items()}
    made.load_state_dict(values)
    return made


@pytest.mark.fast
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_layers_are_torchs(norm: str) -> None:
    """A9: logits and gradients agree in float64.  The control: the same weights with norms in the other
    places.
    """
    torch.manual_seed(3)
    model = gpt2.build(**ARGS, norm=norm).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tokens = torch.randint(0, 29, (2, 16))

    def logits(layers: nn.Module) -> Tensor:
        x = model.embedding(tokens) + model.positions.weight[:16]
        return (
            layers(
                x,
                mask=nn.Transformer.generate_square_subsequent_mask(16, dtype=torch.float64),
                is_causal=True,
            )
            @ model.output.weight.T
        )

    theirs = torchs(model, norm == "pre")
    torch.testing.assert_close(model(tokens), logits(theirs))
    weight = model.layers[0].w1.weight
    (ours,) = torch.autograd.grad(model(tokens).square().sum(), weight)
    (wanted,) = torch.autograd.grad(logits(theirs).square().sum(), theirs.layers[0].linear1.weight)
    torch.testing.assert_close(ours, wanted)
    for layer in theirs.layers:
        layer.norm_first = norm != "pre"
    assert not torch.allclose(logits(theirs), model(tokens), rtol=1e-3, atol=1e-3)


def last_gradient(norm: str, layers: int) -> float:
    """Returns the norm of the gradient of the last layer's feed-forward weights at Xavier's initialisation,
    the mean of three.
    """
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = gpt2.build(**{**ARGS, "layers": layers}, norm=norm)
        model.init_weights()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and name.startswith("layers."):
                nn.init.xavier_normal_(parameter)
        loss, _ = next_token(model, {"tokens": torch.randint(0, 29, (8, 17))})
        loss.backward()
        found.append(model.layers[-1].w2.weight.grad.norm().item())
    return sum(found) / len(found)


@pytest.mark.fast
def test_depth_shrinks_the_last_gradient_with_pre_norm_only() -> None:
    """The gradient goes with 1 / sqrt(layers), while with post-norm it stays (Xiong and others 2020, theorem
    1).
    """
    assert last_gradient("pre", 24) / last_gradient("pre", 6) == pytest.approx(1 / 2, rel=0.2)
    assert last_gradient("post", 24) / last_gradient("post", 6) == pytest.approx(1, rel=0.2)


@pytest.mark.fast
def test_another_place_is_refused() -> None:
    with pytest.raises(ValueError, match="norm = 'both' must be 'pre' or 'post'"):
        gpt2.build(**ARGS, norm="both")


def test_post_norm_trains_with_the_same_bits_in_every_layout(ranks: Ranks, tmp_path: Path) -> None:
    """A9, promise 1; and it learns."""
    args = {**ARGS, "layers": 2, "norm": "post"}
    job, cut = (
        toy_job(tmp_path / name, model="elastic.models.gpt2:build", model_args=args, steps=8, global_batch=8)
        for name in ("whole", "cut")
    )
    alone = train_here(job, 8)
    assert train(ranks, cut, Layout(1, 2), 8).hash == alone.hash
    assert alone.outcomes[-1].loss < 0.95 * alone.outcomes[0].loss
