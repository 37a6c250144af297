"""The sharding table of a model of transformers, from the plans that the library has of it.

``_tp_plan`` maps layers to words such as "colwise", and ``_pp_plan`` lists modules in the order in which they
run.  A plan with a word that is not known here, or with a layer that is no plain one, such as one with an
adapter, is not used: the table then says nothing of that axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

COLUMN, ROW, EXPERTS = "colwise", "rowwise", "moe_tp_experts"
"""Words of the library for layers that are cut along their output or their input, and for experts."""
WHOLE = "replicated_with_grad_allreduce"
"""Word for weights that all tensor ranks have."""


def stages_of(model: Any, blocks: Sequence[str]) -> dict[str, Any]:
    """Returns the fields ``first`` and ``last`` of the table; none if there is no plan."""
    plan, lists = getattr(model, "_pp_plan", None) or {}, [*{block.rpartition(".")[0] for block in blocks}]
    head, names = _head(model), {name for name, _ in model.named_modules()}
    run = [name for name in plan if name in names and name not in head]
    if len(lists) != 1 or lists[0] not in run:
        return {}
    place = run.index(lists[0])
    return {"first": tuple(run[:place]), "last": (*run[place + 1 :], *head)}


def layers_of(model: Any, blocks: Sequence[str]) -> dict[str, Any]:
    """Returns the fields for tensor and expert parallelism; none if there is no plan, or one that is not
    used.
    """
    modules, plan = dict(model.named_modules()), getattr(model, "_tp_plan", None) or {}
    experts = [pattern for pattern, word in plan.items() if word == EXPERTS]
    vocabulary = [name for name, each in modules.items() if each is model.get_input_embeddings()]
    vocabulary += _head(model)
    found: dict[str, dict[str, int]] = {COLUMN: {}, ROW: {}}
    for pattern, word in plan.items():
        layers = [each for name, each in modules.items() if fnmatchcase(name, pattern)]
        of_experts = any(f"{pattern}.".startswith(f"{each}.") for each in experts)
        if layers and not of_experts and pattern not in vocabulary and word != WHOLE:
            if not (unit := _unit(model, pattern, word, layers)):
                return {}
            found[word][pattern] = unit
    plain = all(isinstance(modules[name], nn.Embedding | nn.Linear) for name in vocabulary)
    if not (plain and found[COLUMN] and found[ROW]):
        return {}
    return {
        "column": found[COLUMN],
        "row": found[ROW],
        "vocabulary": tuple(vocabulary),
        "sequence": _norms(model, blocks),
        "experts": tuple(each for each in experts if any(fnmatchcase(name, each) for name in modules)),
    }


def _head(model: Any) -> list[str]:
    return [name for name, each in model.named_modules() if each is model.get_output_embeddings()]


def _unit(model: Any, pattern: str, word: str, layers: Sequence[Any]) -> int:
    """Returns the number of features of these layers that stay together, which in attention are those that
    belong to one head of keys and values; 0 if it is not known.
    """
    if word not in (COLUMN, ROW) or any(type(each) is not nn.Linear for each in layers):
        return 0
    sizes = {each.out_features if word == COLUMN else each.in_features for each in layers}
    if "att" not in pattern.rpartition(".")[0].rpartition(".")[2]:
        return 1
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or len(sizes) != 1:
        return 0
    unit, rest = divmod(sizes.pop(), heads)
    return 0 if rest else unit


def _norms(model: Any, blocks: Sequence[str]) -> tuple[str, ...]:
    """Returns the norms between the parts of blocks, and those outside: modules that have vectors only."""
    found = dict[str, None]()
    for block in blocks:
        for name, child in model.get_submodule(block).named_children():
            if _is_norm(child):
                found[f"{block.rpartition('.')[0]}.*.{name}"] = None
    inside = tuple(f"{block}." for block in blocks)
    outside = (name for name, each in model.named_modules() if not name.startswith(inside) and _is_norm(each))
    return (*found, *outside)


def _is_norm(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False)]
    return bool(own) and all(each.dim() == 1 for each in own) and not [*module.children()]
