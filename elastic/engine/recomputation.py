"""Memory policies: what the backward pass computes again in place of keeping it.

Without a policy a block keeps everything that its backward pass reads.  The results of a policy have the same
bits, unless blocks are compiled: the compiler then fuses other operations.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from math import floor
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastic.errors import ModelError
from elastic.models.spec import ShardingTable, each_once

aten = torch.ops.aten
KEPT: frozenset[Any] = frozenset(
    {
        *(
            aten.mm.default,
            aten.addmm.default,
            aten.bmm.default,
            aten.baddbmm.default,
            aten._scaled_mm.default,
        ),
        *(
            aten.addbmm.default,
            aten.mv.default,
            aten.addmv.default,
            aten._grouped_mm.default,
            aten._scaled_grouped_mm.default,
        ),
        *(aten.convolution.default, aten._softmax.default),
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        *(aten._flash_attention_forward.default, aten._efficient_attention_forward.default),
        torch.ops.higher_order.flex_attention,
    }
)
"""The operations whose results ``selective`` keeps: matrix products and attention.  The others, such as
norms, casts and activation functions, are cheap for what they would keep.
"""

SELECTIVE = "selective activation checkpoint"
"""Words of torch's errors about a result that was kept by choice, and then changed in place, or needed twice.
"""
CANNOT_SELECT = (
    "recompute = 'selective' keeps the results of matrix products, convolutions and attention: the "
    "model may not change them in place, as nn.ReLU(inplace=True) does, and the loss may take no "
    "second derivative; set recompute = 'block' or 'none', or inplace=False"
)

CHOOSES = "torch._higher_order_ops.wrap"
"""The logger by which torch warns of every choice of what is kept in a compiled block; the choice is ours
(:func:`_choice`).
"""


def apply_recompute(model: nn.Module, table: ShardingTable, policy: str | float) -> None:
    """Lets each block of ``model`` keep less for its backward pass, by a ``policy`` of the setting
    ``recompute``; with a number only some blocks do.

    It replaces ``forward`` of the blocks, so names of parameters stay, and hooks of the axes run once.  The
    random numbers of dropout are drawn again (Chen and others 2016, section 3).
    """
    logging.getLogger(CHOOSES).addFilter(_is_news)
    blocks, forward = (
        (table.blocks, _POLICIES[policy])
        if isinstance(policy, str)
        else (spread(table.blocks, policy), _all_but_its_input)
    )
    for block in each_once(model, blocks):
        own = vars(block).get("forward")
        # no closure: the compiler would compile each block anew
        block.forward = MethodType(forward, _Own(block, own) if own else block)


class _Own:
    """Stands for a block whose ``forward`` was replaced by one of its own, as libraries of kernels do, or
    ``precision = "fp8"``.
    """

    def __init__(self, block: nn.Module, run: Callable[..., Any]) -> None:
        self.block, self.run = block, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def spread(blocks: Sequence[str], part: float) -> list[str]:
    """Returns ``part`` of the blocks, rounded up and evenly spread.  The last one is among them only if all
    are.

    A block that is computed again needs all of its memory then.  The last one is needed first, when all
    others still keep theirs.  Which blocks these are follows from their number alone, so it is the same on
    every device.
    """
    count = len(blocks)
    others = floor(count * (1 - Fraction(str(part))))  # as the user wrote it: 0.1 of 10 blocks is one
    return [name for n, name in enumerate(blocks) if (n + 1) * others // count == n * others // count]


def _all_but_its_input(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _again(block, args, kwargs)


def _all_but_what_is_kept(block: Any, *args: Any, **kwargs: Any) -> Any:
    return _again(block, args, kwargs, context_fn=_contexts)


def _again(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any) -> Any:
    """Runs ``block``, and once more in the backward pass.  Raises :class:`ModelError` if it changes what it
    gets.

    From what has changed it would compute something else then.  Of keyword arguments torch does not notice;
    in compiled code it does.
    """
    compiling = torch.compiler.is_compiling()
    given = (
        []
        if compiling
        else [
            each
            for each in tree_leaves((args, kwargs))
            if isinstance(each, Tensor) and not each.is_inference()
        ]
    )
    before = [each._version for each in given]
    out = checkpoint(type(block).forward, block, *args, use_reentrant=False, **how, **kwargs)
    if before != [each._version for each in given]:
        raise ModelError(
            f"forward() of the block {type(getattr(block, 'block', block)).__name__} changes an "
            "argument in place, so with recompute it would get other values when it runs again in the "
            "backward pass; write x = x + y in place of x += y, or set recompute = 'none'"
        )
    return out


def _attention(block: Any, *args: Any, **kwargs: Any) -> Any:
    with _AttentionAgain():
        return type(block).forward(block, *args, **kwargs)


class _AttentionAgain(TorchFunctionMode):
    """Lets torch's attention keep only its inputs: on some devices, and with a mask or dropout, it would keep
    [seq, seq] for each head.

    It runs again by the kernels that the model allows here.  FlexAttention never keeps so much, and stays as
    it is.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        how: dict[str, Any] = {}
        if not torch.compiler.is_compiling():  # compiled code has chosen its kernel
            allowed = _cur_sdpa_kernel_backends(with_priority=True)
            how["context_fn"] = lambda: (nullcontext(), sdpa_kernel(allowed, set_priority=True))
        return checkpoint(func, *args, use_reentrant=False, **how, **(kwargs or {}))


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_choice)


def tell_of_selective(error: RuntimeError) -> None:
    """Adds what to do to the error of a backward pass that cannot use what ``selective`` has kept."""
    if SELECTIVE in str(error):
        error.add_note(CANNOT_SELECT)


def _is_news(record: logging.LogRecord) -> bool:
    return "Detected that context_fn is passed" not in record.getMessage()


def _choice(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_POLICIES = {
    "block": _all_but_its_input,
    "sqrt": _all_but_its_input,
    "attention": _attention,
    "selective": _all_but_what_is_kept,
}
"""The functions by the names that the setting ``recompute`` accepts, beside "none"."""
