"""Bytes that the ordered reduction sends out of a node, and the members with which one talks, by the
product's own deal and routes.

Nodes have 8 workers, and a step has four microbatches for each worker.  Members of the first, a middle and
the last node run the reduction of one module over tensors without memory (``meta``); what they hand to the
world's all-to-all is counted.  Bytes are in multiples of what a hierarchical reduce-scatter sends out of the
same node: a float32 sum, once a round, of all that other nodes own. The largest of the three nodes counts,
and the mean of a step's rounds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from elastic.engine.sync.ordered import Ordered
from elastic.plan.batch import Deal, deal_of
from elastic.plan.layout import Layout

NODE = 8
ELEMENTS = 64
"""Elements of the module for each member of the world."""


@dataclass
class Counting:
    """One member of a world that sends nothing, but counts the bytes for each other member."""

    layout: Layout
    nodes: tuple[str, ...]
    rank: int
    sent: dict[int, int] = field(default_factory=dict)
    device: torch.device = field(default_factory=lambda: torch.device("meta"))

    @property
    def size(self) -> int:
        return self.layout.world

    def keep_up(self) -> None:
        """Nothing runs ahead here."""

    def all_to_all(
        self, mine: torch.Tensor, sent: Mapping[int, int], got: Mapping[int, int], size: int
    ) -> torch.Tensor:
        assert sum(sent.values()) * size <= mine.numel()
        for rank, pieces in sent.items():
            if rank != self.rank:
                self.sent[rank] = self.sent.get(rank, 0) + pieces * size * mine.itemsize
        return mine.new_empty(sum(got.values()) * size)

    def out(self) -> int:
        """Returns the bytes for other nodes."""
        return sum(count for rank, count in self.sent.items() if self.nodes[rank] != self.nodes[self.rank])


def reduced(world: Any, deal: Deal) -> tuple[int, int]:
    """Runs the member's rounds of a step; returns the bytes for other nodes, without those after the last
    round, and its peers.
    """
    scheme = Ordered(world, deal)
    reduction, elements = scheme.reduction(), ELEMENTS * world.size
    grads = torch.empty(elements, device="meta")
    for number in range(deal.rounds):
        scheme.round.number, scheme.round.last = number, number == deal.rounds - 1
        reduction.reduce(grads)
    after = Counting(world.layout, world.nodes, world.rank)
    reduction.world = after  # type: ignore[assignment]
    reduction._from_replicas(grads.new_empty(ELEMENTS), elements // world.layout.dp_shard)
    return world.out() - after.out(), len(world.sent)


def figures(layout: Layout, microbatches: int, block: int) -> tuple[float, int]:
    """Returns the largest ratio of the three nodes, and the largest number of peers of their members."""
    nodes = tuple(f"n{rank // NODE}" for rank in range(layout.world))
    deal, last = deal_of(microbatches, block, layout, nodes), (layout.world - 1) // NODE
    most, peers = 0.0, 0
    for node in {0, last // 2, last}:
        mates = range(node * NODE, min((node + 1) * NODE, layout.world))
        found = [reduced(Counting(layout, nodes, rank), deal) for rank in mates]
        expected = 4 * ELEMENTS * (layout.world - len(mates)) * deal.rounds
        most, peers = (
            max(most, sum(out for out, _ in found) / expected),
            max(peers, *(count for _, count in found)),
        )
    return most, peers


def measure(n: int) -> dict[str, float]:
    whole, short = Layout(n // NODE, NODE), Layout(1, n - 1)
    began = time.thread_time()
    assert deal_of(4 * n, NODE, whole, tuple(f"n{rank // NODE}" for rank in range(n))).units
    dealt_s = time.thread_time() - began
    single, single_peers = figures(whole, 4 * n, 1)
    blocks, peers = figures(whole, 4 * n, NODE)
    less, less_peers = figures(short, 4 * n, NODE)
    tight, tight_peers = figures(short, 4 * (n - 1), NODE)
    return {
        "block_1_out_of_node_ratio": single,
        "block_8_out_of_node_ratio": blocks,
        "block_8_one_worker_less_out_of_node_ratio": less,
        "block_8_one_worker_less_no_idle_rank_out_of_node_ratio": tight,
        "block_1_peers": float(single_peers),
        "block_8_peers": float(peers),
        "block_8_one_worker_less_peers": float(max(less_peers, tight_peers)),
        "deal_s": dealt_s,
    }
