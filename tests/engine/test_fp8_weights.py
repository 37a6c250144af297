"""Weights in fp8: what members cast, gather and hold, and how often a compiled block casts what its layers
share.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified

from elastic.engine.fp8 import BACKWARD, FORWARD, Recipe, apply_fp8, held_by, hold, scaled
from elastic.engine.fp8_weights import Fp8Weights, weights_of, whole_weights
from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.models.llama import build, rotary
from elastic.models.spec import ShardingTable
from elastic.plan.axes import HeldPart, chunk
from elastic.plan.layout import Layout
from elastic.plan.placement import cell_of, held, model_part
from elastic.train.model import build_model, builder_of
from storage.slices import Tensor as Described
from tests.engine.test_fp8 import rounded
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import compute, here, member
from tests.support.toys import small_job

TABLE = ShardingTable(("0", "1"))
LARGE = {"vocab": 29, "dim": 64, "layers": 4, "heads": 4}
BLOCKS = 4 * (4 * 64 * 64 + 3 * 64 * 192)
"""The parameters of the linear layers of its blocks."""


def two_layers(scale: float = 1.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
    with torch.no_grad():
        for each, factor in zip(model.parameters(), (scale, 3.0), strict=True):
            each.mul_(factor * 10.0 ** torch.randint(-3, 3, (len(each), 1)))
    return model


def values_of(weights: Fp8Weights, name: str) -> Tensor:
    """Returns what the fp8 values of this member's rows stand for."""
    first, last = weights.rows[name]
    inverse = weights.inverse[name].double()
    return weights.parts[name][: last - first].double() * (
        inverse[first:last, None] if inverse.dim() else inverse
    )


def cast(world: World, recipe: Recipe, scale: float, spoiled: float) -> dict[str, Tensor]:
    """Casts this member's parts of the weights of a model, and returns what they stand for."""
    model = two_layers(scale)
    if spoiled:
        model[0].weight.data[47, 3] = spoiled
    layers = weights_of(model, TABLE)
    weights = Fp8Weights(layers, whole_weights(model, layers), world, recipe)
    index = world.layout.coordinates(world.rank)["dp_shard"]
    weights.cast(
        {
            name: each.detach()[slice(*chunk(len(each), world.layout.dp_shard, index))]
            for name, each in model.named_parameters()
        }
    )
    return {name: values_of(weights, name) for name in weights.parts}


def judged(recipe: Recipe, scale: float) -> dict[str, Tensor]:
    """The judge: whole weights as bf16, and then as fp8 can hold them."""
    return judged_of(two_layers(scale), recipe)


def judged_of(model: nn.Module, recipe: Recipe) -> dict[str, Tensor]:
    """Returns the values of the weights of ``model`` by the judge."""
    whole = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
    if recipe == "tensor":
        return {name: rounded(each, FORWARD) for name, each in whole.items()}
    return {name: torch.stack([rounded(row, FORWARD) for row in each]) for name, each in whole.items()}


def test_parts_are_rounded_as_the_whole_weight_is(ranks: Ranks) -> None:
    """One member, and three of which each has other rows; 32 rows do not divide by 3.  The control: another
    scale gives other values.
    """
    recipes: tuple[Recipe, ...] = ("tensor", "row")
    cases = [(recipe, scale, 0.0) for recipe in recipes for scale in (1e-12, 1.0, 1e9)]
    for (recipe, scale, _), parts in zip(cases, ranks.run_each(Layout(1, 3), cast, cases), strict=True):
        want, alone = judged(recipe, scale), here(cast, recipe, scale, 0.0)
        assert all(torch.equal(alone[name], want[name]) for name in want)
        assert all(torch.equal(torch.cat([part[name] for part in parts]), want[name]) for name in want)
        assert not torch.equal(alone["0.weight"], judged(recipe, scale * 1.7)["0.weight"])


SPLITS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"0.weight": (0, 4), "1.weight": (1, 4)},
    {"0.weight": (0, 2, 24, 24), "1.weight": (1, 4, 16, 32)},
)
"""A weight whose rows are cut, and one that is cut inside of its rows; whole, and of two fused matrices."""


DIVIDED = tuple(
    Layout(*data, more)
    for data, more in (
        ((1, 2), (("tp", 2),)),
        ((2, 1), (("tp", 2),)),
        ((1, 1), (("tp", 3),)),
        ((1, 1), (("cp", 2), ("tp", 2))),
        ((1, 1), (("pp", 2), ("tp", 2))),
    )
)


def uneven() -> nn.Sequential:
    """Returns two layers whose parts have largest elements of other magnitudes."""
    model = two_layers()
    with torch.no_grad():
        for each in model.parameters():
            rows, columns = (torch.logspace(-1.5, 1.5, size) for size in each.shape)
            each.mul_(rows[:, None] * columns)
    return model


def divided(
    world: World, recipe: Recipe, splits: dict[str, tuple[int, ...]], shards_alone: bool
) -> list[bool]:
    """Casts what this member has of the weights of a model that is divided between members.  Returns, for
    each weight of its stage, whether the values are those of the whole weight; with ``shards_alone`` whether
    the scales are those that the shards of one part of the model find by themselves.
    """
    cell = cell_of(world.layout, world.rank)
    layers, whole, masters, right, model = {}, {}, {}, {}, uneven()
    for place, (name, weight) in enumerate(model.named_parameters()):
        whole[name] = Described(name, "parameter", "F32", tuple(weight.shape), splits[name], (place, 2))
        rows, columns = held(whole[name], model_part(cell)).shape
        if rows:
            layers[name] = nn.Linear(columns, rows, bias=False, device="meta")
            masters[name] = own_part(weight.detach(), held(whole[name], cell))
            right[name] = own_part(judged_of(model, recipe)[name], held(whole[name], cell))
    weights = Fp8Weights(layers, whole, world, recipe)
    weights.cast(masters)
    if shards_alone:
        others = Fp8Weights(
            layers,
            whole,
            replace(world, by_ranks={world.layout.stage_ranks(world.rank): world.shard_group}),
            recipe,
        )
        others.cast(masters)
        return [torch.equal(weights.inverse[name], others.inverse[name]) for name in layers]
    return [torch.equal(values_of(weights, name), right[name]) for name in layers]


def own_part(whole: Tensor, part: HeldPart) -> Tensor:
    """Returns the memory of a part of a weight."""
    memory = whole.new_empty(part.shape)
    for box in part.boxes:
        rows, columns = (slice(a, a + n) for a, n in zip(box.at, box.slice.shape, strict=True))
        (top, left), (bottom, right) = box.slice.start, box.slice.stop
        memory[rows, columns] = whole[top:bottom, left:right]
    return memory


def test_all_that_hold_a_part_of_a_weight_know_its_scale(ranks: Ranks) -> None:
    """Tensor parallelism cuts the weights, and stages have one each.  The control: the shards of one part of
    the model alone find other scales.
    """
    cases = [(recipe, splits, False) for recipe in ("tensor", "row") for splits in SPLITS]
    for layout in DIVIDED:
        found = ranks.run_each(layout, divided, cases)
        assert all(member and all(member) for case in found for member in case), str(layout)
    wrong = ranks.run_each(DIVIDED[0], divided, [(*case[:2], True) for case in cases])
    assert not any(all(map(all, case)) for case in wrong)


def test_every_member_knows_what_is_not_finite_anywhere(ranks: Ranks) -> None:
    """The last member alone has the bad element.  The control: the other weight, and with rows all other
    rows, stay.
    """
    bad = [float("inf"), float("-inf"), float("nan")]
    found = ranks.run_each(
        Layout(1, 3), cast, [(recipe, 1.0, each) for recipe in ("tensor", "row") for each in bad]
    )
    for parts in found[: len(bad)]:
        assert all(part["0.weight"].isnan().all() for part in parts)
        assert all(part["1.weight"].isfinite().all() for part in parts)
    for parts in found[len(bad) :]:
        rows = torch.cat([part["0.weight"] for part in parts])
        assert rows[47].isnan().all() and torch.equal(rows[:47], judged("row", 1.0)["0.weight"][:47])


@pytest.mark.fast
def test_a_weight_that_two_modules_have_stays_as_it_is() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
    assert [*weights_of(model, ShardingTable(("0", "1")))] == ["0.weight", "1.weight"]
    model[2].weight = model[0].weight
    assert [*weights_of(model, ShardingTable(("0", "1")))] == ["1.weight"]


def living() -> dict[int, torch.UntypedStorage]:
    """Returns the storages of all tensors of this process that are memory themselves, by their address."""
    gc.collect()
    plain = (each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter))
    return {storage._cdata: storage for storage in (each.untyped_storage() for each in plain)}


def stepping(world: World, job: Job) -> tuple[Calls, int, int]:
    """Returns the collectives of a step's rounds, the bytes of tensors at their end, and those of the whole
    weights that layers hold.
    """
    # kept, so that no address is used again, and what a job before this one has left counts on both sides
    before = living()
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        with counting() as calls:
            compute(me.session, me.state, 2)
        more = min(_more_than(before) for _ in range(5))
        return calls, more, sum(each.numel() for each in held_by(me.state.model))


def _more_than(before: Mapping[int, torch.UntypedStorage]) -> int:
    """Returns the bytes of storages that were not there before.  A thread of gloo keeps what the last
    collective sent until some time after the collective has ended, so a single look may find too much.
    """
    found = sum(each.nbytes() for address, each in living().items() if address not in before)
    time.sleep(0.02)
    return found


@pytest.mark.parametrize(
    ("precision", "zero", "gathers"),
    [
        ("fp8", 2, 1),
        ("fp8-rowwise", 3, 2 * 2),
        pytest.param("fp8-rowwise", 2, 1, marks=pytest.mark.full),
        pytest.param("fp8", 3, 2 * 2, marks=pytest.mark.full),
    ],
)
def test_weights_travel_and_stay_as_single_bytes(
    fresh_ranks: Ranks, tmp_path: Path, precision: str, zero: int, gathers: int
) -> None:
    """E5: stage 2 gathers once a step, stage 3 for the forward and backward pass of each of two rounds.

    The control: bf16 takes two bytes.  All maxima of a step are one all-reduce.
    """
    found, jobs = {}, dict[str, Job]()
    for name in ("bf16", precision):
        free = {"reproducible": False, "model_args": LARGE, "copies": {"copy_every": 0}, "precision": name}
        jobs[name] = job = small_job(tmp_path / name, parallel={"zero": zero}, **free)
    for name, members in zip(
        jobs, fresh_ranks.run_each(Layout(1, 2), stepping, [(job,) for job in jobs.values()]), strict=True
    ):
        found[name] = members[0]
    others = sum(each.numel() for each in build_model(job, builder_of(job)).parameters()) - BLOCKS
    for name, size in (("bf16", 2), (precision, 1)):
        calls, _, _ = found[name]
        # an output, and an input of half its size
        whole = sum(call.bytes for call in calls if "gather" in call.name) * 2 / 3
        assert (whole / gathers - 2 * others) / BLOCKS == pytest.approx(size, rel=0.02), name
    assert not found["bf16"][0].named("allreduce")
    (maxima,) = found[precision][0].named("allreduce")
    scales = 4 * 7 if precision == "fp8" else 4 * (5 * 64 + 2 * 192)
    assert maxima.bytes == 4 * scales
    assert found["bf16"][2] == 0 and found[precision][2] == BLOCKS
    # this member's half, the scales, and what stands in the place of the largest weight
    more = BLOCKS / 2 + 4 * scales + 2 * 64 * 192
    less = BLOCKS if zero == 2 else 0
    assert found[precision][1] - found["bf16"][1] == pytest.approx(more - less, abs=0.02 * BLOCKS)


def graphs(model: nn.Module, recipe: Recipe) -> Iterator[Mapping[str, int]]:
    """Yields how often the compiled forward and backward pass of a block run each operation, as the compiler
    gets them.
    """
    found: list[Counter[str]] = []

    def note(graph: Any, _: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        found.append(Counter(f"{node.target} {node.kwargs.get('dtype', '')}".strip() for node in calls))
        return make_boxed_func(graph.forward)

    def compiler(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=note,
            bw_compiler=note,
            partition_fn=min_cut_rematerialization_partition,
        )

    apply_fp8(model, model.sharding(), recipe)  # type: ignore[operator]
    block = model.layers[0]  # type: ignore[index]
    for layer in (each for each in block.modules() if isinstance(each, nn.Linear)):
        values, inverse = scaled(layer.weight.detach(), FORWARD, by_row=recipe == "row")
        hold(layer, values, inverse.squeeze(-1) if recipe == "row" else inverse)
    block.compile(backend=compiler, fullgraph=True)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    block(x, rotary(16, 16, 1e4, x.device), None).sum().backward()
    yield from found


# torch's compiler does
@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated")
@pytest.mark.parametrize("recipe", ["tensor", "row"])
def test_a_compiled_block_casts_what_its_layers_share_once(recipe: Recipe) -> None:
    """Seven layers have four inputs (of q, k and v; of o; of w1 and w3; of w2) and seven gradients, each of
    which serves two products.

    The control: not compiled, each layer casts its input.
    """
    torch._dynamo.reset()
    model = build(vocab=32, dim=64, layers=1, heads=4, kv_heads=2, hidden=128).bfloat16()
    forward, backward = graphs(model, recipe)
    assert (forward["aten._scaled_mm.default"], forward[f"aten._to_copy.default {FORWARD}"]) == (7, 4)
    # by rows first, and then over them
    assert forward["aten.amax.default"] == {"tensor": 2 * 4, "row": 4}[recipe]
    assert (
        backward[f"aten._to_copy.default {BACKWARD}"] == 7
        and not backward[f"aten._to_copy.default {FORWARD}"]
    )
    assert backward["aten._scaled_mm.default"] == {"tensor": 14, "row": 7}[recipe]
    model = build(vocab=32, dim=64, layers=1, heads=4, kv_heads=2, hidden=128).bfloat16()
    apply_fp8(model, model.sharding(), recipe)  # type: ignore[operator]
    with torch.profiler.profile() as profile:
        x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
        model.layers[0](x, rotary(16, 16, 1e4, x.device), None)  # type: ignore[index,operator]
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::amax") >= 7 * 2
