"""The loss of the next token, beside plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic.engine.loss import next_token
from elastic.errors import ModelError


class Bigrams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, generator=torch.Generator().manual_seed(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("masked", [-1, -100])
def test_negative_targets_are_masked(masked: int) -> None:
    """A target of any negative number counts for nothing, in the sum and in the number; torch's own mask is
    -100.
    """
    model = Bigrams()
    loss, count = next_token(model, {"tokens": torch.tensor([[1, 2, masked, 3], [4, masked, masked, 5]])})
    # the valid targets are 2 after 1, 3 after a masked input, which reads as token 0, and 5 after another
    expected = F.cross_entropy(model.table[torch.tensor([1, 0, 0])], torch.tensor([2, 3, 5]), reduction="sum")
    assert count == 3
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


class Wrapped(Bigrams):
    def forward(self, tokens: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": super().forward(tokens)}


def test_a_model_that_returns_no_tensor_is_refused_in_a_sentence() -> None:
    """A causal model of transformers returns such a thing.  The control is the same model with its logits
    alone, above.
    """
    with pytest.raises(
        ModelError,
        match=(r"the model returned a dict, but loss = .*:next_token' needs a tensor of logits"),
    ):
        next_token(Wrapped(), {"tokens": torch.tensor([[1, 2, 3]])})
