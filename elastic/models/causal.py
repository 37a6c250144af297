"""Finds out what a language model of the library transformers looks at: later tokens, from which
``next_token`` would learn to copy, or other documents of a packed sample, though it was given their mask and
positions.

Neither a model's class nor its config tells.  So a model runs twice: if other tokens at the end change the
logits before them, it looks ahead.  That needs weights, so the model is built small: all its widths are
divided by one power of two, so that heads still fit them.  All of its layers are there, since any may be of
another kind, but those of equal shapes share their weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from elastic.kernels.attention import Kernel, attention_mask, positions_of

HEAD = 8
"""Smallest width of a head of a small model; rotations may take a quarter of it, and need two numbers."""
WORDS = 64
"""Number of tokens that a small model knows."""
MOST = 200_000_000
"""Largest number of parameters of a model that is run, where those that layers share count once."""
SEQ, LAST = 24, 7
"""Length of the sequence, and number of tokens at its end that change: they begin within a block of any even
size.
"""
NOISE = 0.05
"""Standard deviation of what is added to the weights: those that begin at zero would hide what a layer looks
at.
"""
SAME = 1e-3
"""Largest change of logits, in parts of the largest logit, that is rounding: 48 layers with experts made
1.4e-4 of it.  One layer of 32 that looks ahead changes them by 2e-3, a whole model by more than 1e-2.
"""
WIDTH = re.compile(
    r"(hidden|intermediate|embed\w*)_size|\w*_(dim|rank|embd|inner|intermediate_size)|d_(model|ff|kv|inner|embed|head)"
)
BLOCKS = {"block_size": 2, "num_random_blocks": 1}
"""Largest values of settings of attention in blocks that looks both ways in sequences of many blocks, and
only there.
"""
NUMBER = re.compile(r"\d+\.")
"""The part of a parameter's name that says in which of a list of modules it is."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The errors that the library raises for a config whose sizes do not fit each other."""
REMEDIES: tuple[dict[str, Any], ...] = (
    {"is_decoder": True},
    {"causal": True},
    {"attn_type": "uni"},
    {"is_decoder": True, "attention_type": "original_full"},
)
"""Settings of configs that let some models look back only."""

_FOUND: dict[tuple[str, str], bool | None] = {}
"""The questions, with configs as JSON, that were tried, and the answers: each world builds its model anew."""


def looks_ahead(config: Any, make: Callable[[Any], nn.Module]) -> bool | None:
    """Returns whether the model that ``make(config)`` builds looks at later tokens; None if that cannot be
    found out.

    It leaves the generators of random numbers as they were.
    """
    return _answer(config, make, _ahead)


def keeps_apart(config: Any, make: Callable[[Any], nn.Module]) -> bool | None:
    """Returns whether a document of a packed sample has the logits that it has alone; None if that cannot be
    found out.

    The model gets the mask of the documents and positions within them.  Windows wider than :data:`SEQ` tokens
    are not seen.
    """
    return _answer(config, make, _apart)


def _answer(
    config: Any, make: Callable[[Any], nn.Module], ask: Callable[[Any, Any], bool | None]
) -> bool | None:
    known = ask.__name__, config.to_json_string()
    if known not in _FOUND:
        _FOUND[known] = _try(config, make, ask)
    return _FOUND[known]


def remedy(config: Any, make: Callable[[Any], nn.Module]) -> str:
    """Returns what to set in the config of a model that looks ahead, as words; other words if no setting is
    known that helps.
    """
    for settings in REMEDIES:
        if all(hasattr(config, name) for name in settings):
            other = deepcopy(config)
            for name, value in settings.items():
                setattr(other, name, value)
            if looks_ahead(other, make) is False:
                words = (
                    f"{name} = {'true' if value is True else repr(value)}" for name, value in settings.items()
                )
                return f"set {' and '.join(words)} in config"
    return "use another model_type, such as 'llama'"


def _try(
    config: Any, make: Callable[[Any], nn.Module], ask: Callable[[Any, Any], bool | None]
) -> bool | None:
    with _silence(), torch.random.fork_rng([]), torch.device("cpu"), torch.no_grad():
        for version in (_smaller, deepcopy):
            try:
                each = version(config)
                with torch.device("meta"):
                    model = make(each)
                if _share(model) <= MOST:
                    _fill(model.eval())
                    if (found := ask(model, each)) is not None:
                        return found
            except FAILURES:
                continue
    return None


def _share(model: nn.Module) -> int:
    """Lets layers of ``model`` use one another's parameters where names and shapes agree.  Returns the number
    of elements that are left.

    The library initialises none of them twice.
    """
    known = dict[tuple[str, torch.Size], nn.Parameter]()
    for name, module in model.named_modules():
        before = len(known)
        for own, parameter in module.named_parameters(recurse=False):
            module._parameters[own] = known.setdefault(
                (NUMBER.sub("", f"{name}.{own}"), parameter.shape), parameter
            )
        if module._parameters and not module._buffers and len(known) == before:
            module._is_hf_initialized = True
    return sum(parameter.numel() for parameter in model.parameters())


def _fill(model: Any) -> None:
    """Gives ``model``, which is on the meta device, memory and values; what is shared stays so."""
    torch.default_generator.manual_seed(0)  # that of the CPU alone
    made = {id(each): torch.zeros_like(each, device="cpu") for each in model.buffers()}
    made |= {id(each): nn.Parameter(torch.zeros_like(each, device="cpu")) for each in model.parameters()}
    for module in model.modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            module._parameters[own] = made[id(parameter)]
        for own, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            module._buffers[own] = made[id(buffer)]
    model.init_weights()
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=NOISE)


def _ahead(model: Any, config: Any) -> bool | None:
    tokens, before = _tokens(config)
    tokens[1, :before] = tokens[0, :before]
    first, second = (_logits(model, row[None])[0, :before] for row in tokens)
    return _differ(first, second)


def _apart(model: Any, config: Any) -> bool | None:
    tokens, before = _tokens(config)
    documents = (torch.arange(tokens.shape[1]) >= before).int().expand_as(tokens)
    mask = attention_mask(tokens, documents, Kernel.TORCH)
    packed = _logits(model, tokens, attention_mask=mask, position_ids=positions_of(documents))
    alone = torch.cat([_logits(model, part) for part in (tokens[:, :before], tokens[:, before:])], 1)
    found = _differ(alone, packed)
    return None if found is None else not found


def _logits(model: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(
        **{"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False, **more}
    ).logits
    return found


def _tokens(config: Any) -> tuple[torch.Tensor, int]:
    """Returns two random sequences of a length that the model has positions for, and how many tokens of each
    come before the last ones.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or SEQ
    seq = min(SEQ, positions) if positions > 0 else SEQ  # some have -1, for any number
    return torch.randint(text.vocab_size, (2, seq)), seq - min(LAST, seq // 3)


def _differ(first: torch.Tensor, second: torch.Tensor) -> bool | None:
    change, largest = float((first - second).abs().max()), float(first.abs().max())
    return change > SAME * largest if 0 < largest < float("inf") else None


def _smaller(config: Any) -> Any:
    """Returns a config of the same kind with narrow layers, few tokens, and small blocks of sparse attention."""
    text, small = config.get_text_config(), deepcopy(config)
    head = getattr(text, "head_dim", None) or text.hidden_size // getattr(text, "num_attention_heads", HEAD)
    part = 1 << max(0, (head // HEAD).bit_length() - 1)
    for each in _configs(small):
        _shrink(each, part)
    return small


def _configs(config: Any) -> Iterator[Any]:
    """Yields ``config`` and those inside it, such as that of the text."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from _configs(inner)


def _shrink(config: Any, part: int) -> None:
    words = config.attribute_map.get("vocab_size", "vocab_size")
    for name, value in list(vars(config).items()):
        if type(value) is not int:
            continue
        if WIDTH.fullmatch(name):
            setattr(config, name, max(value // part, 1))
        elif name == words or name.endswith("_token_id"):
            setattr(config, name, min(value, WORDS if name == words else WORDS - 1))
        elif name in BLOCKS:
            setattr(config, name, min(value, BLOCKS[name]))


@contextmanager
def _silence() -> Iterator[None]:
    """Keeps back what the library says about the models that are tried."""
    usual = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(usual)
