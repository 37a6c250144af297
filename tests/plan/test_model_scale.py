"""N3, N4: the state of two large models on 1,024 workers: a Llama of 70 B (pp 8, dp 16, tp 8), and 400 B with
experts (pp 8, dp 32, tp 4).

Costs are counted in calls; ``python -m tests.benchmarks.scale planning`` measures seconds, and has its limits.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic.control.run import Forming
from elastic.engine import world
from elastic.engine.cuts import cuts_of
from elastic.engine.world import World
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.models import llama
from elastic.models.spec import ShardingTable
from elastic.plan.layout import Layout, LayoutRule, choose
from elastic.plan.placement import (
    bytes_by_class,
    cell_of,
    classes_of,
    degrees_of,
    distinct_cells,
    held,
    written_by,
)
from elastic.plan.seats import seat
from elastic.plan.transfer import Holding, Move, covered, missing, moves
from elastic.protocol.events import Joined
from elastic.state.region import ALIGNED, frame
from storage.slices import Slice, Tensor
from tests.benchmarks.scale.control import Coordinator, measure
from tests.support.calls import calls

AT = Version(4, 1)
A_NODE = 8
STAGES = 8
DIM, LAYERS, HEADS, EXPERTS, HIDDEN, WORDS = 5120, 48, 40, 128, 8192, 200_000
"""The sizes of the model with experts: every second layer has them, the others a dense part of two HIDDEN."""


class Mixture(nn.Module):
    """A decoder whose experts are stored as rows, [experts × features, features]; it only has a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.layers = nn.ModuleList(MixtureBlock(number % 2 == 1) for number in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)

    def sharding(self) -> ShardingTable:
        head = DIM // HEADS
        return ShardingTable(
            blocks=tuple(f"layers.{number}" for number in range(LAYERS)),
            column={"*.wq": 5 * head, "*.wk": head, "*.wv": head, "*.w1": 1, "*.w3": 1},
            row={"*.wo": 5 * head, "*.w2": 1},
            vocabulary=("embedding", "output"),
            experts=("*.experts",),
            first=("embedding",),
            last=("norm", "output"),
        )


class MixtureBlock(nn.Module):
    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        for name, features in {"wq": DIM, "wk": DIM // 5, "wv": DIM // 5}.items():
            self.add_module(name, nn.Linear(DIM, features, bias=False))
        self.wo = nn.Linear(DIM, DIM, bias=False)
        if has_experts:
            self.router = nn.Linear(DIM, EXPERTS, bias=False)
            self.experts = nn.ParameterDict(
                {
                    "up": torch.empty(EXPERTS * HIDDEN, DIM),
                    "gate": torch.empty(EXPERTS * HIDDEN, DIM),
                    "down": torch.empty(EXPERTS * DIM, HIDDEN),
                }
            )
        else:
            self.w1, self.w3 = (nn.Linear(DIM, 2 * HIDDEN, bias=False) for _ in range(2))
            self.w2 = nn.Linear(2 * HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@cache
def tensors_of(name: str) -> tuple[Tensor, ...]:
    """Returns the parameters of a model and two moments of each, in bf16 and float32."""
    with torch.device("meta"):
        model = Mixture() if name == "mixture" else llama.build(preset="llama3-70b")
    cuts = cuts_of(model)
    return tuple(
        Tensor(each, kind, dtype, tuple(weight.shape), cuts[each].split, cuts[each].depth)
        for each, weight in model.named_parameters()
        for kind, dtype in (("parameter", "BF16"), ("moment.exp_avg", "F32"), ("moment.exp_avg_sq", "F32"))
    )


LAYOUTS = {
    "llama": Layout(1, 16, (("pp", STAGES), ("tp", 8))),
    "mixture": Layout(1, 32, (("pp", STAGES), ("tp", 4))),
}
MODELS = pytest.mark.parametrize("name", LAYOUTS)
SIZES = {"llama": 70.6e9, "mixture": 397.7e9}


def some_of(name: str) -> list[Tensor]:
    """Returns the parameters of the last block of each kind, and those outside of the blocks."""
    blocks = ("layers.79.",) if name == "llama" else ("layers.46.", "layers.47.")
    parameters = tensors_of(name)[::3]
    return [each for each in parameters if each.name.startswith(blocks) or "layers" not in each.name]


def workers() -> tuple[list[WorkerId], dict[WorkerId, NodeId]]:
    names = [WorkerId(f"w{number}") for number in range(1024)]
    return names, {name: NodeId(f"n{number // A_NODE}") for number, name in enumerate(names)}


def holdings(layout: Layout, names: Sequence[WorkerId]) -> list[Holding]:
    return [Holding(name, AT, cell_of(layout, rank)) for rank, name in enumerate(names)]


@MODELS
def test_a_model_is_as_large_as_it_is_called(name: str) -> None:
    assert sum(np.prod(each.shape) for each in tensors_of(name)[::3]) == pytest.approx(SIZES[name], rel=1e-3)
    split = {each.name.rpartition(".")[0].rpartition(".")[2] for each in tensors_of(name) if not each.split}
    assert "experts" in split if name == "mixture" else "experts" not in split


@MODELS
def test_tensor_groups_sit_within_nodes_of_eight(name: str) -> None:
    """The workers joined in any order.  After the loss of a worker, only its own tensor group is torn."""
    layout, (names, nodes) = LAYOUTS[name], workers()
    mixed = random.Random(3).sample(names, 1024)
    members = seat(mixed, nodes, layout)
    groups = {layout.along(("tp",), rank) for rank in range(1024)}
    assert all(len({nodes[members[rank]] for rank in group}) == 1 for group in groups)
    spare = WorkerId("spare")
    left = [*(worker for worker in mixed if worker != members[5]), spare]
    again = seat(left, {**nodes, spare: NodeId("other")}, layout, holdings(layout, members))
    assert [rank for rank in range(1024) if again[rank] != members[rank]] == [5]


def ranks_along(layout: Layout, rank: int, *axes: str) -> tuple[int, ...]:
    """Returns the ranks that differ from ``rank`` along ``axes`` alone, with numpy over all ranks."""
    grid = np.arange(layout.world).reshape([degree for _, degree in layout.degrees])
    place = zip(layout.degrees, np.argwhere(grid == rank)[0], strict=True)
    return tuple(grid[tuple(slice(None) if name in axes else at for (name, _), at in place)].flat)


def worlds(layout: Layout) -> Iterator[World]:
    """Yields the world that each rank forms, with torch's fake backend, which needs nobody to talk to."""
    meta = torch.device("meta")  # on which no addresses are exchanged, as with gloo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "Groups", partial(world.Groups, backend="fake"))
        for rank in range(layout.world):
            formed = World.form(
                dist.HashStore(), generation=1, layout=layout, rank=rank, device=meta, form_s=9.0
            )
            with closing(formed):
                yield formed


@MODELS
def test_n7_each_of_1024_ranks_makes_one_group_for_each_set_of_ranks(name: str) -> None:
    """N7: all members of a set make its group, and all ranks connect groups of equal sizes in one order.  Tensor
    groups lie within nodes of eight.  The control: a group of stages has a member on each of eight nodes.
    """
    layout, made, order = LAYOUTS[name], Counter[tuple[int, ...]](), set[tuple[int, ...]]()
    for rank, formed in enumerate(worlds(layout)):
        tensor, stages, shards = (ranks_along(layout, rank, axis) for axis in ("tp", "pp", "dp_shard"))
        stage, replicas = ranks_along(layout, rank, "dp_shard", "tp"), (rank,)
        assert {*formed.by_ranks} == {tensor, stages, shards, stage, replicas}
        assert all(group.size() == len(ranks) for ranks, group in formed.by_ranks.items())
        assert formed.along(["tp"]) is formed.by_ranks[tensor]
        assert formed.along(["pp"]) is formed.by_ranks[stages]
        assert formed.shard_group is formed.data_group is formed.by_ranks[shards]
        assert formed.stage_group is formed.by_ranks[stage]
        assert formed.replicate_group is formed.by_ranks[replicas]
        assert len({member // A_NODE for member in tensor}) == 1
        assert len({member // A_NODE for member in stages}) == STAGES
        order.add(tuple(group.size() for group in formed.groups))
        made.update([*formed.by_ranks])
    assert all(times == len(ranks) for ranks, times in made.items())
    tp, shard = dict(layout.more)["tp"], layout.dp_shard
    assert order == {(1024, shard, 1, shard * tp, STAGES, tp)}
    assert Counter(map(len, made)) == Counter(
        size for size in (shard, 1, shard * tp, STAGES, tp) for _ in range(1024 // size)
    )


def chunk(length: int, count: int, index: int) -> int:
    """Returns the length of one chunk, as numpy would slice it."""
    size = -(-length // count)
    return max(min((index + 1) * size, length) - index * size, 0)


@MODELS
def test_the_bytes_of_a_member_are_what_arithmetic_says(name: str) -> None:
    """A member of each stage, each with other places along the other axes."""
    layout, tensors = LAYOUTS[name], tensors_of(name)
    tensor_degree = dict(layout.more)["tp"]
    for stage in range(STAGES):
        shard, tensor_rank = stage * 3 % layout.dp_shard, stage % tensor_degree
        rank = (stage * layout.dp_shard + shard) * tensor_degree + tensor_rank
        expected = 0
        for each in tensors:
            if each.depth and each.depth[0] * STAGES // each.depth[1] != stage:
                continue
            shape = list(each.shape)
            if each.split:
                dim, unit = each.split
                shape[dim] = unit * chunk(shape[dim] // unit, tensor_degree, tensor_rank)
            shape[0] = chunk(shape[0], layout.dp_shard, shard)
            size = int(np.prod(shape)) * (2 if each.dtype == "BF16" else 4)
            expected += -(-size // ALIGNED) * ALIGNED
        assert frame(tensors, cell_of(layout, rank)).bytes == expected


def times_held(tensor: Tensor, parts: Sequence[Slice]) -> set[int]:
    """Returns how often elements of ``tensor`` are in ``parts``, with numpy over the edges of the parts."""
    edges = [
        sorted({0, size, *(at for part in parts for at in (part.start[dim], part.stop[dim]))})
        for dim, size in enumerate(tensor.shape)
    ]
    times = np.zeros([len(list(pairwise(each))) for each in edges], int)
    for part in parts:
        at = (np.searchsorted(each, (part.start[dim], part.stop[dim])) for dim, each in enumerate(edges))
        times[tuple(slice(first, last) for first, last in at)] += 1
    return set(times.flat)


@MODELS
def test_every_element_is_held_once_and_where_no_axis_cuts_by_all(name: str) -> None:
    """A tensor that tensor ranks do not cut, such as a norm or experts, is on each of them."""
    layout = LAYOUTS[name]
    cells = distinct_cells(layout)
    assert len(cells) == 1024
    for each in some_of(name):
        copies = (1 if each.split else dict(layout.more)["tp"]) * (1 if each.depth else STAGES)
        assert times_held(each, [box.slice for cell in cells for box in held(each, cell).boxes]) == {copies}


@MODELS
def test_a_tensor_group_writes_each_of_its_elements_once(name: str) -> None:
    """Members that hold the same part are those of a tensor group, so each group writes all that it holds."""
    layout = LAYOUTS[name]
    tensors = [each for each in some_of(name) if "layers" in each.name]
    group = layout.along(("tp",), 1024 - 1)
    written = [(tensor, box.slice) for rank in group for tensor, box in written_by(tensors, layout, rank)]
    for each in tensors:
        own = [box.slice for rank in group for box in held(each, cell_of(layout, rank)).boxes]
        assert sorted(part for tensor, part in written if tensor == each) == sorted(set(own)), each


@pytest.mark.parametrize("degree", [8, 32])
def test_an_expert_group_has_whole_experts(degree: int) -> None:
    """The members between two of a group hold the rows of the experts of the first of them, and at 32 of 32
    shards each member holds its own experts.  The degree is in no cell, so no state moves if it changes.
    """
    layout, rank = LAYOUTS["mixture"], 1000  # of the last stage
    shards, group = layout.shard_ranks(rank), layout.expert_group(rank, degree)
    between, each = len(shards) // degree, EXPERTS // degree
    assert rank in group and len(group) == degree
    for tensor in (every for every in some_of("mixture") if ".experts." in every.name):
        features = tensor.shape[0] // EXPERTS
        for number, place in enumerate(range(0, len(shards), between)):
            there = shards[place : place + between]
            assert group[number] in there
            boxes = [box.slice for rank in there for box in held(tensor, cell_of(layout, rank)).boxes]
            rows = [(part.start[0], part.stop[0]) for part in boxes]
            assert (rows[0][0], rows[-1][1]) == (number * each * features, (number + 1) * each * features)
            assert all(before[1] == after[0] for before, after in pairwise(rows))


@MODELS
def test_n3_the_classes_are_those_of_stages(name: str) -> None:
    """N3: a worker tells few classes: of each stage a class for each kind of weight, and one for each end."""
    rule = LayoutRule(model=LAYOUTS[name].more)
    kinds = {"llama": 6, "mixture": 9}[name]
    assert len(classes_of(tensors_of(name), rule.degrees)) <= kinds * STAGES + 3
    assert len(classes_of(tensors_of(name))) > 4 * kinds * STAGES


def encoded(name: str, *, of_any_layout: bool = False) -> int:
    """Returns the bytes of a worker's joining in the journal.  With ``of_any_layout`` the worker tells the classes
    of all degrees.
    """
    degrees = None if of_any_layout else LayoutRule(model=LAYOUTS[name].more).degrees
    classes, sizes = (each(tensors_of(name), degrees) for each in (classes_of, bytes_by_class))
    joined = Joined(WorkerId("w1024"), NodeId(56 * "f"), "cuda", classes, class_bytes=sizes)
    assert codec.decode_event(codec.encode(joined)) == joined
    return len(json.dumps(codec.encode(joined)))


@MODELS
def test_n3_what_a_worker_tells_is_a_few_kilobytes(name: str) -> None:
    """N3: 20 MB of journal are 20,000 bytes for each of 1,024 workers.  The control: the classes of all degrees
    take more than that for one worker.
    """
    assert encoded(name) < 12_000 < 20_000 < encoded(name, of_any_layout=True)


@MODELS
def test_n3_1024_workers_of_stages_join_and_form_twice_in_a_few_megabytes(name: str) -> None:
    """N3: the classes stand once in the journal, not once for each worker."""
    found = measure(1024, tensors_of(name), LayoutRule(model=LAYOUTS[name].more))
    phases = ("join", "form", "fence", "form_again")
    assert sum(found[f"{phase}_journal_bytes"] for phase in phases) < 5e6 < 1024 * encoded(name)
    assert found["given_up_workers"] == 0 and found["copies_of_a_send"] < 5


@MODELS
def test_n4_the_coordinator_decides_after_a_loss_at_1024(name: str, tmp_path: Path) -> None:
    """N4: from the loss of a worker, by the answers of all others, to the next plan: two million calls take about
    a second.  The decision leaves the model group of that worker over.
    """
    rule = LayoutRule(model=LAYOUTS[name].more)
    one = Coordinator(1024, tmp_path, tensors_of(name), rule)
    one.join()
    one.form()
    assert one.plan.layout == Layout(1024 // rule.group, 1, rule.model)
    assert calls(lambda: one.fence(1)) < 2e6
    assert isinstance(one.run.state, Forming) and not one.given_up
    assert one.plan.layout == Layout(1024 // rule.group - 1, 1, rule.model)
    one.journal.close()


def with_half_of_the_stages(layout: Layout) -> Layout:
    more = tuple((axis, STAGES // 2 if axis == "pp" else degree) for axis, degree in layout.more)
    return Layout(1, 2 * layout.dp_shard, more)


@MODELS
def test_n4_one_member_plans_its_own_moves_at_1024(name: str) -> None:
    """N4: half as many stages, and a lost seat.  Two million calls take about a second."""
    layout, (names, nodes), tensors = LAYOUTS[name], workers(), tensors_of(name)
    held_now, other, homes = holdings(layout, names), with_half_of_the_stages(layout), [*nodes.values()]
    found: list[Move] = []
    assert calls(lambda: found.extend(moves(tensors, held_now, other, names, homes, of=names[500]))) < 2e6
    into = Counter[tuple[str, str]]()
    for move in found:
        if move.destination == names[500]:
            into[move.slice.kind, move.slice.name] += move.slice.count
    boxes = [box.slice for each in tensors for box in held(each, cell_of(other, 500)).boxes]
    assert into == {(part.kind, part.name): part.count for part in boxes}
    lost: list[Slice] = []
    assert calls(lambda: lost.extend(missing(tensors, held_now[1:], cell_of(layout, 0)))) < 2e6
    cut = [box.slice for each in tensors if each.split for box in held(each, cell_of(layout, 0)).boxes]
    assert sorted(lost) == sorted(cut), "the other tensor ranks have the rest"


@MODELS
@pytest.mark.parametrize("has_spare", [True, False])
def test_n4_a_member_plans_its_moves_after_a_loss_at_1024(name: str, has_spare: bool) -> None:
    """N4: seats and the moves of one member.  Either a spare takes the seat, or there is one shard fewer, which
    cuts all state anew.
    """
    layout, (names, nodes), tensors = LAYOUTS[name], workers(), tensors_of(name)
    rule, spare = LayoutRule(dp_replicate=1, model=layout.more), WorkerId("spare")
    members = seat(names, nodes, layout)
    held_now = [each for each in holdings(layout, members) if each.worker != members[5]]
    there = [*(worker for worker in names if worker != members[5]), *([spare] if has_spare else [])]
    nodes[spare] = nodes[members[5]]
    after = layout if has_spare else Layout(1, layout.dp_shard - 1, layout.more)
    seated: list[WorkerId] = []

    def decide() -> None:
        assert choose(len(there), rule, [*Counter(nodes[worker] for worker in there).values()]) == after
        seated.extend(seat(there, nodes, after, held_now))

    assert calls(decide) < 2e6
    homes, who = [nodes[worker] for worker in seated], spare if has_spare else seated[-1]
    found: list[Move] = []
    held.cache_clear()
    planned = calls(lambda: found.extend(moves(tensors, held_now, after, seated, homes, partly=True, of=who)))
    assert planned < 2e6
    own = cell_of(after, seated.index(who))
    assert sum(each.slice.count for each in found if each.destination == who) == sum(
        box.slice.count for each in tensors for box in held(each, own).boxes
    ) - sum(part.count for part in missing(tensors, held_now, own))


@pytest.mark.full
@MODELS
def test_n4_two_broken_worlds_cover_the_state_at_1024(name: str) -> None:
    """N4: one half of a world of 8 stages, and one half of a world of 4.  The control lacks a cell of each."""
    layout, (names, _) = LAYOUTS[name], workers()
    other = with_half_of_the_stages(layout)
    known = classes_of(tensors_of(name), {*degrees_of(layout), *degrees_of(other)})
    half, rest = holdings(layout, names)[:512], holdings(other, names)[512:]
    count = calls(lambda: None if covered(half + rest, known) else pytest.fail("it is covered"))
    assert count < 4e6
    assert not covered(half[1:] + rest, known)
