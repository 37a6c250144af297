"""The operations of a token are those that torch counts while a model trains, and the peaks of devices are
found by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from elastic.engine.loss import next_token
from elastic.models import gpt2, llama
from elastic.models.flops import flops_of, matrix_parameters
from elastic.train.machine.peaks import peak_flops
from tests.support.toys import own

SEQ, BATCH = 64, 2
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "tied": (llama.build, {"vocab": 101, "dim": 32, "layers": 3, "heads": 4}),
    "not tied": (
        llama.build,
        {"vocab": 101, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "tied": False},
    ),
    "wide heads": (
        llama.build,
        {"vocab": 101, "dim": 32, "layers": 2, "heads": 4, "head_dim": 24, "qk_norm": True},
    ),
    "gpt2": (gpt2.build, {"vocab": 101, "dim": 32, "layers": 3, "heads": 4, "length": SEQ}),
}


def counted(model: nn.Module) -> float:
    """Returns the operations of a token in forward and backward, as torch counts them: attention is computed
    as plain matrix products.
    """
    model.init_weights()  # type: ignore[operator]
    tokens = torch.randint(0, 29, (BATCH, SEQ + 1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss, _ = next_token(model, {"tokens": tokens})
        loss.backward()
    return counter.get_total_flops() / (BATCH * SEQ)


@pytest.mark.parametrize("name", MODELS)
def test_our_models_say_what_torch_counts(name: str) -> None:
    """Control: without attention, or with half of it, the formula is far off."""
    build, args = MODELS[name]
    model = build(**args)
    found, flops = counted(model), flops_of(model)
    assert flops(SEQ, False) == pytest.approx(found, rel=0.01)
    assert flops(SEQ, True) < 0.95 * found and 6 * matrix_parameters(model) < 0.9 * found
    assert flops(SEQ, False) - flops(SEQ, True) == flops(SEQ, True) - flops(0, True)


def test_a_model_that_says_nothing_counts_by_its_matrices() -> None:
    """It has no attention, so nothing is missing.  Control: its embedding is no matrix product."""
    model = own()
    flops, found = flops_of(model), counted(model)
    assert flops(SEQ, False) == flops(SEQ, True) == pytest.approx(found, rel=0.01)
    assert 6 * sum(each.numel() for each in model.parameters() if each.dim() >= 2) > 1.05 * found


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "llama"])
def test_of_experts_those_count_to_which_a_token_goes(kind: str) -> None:
    """Torch counts attention besides, which is known.  The control: all eight experts are several times as
    much.
    """
    transformers_lm = pytest.importorskip(
        "elastic.models.transformers_lm", reason="the models of this test are not installed"
    )
    layers, heads, head = 2, 2, 16
    config: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": 101,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "head_dim": head,
    }
    config |= {"num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 64}
    if kind != "llama":
        config |= {
            "mixtral": {"num_local_experts": 8},
            "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
        }[kind]
        config |= {"num_experts_per_tok": 2, "experts_implementation": "eager"}
    model = transformers_lm.build(config)
    found, told = counted(model) - 12 * layers * heads * head * SEQ, flops_of(model)(SEQ, False)
    assert told == flops_of(model)(SEQ, True) == pytest.approx(found, rel=0.01)
    assert (6 * matrix_parameters(model) > 2.5 * found) == (kind != "llama")


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "fp32", 67e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989.5e12),
        ("NVIDIA H20", "bf16", 0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bf16", 0),
        ("NVIDIA L40S", "fp32", 91.6e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("a new device", "bf16", 0),
    ],
)
def test_a_peak_is_that_of_the_device_with_the_name(name: str, precision: str, peak: float) -> None:
    assert peak_flops(name, precision) == peak
