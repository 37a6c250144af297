"""Weights that are gathered layer by layer, and replicas of shards: what is alive when, what each knob
changes, what travels where.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from elastic.engine.world import World
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.model import build_model, builder_of
from tests.engine.test_zero import FREE, LARGE, staged, stepping
from tests.support.collectives import Calls, counting
from tests.support.ranks import Ranks
from tests.support.segments import compute, member

LAYERS, PAIR, PREFETCH = 4, Layout(1, 2), 1
"""FSDP2 gathers one layer ahead in the backward pass."""


class Samples:
    """The layers whose whole parameters are in memory, at each place of a round where a layer begins or ends.

    The rest of the model counts as layer ``LAYERS``.  A layer that is being gathered counts, too: its values
    are in one flat buffer.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        self.memory: list[list[torch.UntypedStorage]] = [[] for _ in range(LAYERS + 1)]
        self.sizes = [0] * (LAYERS + 1)
        self.found: list[tuple[str, int, list[int]]] = []

    def learn(self, number: int, module: torch.nn.Module, *_: Any) -> None:
        """Notes the memory of a layer's parameters while it runs; FSDP2 frees it by making it empty."""
        own = [parameter for name, parameter in module.named_parameters() if not name.startswith("layers.")]
        self.memory[number] = [parameter.data.untyped_storage() for parameter in own]
        self.sizes[number] = sum(storage.nbytes() for storage in self.memory[number])

    def take(self, what: str, number: int) -> None:
        alive = [
            n
            for n, storages in enumerate(self.memory)
            if any(storage.nbytes() for storage in storages) or self._comes(n)
        ]
        self.found.append((what, number, alive))

    def _comes(self, number: int) -> bool:
        return (
            number < LAYERS
            and self.layers[number]._get_fsdp_state()._fsdp_param_group._all_gather_result is not None
        )


def sampled(world: World, job: Job, kept: bool) -> tuple[list[tuple[str, int, list[int]]], list[int]]:
    """Returns the samples of the last round of a step, and the bytes of each layer's parameters when it ran.

    If ``kept``, nothing is freed after the forward pass.
    """
    with member(world, job, Version(0, 0), prefetch=0) as me:
        model: Any = me.state.model
        samples = Samples(model.layers)
        if kept:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_reshard_after_forward(False)

        def after(number: int, _layer: torch.nn.Module, _args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda _: samples.take("backward", number))

        model.register_forward_pre_hook(partial(samples.learn, LAYERS))
        for number, layer in enumerate(model.layers):
            layer.register_forward_pre_hook(partial(samples.learn, number))
            # before FSDP2's own
            layer.register_forward_hook(
                lambda *_, number=number: samples.take("forward", number), prepend=True
            )
            layer.register_forward_hook(partial(after, number))  # after it
        me.step()
        end = me.state.parameters.end_forward
        me.state.parameters.end_forward = lambda: (samples.take("after forward", LAYERS), end())[1]  # type: ignore[method-assign]
        finish = me.state.parameters.end_round
        me.state.parameters.end_round = lambda: (samples.take("after backward", 0), finish())[1]  # type: ignore[method-assign]
        samples.found.clear()
        compute(me.session, me.state, 2)
        return samples.found[-2 * LAYERS - 2 :], samples.sizes


def test_c5_at_most_one_layer_more_than_is_needed_is_whole(ranks: Ranks, tmp_path: Path) -> None:
    """C5: sampled where each layer ends in forward, and begins in backward: it is whole itself, and at most
    ``PREFETCH`` others are.

    After forward no layer is, and after backward nothing is.  The rest of the model, which the backward pass
    needs first, stays in between, as FSDP2 has it.  In the control, which frees nothing after forward, all
    layers are whole then.
    """
    cases = [(staged(tmp_path / name, 3, **FREE), name == "kept") for name in ("free", "kept")]
    ((found, sizes), other), ((kept, _), _) = ranks.run_each(PAIR, sampled, cases)
    width = LARGE["dim"]
    assert min(sizes[:LAYERS]) >= 2 * 4 * width * width and sizes[LAYERS] >= 2 * 29 * width, (
        "what is looked at is a layer's whole parameters, in bf16"
    )
    assert found == other[0]
    order = [("forward", n) for n in range(LAYERS)] + [("after forward", LAYERS)]
    order += [("backward", n) for n in reversed(range(LAYERS))] + [("after backward", 0)]
    assert [(what, number) for what, number, _ in found] == order
    for what, number, alive in found:
        layers = {*alive} - {LAYERS}
        assert (LAYERS in alive) is (what != "after backward")
        if what.startswith("after"):
            assert not layers
        else:
            assert number in layers and len(layers) <= PREFETCH + 1, (what, number, alive)
    assert max(len({*alive} - {LAYERS}) for _, _, alive in found) == PREFETCH + 1, "one is gathered ahead"
    assert [alive for what, _, alive in kept if what == "after forward"] == [[*range(LAYERS + 1)]]


# ---- what each knob changes


def calls_of(world: World, job: Job) -> Calls:
    """Returns the collectives of a step's rounds."""
    with member(world, job, Version(0, 0), prefetch=0) as me:
        me.step()
        with counting() as calls:
            compute(me.session, me.state, 2)
        return calls


def gathers(calls: Calls) -> Calls:
    return Calls(call for call in calls if "gather" in call.name)


def sums(calls: Calls) -> Calls:
    return Calls(call for call in calls if "reduce_scatter" in call.name)


def test_c6_stage_and_layers_change_the_number_of_gathers(ranks: Ranks, tmp_path: Path) -> None:
    """C6: full sharding gathers each layer twice a round, and the rest once; stage 2 (SHARD_GRAD_OP)
    everything once a step.

    Layers are wrapped one by one, so their number is in the number of collectives.  One stage is the control
    of the other.
    """
    rounds, numbers = 2, (2, 4)
    models = {
        layers: {**FREE, "global_batch": 8, "model_args": {**LARGE, "layers": layers}} for layers in numbers
    }
    cases = [
        (staged(tmp_path / f"{layers} {zero}", zero, **models[layers]),)
        for layers in numbers
        for zero in (3, 2)
    ]
    found = [members[0] for members in ranks.run_each(PAIR, calls_of, cases)]
    for layers, full, once in zip(numbers, found[::2], found[1::2], strict=True):
        assert len(gathers(full)) == rounds * (2 * layers + 1) and len(gathers(once)) == layers + 1
        # the rest, and the second sum of the weight of the head
        assert len(sums(full)) == len(sums(once)) == rounds * (layers + 2)
        assert gathers(full).bytes(*{call.name for call in full}) > rounds * gathers(once).bytes(
            *{call.name for call in once}
        )


@pytest.mark.parametrize("zero", [2, 3])
def test_c6_precision_changes_the_dtype_of_the_collectives(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    """C6: weights travel in the format of forward and backward, and take half the bytes in bf16; gradients
    are summed in float32.
    """
    found, precisions = {}, ("fp32", "bf16")
    cases = [
        (staged(tmp_path / precision, zero, **{**FREE, "global_batch": 8, "precision": precision}),)
        for precision in precisions
    ]
    for precision, (calls, _) in zip(precisions, ranks.run_each(PAIR, calls_of, cases), strict=True):
        found[precision] = gathers(calls)
        assert {dtype for call in sums(calls) for dtype in call.dtypes} == {torch.float32}
    total = {precision: sum(call.bytes for call in calls) for precision, calls in found.items()}
    assert len(found["fp32"]) == len(found["bf16"]) and total["fp32"] == 2 * total["bf16"]
    if zero == 2:
        dtypes = {
            precision: {dtype for call in calls for dtype in call.dtypes}
            for precision, calls in found.items()
        }
        assert dtypes == {"fp32": {torch.float32}, "bf16": {torch.bfloat16}}


# ---- replicas of shards


def test_c8_replicas_of_shards(ranks: Ranks, tmp_path: Path) -> None:
    """C8: two replicas of two shards.  A member holds 16 bytes for each parameter of its shard (4 weights, 8
    moments, 4 sums), and in stage 2 the 2 of all weights with which it computes; replicas are equal, and
    shards are not.

    Between replicas only the shard of the gradient travels, in float32: once a step in stage 2, and in each
    round in stage 3.  Weights stay within a replica.  The control: four shards of one replica take half the
    memory and send nothing of the kind.
    """
    cases = [(staged(tmp_path / f"hybrid {zero}", zero, **FREE, global_batch=16),) for zero in (2, 3)]
    hybrids = ranks.run_each(Layout(2, 2), stepping, cases)
    parameters = sum(
        parameter.numel() for parameter in build_model(cases[0][0], builder_of(cases[0][0])).parameters()
    )
    for zero, members in zip((2, 3), hybrids, strict=True):
        check_hybrid(zero, parameters, members)
    calls, taken, *_ = ranks.run(Layout(1, 4), stepping, staged(tmp_path / "flat", 2, **FREE))[0]
    assert taken / parameters == pytest.approx(16 / 4 + 2, rel=0.03)
    assert {call.members for call in calls} == {(0, 1, 2, 3)} and not calls.named("allreduce")


def check_hybrid(zero: int, parameters: int, members: Sequence[tuple[Calls, int, float, str]]) -> None:
    hashes = [each[3] for each in members]
    assert hashes[0] == hashes[2] != hashes[1] == hashes[3]
    rounds, whole = 8 // 4, 2 if zero == 2 else 0
    for rank, (calls, taken, _, _) in enumerate(members):
        assert taken / parameters == pytest.approx(16 / 2 + whole, rel=0.03)
        own, alike = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert {call.members for call in calls} == {own, alike}
        assert {call.name for call in calls if call.members == alike} == {"allreduce"}
        between = Calls(call for call in calls if call.members == alike)
        assert {dtype for call in between for dtype in call.dtypes} == {torch.float32}
        assert sum(call.bytes for call in between) / (4 * parameters) == pytest.approx(
            (rounds if zero == 3 else 1) / 2, rel=0.03
        )
