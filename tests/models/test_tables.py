"""The sharding tables of the shipped models say how each parameter is cut, a table that does not fit its model
is refused by a sentence, and with these cuts any layout gives the whole state back.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic.engine.cuts import Cuts, cuts_of
from elastic.engine.optim.base import rule_of
from elastic.errors import ModelError
from elastic.ids import Cell, WorkerId
from elastic.models import gpt2, llama
from elastic.models.spec import Fused, ShardingTable
from elastic.plan.layout import Layout, LayoutRule
from elastic.plan.placement import bytes_by_class, cell_of, classes_of, held, written_by
from elastic.plan.transfer import Move, covered, moves
from elastic.train.checks.preflight import preflight
from elastic.train.model import build_model, builder_of, tensors_of
from storage.slices import Slice, Tensor
from tests.plan.test_placement import box, gathered, numbers, world
from tests.support.toy_axes import LAYOUTS, TOYS
from tests.support.toys import small_job

pytestmark = pytest.mark.fast
SMALL = {"vocab": 29, "dim": 32, "layers": 3, "heads": 4}
REAL = [layout for layout in LAYOUTS if not dict(layout.more).keys() & TOYS.keys()]
"""Layouts of the product's own axes."""


def built(build: Any, **args: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = build(**args)
    return model


def cuts(model: nn.Module) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return {name: (each.split, each.depth) for name, each in cuts_of(model).items()}


def blocks(cut: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Returns what is expected of three blocks, from the splits of one."""
    return {f"layers.{n}.{name}": (split, (n, 3)) for n in range(3) for name, split in cut.items()}


LLAMA = {
    "attention_norm.weight": (),
    "attention.wq.weight": (0, 16),  # two query heads of 8 share a key
    "attention.wk.weight": (0, 8),
    "attention.wv.weight": (0, 8),
    "attention.wo.weight": (1, 16),
    "feed_forward_norm.weight": (),
    "feed_forward.w1.weight": (0, 1),
    "feed_forward.w2.weight": (1, 1),
    "feed_forward.w3.weight": (0, 1),
}


def test_how_llama_is_cut() -> None:
    expected = {"embedding.weight": ((0, 1), (0, 3)), **blocks(LLAMA), "norm.weight": ((), (2, 3))}
    untied = cuts(built(llama.build, **SMALL, kv_heads=2, tied=False))
    assert untied == {**expected, "output.weight": ((0, 1), (2, 3))}
    tied = cuts(built(llama.build, **SMALL, kv_heads=2))
    assert tied == {**expected, "embedding.weight": ((0, 1), ())}, "the first and the last stage need it"
    of_heads = {"attention.q_norm.weight": (), "attention.k_norm.weight": ()}
    normed = cuts(built(llama.build, **SMALL, kv_heads=2, tied=False, qk_norm=True))
    assert normed == {**untied, **blocks(of_heads)}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_how_gpt2_is_cut(norm: str) -> None:
    block = {
        **dict.fromkeys(
            (f"{n}_norm.{each}" for n in ("attention", "feed_forward") for each in ("weight", "bias")), ()
        ),
        **dict.fromkeys(("attention.qkv.weight", "attention.qkv.bias"), (0, 8, 32, 32, 32)),
        "attention.out.weight": (1, 8),
        "attention.out.bias": (),
        **dict.fromkeys(("w1.weight", "w1.bias"), (0, 1)),
        "w2.weight": (1, 1),
        "w2.bias": (),
    }
    last = dict.fromkeys(("norm.weight", "norm.bias"), ((), (2, 3))) if norm == "pre" else {}
    assert cuts(built(gpt2.build, **SMALL, norm=norm)) == {
        "embedding.weight": ((0, 1), ()),
        "positions.weight": ((), (0, 3)),
        **blocks(block),
        **last,
    }


@pytest.mark.parametrize(
    ("build", "preset"),
    [
        *((llama.build, preset) for preset in llama.PRESETS),
        *((gpt2.build, preset) for preset in gpt2.PRESETS),
    ],
)
def test_every_preset_fits_its_table(build: Any, preset: str) -> None:
    """Every matrix of a block is cut."""
    model = built(build, preset=preset, layers=2)
    for name, cut in cuts_of(model).items():
        if name.startswith("layers."):
            assert cut.split or model.get_parameter(name).dim() == 1, name


# ---- a table that does not fit


class Net(nn.Module):
    """Two blocks between an embedding and a head, each with a fused layer of three matrices, and experts."""

    def __init__(self, table: ShardingTable) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.table = table

    def sharding(self) -> ShardingTable:
        return self.table


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(8, 12), nn.Linear(4, 8), nn.LayerNorm(8)
        self.experts = nn.ParameterDict({"up": torch.zeros(4, 8, 6), "bias": torch.zeros(4, 6)})
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


TABLE = ShardingTable(
    blocks=("layers.0", "layers.1"),
    column={"*.qkv": Fused((8, 2, 2), unit=2)},
    row={"*.out": 2},
    vocabulary=("embed", "head"),
    experts=("*.experts",),
    sequence=("*.norm",),
    first=("embed",),
    last=("head",),
)


def test_what_each_field_does() -> None:
    first = {
        "layers.0.qkv.weight": Cuts((0, 2, 8, 2, 2), (0, 2)),
        "layers.0.qkv.bias": Cuts((0, 2, 8, 2, 2), (0, 2)),
        "layers.0.out.weight": Cuts((1, 2), (0, 2)),
        **dict.fromkeys(
            (f"layers.0.{name}" for name in ("out.bias", "norm.weight", "norm.bias", "scale")),
            Cuts((), (0, 2)),
        ),
        **dict.fromkeys((f"layers.0.experts.{name}" for name in ("up", "bias")), Cuts((), (0, 2))),
    }
    assert cuts_of(Net(TABLE)) == {
        "embed.weight": Cuts((0, 1), (0, 2)),
        "head.weight": Cuts((0, 1), (1, 2)),
        "head.bias": Cuts((0, 1), (1, 2)),
        **first,
        **{name.replace(".0.", ".1."): Cuts(cut.split, (1, 2)) for name, cut in first.items()},
    }


def test_a_table_of_blocks_only_cuts_nothing() -> None:
    """The table of the product for a model without one does so, too.  A parameter outside of first and last is
    on every stage.
    """
    assert set(cuts_of(Net(ShardingTable(TABLE.blocks))).values()) == {Cuts()}
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    assert set(cuts_of(model).values()) == {Cuts()}
    found = cuts_of(Net(replace(TABLE, last=())))
    assert found["head.weight"].depth == () and found["layers.1.out.weight"].depth == (1, 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"column": ("*.qkv",)},
            "column = ('*.qkv',) must map layers to the features that stay together; write",
        ),
        ({"last": "head"}, "last = 'head' must be a tuple; write last = ('head',)"),
        ({"column": {"*.qvk": 2}}, "column = {'*.qvk': 2} matches no module and no parameter; did you mean"),
        ({"sequence": ("norm",)}, "'norm' matches no module and no parameter; did you mean 'layers.0.norm'?"),
        (
            {"row": {"*.qkv": 2}},
            "column = {'*.qkv': Fused(lengths=(8, 2, 2), unit=2)} and row = {'*.qkv': 2} both",
        ),
        (
            {"experts": ("*.out",)},
            "row = {'*.out': 2} and experts = '*.out' both mean 'layers.0.out.weight'; leave",
        ),
        (
            {"column": {"*.qkv": 2, "layers.0.qkv": 4}},
            "column = {'*.qkv': 2} and column = {'layers.0.qkv': 4} both mean 'layers.0.qkv.weight'",
        ),
        (
            {"row": {"*.norm": 1}},
            "row = {'*.norm': 1} cuts dimension 1 of a weight, and 'layers.0.norm.weight' has the shape [8]; "
            "name layers whose weights have 2 dimensions or more",
        ),
        (
            {"experts": ("*.scale",)},
            "experts = '*.scale' cuts dimension 0 of a weight, and 'layers.0.scale' has",
        ),
        (
            {"column": {"*.qkv": 5}},
            "column = {'*.qkv': 5} keeps 5 features together, and this does not divide 12, the length of "
            "dimension 0 of 'layers.0.qkv.weight'; give a number that divides it",
        ),
        (
            {"column": {"*.qkv": Fused((6, 3, 3), 2)}},
            "unit=2)} keeps 2 features together, and this does not divide 3",
        ),
        (
            {"column": {"*.qkv": Fused((8, 2))}},
            "column = {'*.qkv': Fused(lengths=(8, 2), unit=1)} has lengths of 10 together, and dimension 0 of "
            "'layers.0.qkv.weight' has 12; give",
        ),
        ({"column": {"*.qkv": 0}}, "column = {'*.qkv': 0} must have whole numbers from 1 on"),
        ({"row": {"*.out": 0.5}}, "row = {'*.out': 0.5} must have whole numbers from 1 on"),
        (
            {"last": ("layers.1.norm", "head")},
            "last = 'layers.1.norm' matches 'layers.1.norm', and 'layers.1' is a block; name only modules outside",
        ),
        ({"first": ("layers",)}, "first = 'layers' matches 'layers', and 'layers.0' is a block; name only"),
        (
            {"blocks": ()},
            "first = 'embed' is of no use without blocks, of which stages are made; name the blocks",
        ),
    ],
)
def test_a_table_that_does_not_fit_is_refused_by_a_sentence(fields: dict[str, Any], said: str) -> None:
    """It names the field, the pattern, its value and the fix.  The control is the test of each field."""
    with pytest.raises(ModelError, match=f"^{re.escape('sharding() of Net: ')}.*{re.escape(said)}"):
        cuts_of(Net(replace(TABLE, **fields)))


class Misspelt(llama.Llama):
    def sharding(self) -> ShardingTable:
        return replace(super().sharding(), row={"*.w4": 1})


def test_it_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    job = small_job(tmp_path, model=f"{__name__}:{Misspelt.__name__}")
    with pytest.raises(
        ModelError, match=r"^sharding\(\) of Misspelt: row = \{'\*\.w4': 1\} matches no module"
    ):
        preflight(job)


def test_moments_and_averages_are_cut_as_their_parameter(tmp_path: Path) -> None:
    job = small_job(tmp_path, optim={"average": 0.9})
    model = build_model(job, builder_of(job))
    tensors, found = tensors_of(model, rule_of(job)), cuts_of(model)
    for tensor in tensors:
        cut = Cuts() if tensor.kind == "scalar" else found[tensor.name]
        assert (tensor.split, tensor.depth) == (cut.split, cut.depth), tensor
    assert len({tensor.kind for tensor in tensors if tensor.split}) == 4


# ---- the state of a model in all layouts


MODELS = {
    "llama": built(llama.build, **SMALL, kv_heads=2, tied=False),
    "gpt2": built(gpt2.build, **{**SMALL, "length": 8}),
}


def state_of(model: nn.Module) -> tuple[Tensor, ...]:
    """Returns the parameters of a model as tensors of the state."""
    found = cuts_of(model)
    return tuple(
        Tensor(name, "parameter", "F32", tuple(each.shape), found[name].split, found[name].depth)
        for name, each in model.named_parameters()
    )


def test_heads_and_fused_matrices_stay_whole() -> None:
    """Numpy cuts them by heads, as a second opinion."""
    layout = Layout(1, 1, (("tp", 2),))
    llamas, gpts = ({tensor.name: tensor for tensor in state_of(MODELS[kind])} for kind in ("llama", "gpt2"))
    for rank in range(2):
        cell = cell_of(layout, rank)
        query, out, fused = (
            llamas["layers.1.attention.wq.weight"],
            llamas["layers.1.attention.wo.weight"],
            gpts["layers.1.attention.qkv.weight"],
        )
        by_heads = numbers(query).reshape(2, 2, 8, 32)[rank].reshape(-1, 32)
        assert (gathered(numbers(query), held(query, cell)) == by_heads).all()
        by_heads = numbers(out).reshape(32, 2, 16)[:, rank]
        assert (gathered(numbers(out), held(out, cell)) == by_heads).all()
        by_heads = numbers(fused).reshape(3, 4, 8, 32)[:, 2 * rank : 2 * rank + 2].reshape(-1, 32)
        assert (gathered(numbers(fused), held(fused, cell)) == by_heads).all()


def view(tensor: Tensor, cell: Cell, part: Slice, memory: np.ndarray) -> np.ndarray:
    """Returns the elements of ``part`` in the memory of a member in ``cell``."""
    (own,) = [each for each in held(tensor, cell).boxes if each.slice.intersect(part) == part]
    edges = zip(own.at, own.slice.start, part.start, part.stop, strict=True)
    return memory[tuple(slice(at + low - first, at + high - first) for at, first, low, high in edges)]


@pytest.mark.parametrize("model", MODELS)
def test_any_layout_gives_the_state_to_any_other(model: str) -> None:
    """Each member ends with its part of every parameter, from members of the other layout; some of them are
    survivors, which keep what they have.
    """
    tensors = state_of(MODELS[model])
    for before, after in itertools.product(REAL, REAL):
        old = {each.worker: each.cell for each in world(before, "w")}
        new = {
            WorkerId(f"w{rank}" if rank % 2 else f"n{rank}"): cell_of(after, rank)
            for rank in range(after.world)
        }
        sent: dict[str, list[Move]] = {}
        for move in moves(tensors, world(before, "w"), after, [*new]):
            sent.setdefault(move.slice.name, []).append(move)
        for tensor in tensors:
            whole = numbers(tensor)
            there = {worker: gathered(whole, held(tensor, cell)) for worker, cell in old.items()}
            here = {worker: np.zeros(held(tensor, cell).shape, int) for worker, cell in new.items()}
            for worker, cell in new.items():
                for part in (each.slice for each in held(tensor, cell).boxes) if worker in old else ():
                    kept = (each.slice.intersect(part) for each in held(tensor, old[worker]).boxes)
                    for each in filter(None, kept):
                        view(tensor, cell, each, here[worker])[:] = view(
                            tensor, old[worker], each, there[worker]
                        )
            for move in sent.get(tensor.name, ()):
                target = view(tensor, new[move.destination], move.slice, here[move.destination])
                target[:] = view(tensor, old[move.source], move.slice, there[move.source])
            for worker, cell in new.items():
                assert (here[worker] == gathered(whole, held(tensor, cell))).all(), (before, after, tensor)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", REAL, ids=str)
def test_members_cover_the_state_and_write_it_once(model: str, layout: Layout) -> None:
    """The control: without the members of one cell they do not cover it."""
    tensors, held_now = state_of(MODELS[model]), world(layout, "w")
    times = {tensor: np.zeros(tensor.shape, int) for tensor in tensors}
    for rank in range(layout.world):
        for tensor, each in written_by(tensors, layout, rank):
            times[tensor][box(each.slice)] += 1
    assert all((count == 1).all() for count in times.values())
    assert covered(held_now, classes_of(tensors))
    for cell in {each.cell for each in held_now if each.cell}:
        assert not covered([each for each in held_now if each.cell != cell], classes_of(tensors))


@pytest.mark.parametrize("model", MODELS)
def test_classes_are_those_of_the_axes_that_a_run_may_have(model: str) -> None:
    """Blocks are alike where no axis tells them apart: the coordinator gets as few classes as of a model
    without a table.
    """
    tensors = state_of(MODELS[model])
    plain = [replace(tensor, split=(), depth=()) for tensor in tensors]
    few, many = LayoutRule().degrees, LayoutRule(model=(("pp", 2), ("tp", 2))).degrees
    assert len(classes_of(tensors, few)) == len(classes_of(plain)) < len(classes_of(tensors, many))
    assert bytes_by_class(tensors, few) == bytes_by_class(plain)
    assert sum(bytes_by_class(tensors, many)) == sum(bytes_by_class(plain))


@pytest.mark.parametrize("build", [llama.build, gpt2.build])
def test_a_model_has_a_layer(build: Any) -> None:
    with pytest.raises(ValueError, match="layers = 0 must be at least 1"):
        build(layers=0)
