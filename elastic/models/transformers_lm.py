"""Causal language models of the library transformers, built from a config, with the library's initialisation
or with weights of a folder.

Names of parameters, initialisation and logits are the library's.  The engine chooses how a model attends and
computes its loss, so our code takes the place of two parts.  Facts of the model that was built decide where,
not a list of models; elsewhere the library's own code runs:

- Attention.  Where the library would call torch's ``scaled_dot_product_attention``, it calls ours.  Its own
  masks tell which layers attend plainly causally; other masks, such as windows, and biases go on to the
  library's function.  Models that the library itself keeps from that function, because of soft caps or sinks,
  stay as they are.
- Documents.  Where packed samples keep their documents apart, the library gets positions within documents,
  and our mask in the place of its own.  That is right if all its own masks are plainly causal, and a small
  model shows that a document has the logits that it has alone.
- Loss.  The fused loss is right if the product of the head with its input is the logits.  To find out, the
  model runs on the meta device with a head that returns its input: if that same tensor comes out as the
  logits, nothing scales, caps or shifts them.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from inspect import getsource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from elastic.kernels.attention import (
    Kernel,
    Mask,
    attention_mask,
    causal_attention,
    causal_mask,
    positions_of,
)
from elastic.kernels.cross_entropy import cross_entropy
from elastic.models.causal import keeps_apart, looks_ahead, remedy
from elastic.models.flops import matrix_parameters
from elastic.models.plans import layers_of, stages_of
from elastic.models.pretrained import Rename, check_weights, load_weights, same
from elastic.models.spec import ShardingTable

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoConfig,
        AutoModelForCausalLM,
        PreTrainedConfig,
    )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS
except ImportError as error:
    raise ImportError(
        f"transformers 5 is not there ({error}); run `pip install 'elastic-train[hf]'` on every node"
    ) from None

LIBRARY = "transformers"
"""The library whose version makes part of the bits, so that it must be the same for all members."""
TORCH, FLEX, FLASH_4, PLAIN = "elastic", "elastic_flex", "elastic_flash_4", "elastic_plain"
"""Names under which the library knows our attention: by torch's default on the device, by FlexAttention, by
flash-attention 4, and by the default with a check that its own masks are plainly causal.
"""
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""The names that the hub may know, as ``gpt2`` or ``Qwen/Qwen3-0.6B``."""
SMALLEST = 16
"""Smallest size of a head with which FlexAttention works."""
SPARE = 2
"""Largest number of rows that tables of learned positions have for other purposes, such as padding."""
_FUSES: dict[str, bool] = {}
"""The configs, as JSON, of models that were looked at, and the answers: one takes about 0.5 s for 36 layers,
and each world builds anew.
"""


def build(
    config: Mapping[str, Any] | None = None, path: str | None = None, pretrained: bool = False
) -> nn.Module:
    """Builds the causal language model that a config of transformers describes, with float32 parameters.

    ``path`` is a folder or a hub id with a ``config.json``; values in ``config`` replace its own.  Without
    ``path``, ``config`` names the ``model_type``, and rates of dropout that it does not give are 0.  With
    ``pretrained`` a run begins with the weights that are in the folder ``path`` as ``*.safetensors``.
    """
    if pretrained and path is None:
        raise ValueError("pretrained = true needs path, a folder with a config.json and *.safetensors")
    found = config_of(config or {}, path)
    if getattr(found, "output_router_logits", False):
        raise ValueError(
            "output_router_logits = true asks for a router's loss, but a job does not add this loss; "
            "set output_router_logits to false"
        )
    model = _made(found)
    ahead = looks_ahead(found, _made)
    blind = {
        type(module).__name__ for module in model.modules() if getattr(module, "is_causal", None) is False
    }
    if ahead or (ahead is None and blind):
        fix = remedy(found, _made) if ahead else "set is_decoder = true in config"
        raise ValueError(
            f"this {found.model_type!r} attends to later tokens, so it would only learn to copy them; {fix}"
        )
    if model._supports_flex_attn and model.config._attn_implementation == TORCH:
        model.attends = Kernel.TORCH
        if _flexes_always(model.config):
            model.attends_in_documents = Kernel.TORCH
    model.__class__ = _fitted(model.__class__)
    if ahead is None:
        model.doubt = (
            f"whether {found.model_type!r} of transformers attends to later tokens could not be "
            "tested: a small model of this type does not run"
        )
    if not model.sharding().blocks:
        model.sharding = None  # then the engine looks for blocks by itself
    if model.device.type == "meta":
        known = found.to_json_string()
        if known not in _FUSES:
            _FUSES[known] = _multiplies_last(model)
        if _FUSES[known]:
            model.get_output_embeddings().__class__ = FusedHead
            model.fuses_loss = False
    return with_weights(model, path) if pretrained and path else model


def _made(config: PreTrainedConfig) -> Any:
    """Returns the library's model, which attends by our function where that is right."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if _attends_by_torch(model):
        model.config._attn_implementation = TORCH
    return model


def with_weights(model: nn.Module, folder: str, rename: Rename = same) -> nn.Module:
    """Lets ``init_weights()`` of a model of :func:`build` set the weights to those in ``folder``
    (``elastic/models/pretrained.py``).
    """
    check_weights(model, folder, rename)
    fitted: Any = model
    fitted.config.name_or_path = folder  # as from_pretrained of the library says it
    fitted.pretrained = partial(load_weights, folder=folder, rename=rename)
    return model


def config_of(config: Mapping[str, Any], path: str | None) -> PreTrainedConfig:
    """Returns the library's config for the arguments of :func:`build`.  Raises ValueError for a name that it
    does not know.
    """
    file = None if path is None else deepcopy(_read(path))
    kind = config.get("model_type", getattr(file, "model_type", None))
    if kind not in KINDS:
        near = difflib.get_close_matches(kind or "", KINDS, 1) or ["qwen3"]
        raise ValueError(
            f"config.model_type = {kind!r} is no causal language model of transformers; name another "
            f"model_type, such as {near[0]!r}"
        )
    usual = file or AutoConfig.for_model(kind)
    # the library's code may look for more than its configs have, but from a file all of it has become
    # something else
    more = "" if file else getsource(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(usual)].__module__])
    for name in config:
        if (
            name not in ("model_type", "attn_implementation")
            and not hasattr(usual, name)
            and name not in more
        ):
            near = difflib.get_close_matches(name, usual.to_dict(), 1)
            hint = f"did you mean {near[0]!r}?" if near else "see the library's documentation"
            raise ValueError(f"the config of {kind!r} has no {name!r}; {hint}")
    given = file.to_dict() if file else {}
    given |= {usual.attribute_map.get(name, name): deepcopy(value) for name, value in config.items()}
    found = AutoConfig.for_model(**given)
    for name, rate in found.to_dict().items():
        if "drop" in name and isinstance(rate, float) and name not in given:
            setattr(found, name, 0.0)
    return found


@cache
def _read(path: str) -> PreTrainedConfig:
    """Returns the config at ``path``, which is read once in a process: each world builds the model anew.

    Raises ValueError if it is no folder, and no name of the hub.  The hub may be asked for a minute if it
    does not answer, so that is told.
    """
    if Path(path).exists():
        return AutoConfig.from_pretrained(path)
    absent = f"path = {path!r}: there is no such folder on this machine"
    if not HUB_NAME.fullmatch(path):
        raise ValueError(
            f"{absent}, and it is no name of the Hugging Face hub either; name a folder with a config.json"
        )
    print(f"{absent}, so it is read from the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        told = str(error).partition("\n")[0]
        raise ValueError(
            f"{absent}, and the Hugging Face hub did not give it; name a folder with a config.json "
            f"({type(error).__name__}: {told})"
        ) from error


class Fitted:
    """A part of a model's class that has what the engine asks of a model: tokens, int64 [batch, seq] ->
    logits [batch, seq, vocab].

    With targets, int64 [batch, seq], it returns the sum of their cross-entropies instead, a float32 scalar,
    and never makes the logits. With ``documents``, integers [batch, seq], a token attends to its own document
    only, and its position is that within it.  A model has the attributes ``fuses_loss``, ``attends`` and
    ``attends_in_documents``, by which the engine chooses, only if it can do so.  The library's own
    ``init_weights()`` serves: it leaves alone what the constructor initialised, which is everything unless
    the model was built on meta.  Weights from a folder come after it.
    """

    pretrained: Callable[[nn.Module], None] | None = None
    """Reads the weights."""
    doubt = ""
    """A sentence for the user about a check that was not possible."""

    def forward(
        self: Any, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        if hasattr(self, "attends"):
            named = (
                TORCH
                if documents is not None
                else {Kernel.FLEX: FLEX, Kernel.FLASH_4: FLASH_4}.get(self.attends, TORCH)
            )
            self.config._attn_implementation = named
        inputs = _inputs(tokens)
        if documents is not None:
            mask = attention_mask(tokens, documents, getattr(self, "attends_in_documents", Kernel.TORCH))
            if isinstance(mask, BlockMask):
                mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 asks for it, and a BlockMask does not say
            inputs |= {"attention_mask": mask, "position_ids": positions_of(documents)}
        if targets is None:
            return super().forward(**inputs).logits  # type: ignore[misc]
        head = self.get_output_embeddings()
        with head.passing():
            super().forward(**inputs)  # type: ignore[misc]
            return cross_entropy(head.input, head.weight, targets)

    def init_weights(self: Any) -> None:
        super().init_weights()  # type: ignore[misc]
        if self.pretrained is not None:
            self.pretrained(self)

    def sharding(self: Any) -> ShardingTable:
        lists = [(name, module) for name, module in self.named_modules() if isinstance(module, nn.ModuleList)]
        blocks = tuple(
            f"{name}.{n}"
            for name, each in lists
            for n, block in enumerate(each)
            if type(block).__name__ in self._no_split_modules
        )
        return ShardingTable(blocks, **stages_of(self, blocks), **layers_of(self, blocks))

    def mixes_documents(self: Any) -> str:
        """Returns a sentence that says why the model, on the meta device, cannot keep the documents of a
        sample apart; "" if it can.
        """
        if _is_plain(self) and keeps_apart(self.config, _made):
            return ""
        return (
            f"this {self.config.model_type!r} of transformers has windows, or its own masks, positions "
            "or layers, so the documents of a sample cannot be kept apart"
        )

    @property
    def most_positions(self: Any) -> int | None:
        """The longest sequence of a model that learns positions; None if it has none of them.  Some have a
        few rows more, as OPT.
        """
        most, words = (
            getattr(self.config.get_text_config(), "max_position_embeddings", None) or 0,
            self.get_input_embeddings(),
        )
        tables = [
            each.num_embeddings
            for each in self.modules()
            if isinstance(each, nn.Embedding) and each is not words
        ]
        return most if most > 0 and any(most <= rows <= most + SPARE for rows in tables) else None

    def flops_per_token(self: Any, seq: float, causal: bool) -> float:
        """Returns the operations of a token, as ``elastic/models/flops.py`` says, without attention.

        Of the experts of a layer, which are in one tensor, only those count to which a token goes.
        """
        used = getattr(self.config.get_text_config(), "num_experts_per_tok", None) or 0
        experts = [
            each for name, each in self.named_parameters() if used and ".experts." in name and each.dim() > 2
        ]
        return 6 * (
            matrix_parameters(self) - sum(each.numel() * max(1 - used / len(each), 0) for each in experts)
        )

    @property
    def vocab(self: Any) -> int:
        return self.config.get_text_config().vocab_size


@cache
def _fitted(cls: Any) -> Any:
    """Returns the subclass of ``cls`` that is :class:`Fitted`; it has the same name."""
    return type(cls.__name__, (Fitted, cls), {"__module__": cls.__module__})


def _inputs(tokens: Tensor) -> dict[str, Any]:
    """Returns the arguments of the library's ``forward``.

    Without a mask it would look at the values of positions for packed sequences, and the host would wait for
    the device.
    """
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}


class FusedHead(nn.Linear):
    """The head of a model that fuses its loss.  While it is ``passing``, it keeps its input, and returns that
    in place of the logits.
    """

    passes = False
    input: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.passes:
            return super().forward(hidden)
        self.input = hidden
        return hidden

    @contextmanager
    def passing(self) -> Iterator[None]:
        self.passes = True
        try:
            yield
        finally:
            self.passes, self.input = False, None


def _multiplies_last(model: Any) -> bool:
    """Returns whether the logits are the product of the head with its input, and nothing else.

    A model that cannot run on the meta device counts as one whose logits are something else.
    """
    head, tokens = model.get_output_embeddings(), torch.zeros(1, 2, dtype=torch.int64, device="meta")
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    # others need values, or bf16
    usual, model.config._experts_implementation = model.config._experts_implementation, "batched_mm"
    head.__class__ = FusedHead
    try:
        with torch.no_grad(), torch.device("meta"), head.passing():
            return super(Fitted, model).forward(**_inputs(tokens)).logits is head.input
    except RuntimeError:  # as torch raises it where values would decide what the code does
        return False
    finally:
        model.config._experts_implementation, head.__class__ = usual, nn.Linear


def _is_plain(model: Any) -> bool:
    """Returns whether ``model``, on the meta device, attends by our function, and all its masks are plainly
    causal at any length.
    """
    usual, experts = model.config._attn_implementation, model.config._experts_implementation
    if usual not in (TORCH, FLEX, FLASH_4):
        return False
    model.config._attn_implementation, model.config._experts_implementation = PLAIN, "batched_mm"
    try:
        with torch.no_grad(), torch.device("meta"):
            super(Fitted, model).forward(**_inputs(torch.zeros(1, 2, dtype=torch.int64, device="meta")))
        return True
    except (RuntimeError, NotPlain):
        return False
    finally:
        model.config._attn_implementation, model.config._experts_implementation = usual, experts


def _flexes_always(config: PreTrainedConfig) -> bool:
    """Returns whether FlexAttention serves all layers: it has no dropout, and a smallest size of heads."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    head = getattr(text, "head_dim", None) or (text.hidden_size // heads if isinstance(heads, int) else 0)
    return head >= SMALLEST and not any(
        "drop" in name and isinstance(rate, float) and rate for name, rate in text.to_dict().items()
    )


def _attends_by_torch(model: Any) -> bool:
    """Returns whether ``model`` attends by torch's function through the library's registry, and never asks
    whether it does.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return False
    modules = {type(module).__module__ for module in model.modules()}
    return not any(
        '"sdpa"' in getsource(sys.modules[name])
        for name in modules
        if name.startswith("transformers.models.")
    )


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attends as the library asks, by :func:`causal_attention` where that is the same.

    ``query``, ``key`` and ``value`` are [batch, heads, seq, dim], and the first result is [batch, seq, heads,
    dim].  A :class:`BlockMask` comes from :func:`flex_mask`, which gives it where the library has no mask, or
    is that of documents.
    """
    chosen: Mask = attention_mask if isinstance(attention_mask, BlockMask) else None
    if module.config._attn_implementation == FLASH_4:
        chosen = Kernel.FLASH_4
    mask = None if isinstance(attention_mask, BlockMask) else attention_mask
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    others = [name for name in ("position_bias", "softcap") if more.get(name) is not None]
    own = mask is not None or not causal or query.shape[2] != key.shape[2] or bool(others)
    if isinstance(attention_mask, BlockMask) and module.config._attn_implementation == TORCH:
        assert not own and not dropout and query.shape[3] >= SMALLEST, (
            "FlexAttention keeps documents apart only if all layers use it"
        )
    if own:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, is_causal, **more)
    if dropout or query.shape[3] < SMALLEST:
        chosen = None
    return causal_attention(query, key, value, chosen, dropout, scaling).transpose(1, 2).contiguous(), None


def torch_mask(*, attention_mask: Tensor | None = None, **facts: Any) -> Tensor | None:
    """Returns the library's mask, None where attention is plainly causal.  All tokens are valid, so
    ``attention_mask`` does not count.
    """
    return sdpa_mask(**facts)


def flex_mask(
    *, q_length: int, kv_length: int, device: torch.device, **facts: Any
) -> Tensor | BlockMask | None:
    """Returns FlexAttention's causal mask where attention is plainly causal, and otherwise the library's
    mask.
    """
    found = torch_mask(q_length=q_length, kv_length=kv_length, device=device, **facts)
    both_ways = facts.get("allow_is_bidirectional_skip", False)
    return (
        causal_mask(q_length, device) if found is None and q_length == kv_length and not both_ways else found
    )


class NotPlain(Exception):
    """A layer has a mask that is not plainly causal."""


def plain_mask(*, local_size: int | None = None, **facts: Any) -> None:
    """Raises :class:`NotPlain` for a window, also one that is wider than the tokens, and for any mask that
    torch would need.
    """
    if (
        local_size is not None
        or facts.get("allow_is_bidirectional_skip", False)
        or torch_mask(**facts) is not None
    ):
        raise NotPlain


for _name, _mask in ((TORCH, torch_mask), (FLEX, flex_mask), (FLASH_4, torch_mask), (PLAIN, plain_mask)):
    AttentionInterface.register(_name, attend)
    AttentionMaskInterface.register(_name, _mask)
