"""A world whose members are threads of this process, for the pure part of a reduction: any number of members,
and every byte is counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from elastic.plan.layout import Layout
from tests.support.patience import PATIENCE_S


class ModelWorld:
    """One member.  It has all that a reduction uses of :class:`~elastic.engine.world.World`."""

    def __init__(self, layout: Layout, nodes: Sequence[str], rank: int, exchange: Exchange) -> None:
        self.layout, self.nodes, self.rank, self.size = layout, tuple(nodes), rank, layout.world
        self.device = torch.device("cpu")
        self._exchange = exchange

    def keep_up(self) -> None:
        """Nothing runs ahead here."""

    def all_to_all(
        self, mine: torch.Tensor, sent: Mapping[int, int], got: Mapping[int, int], size: int
    ) -> torch.Tensor:
        shares, at = {}, 0
        for rank in range(self.size):
            shares[rank] = mine[at : at + sent.get(rank, 0) * size].clone()
            at += sent.get(rank, 0) * size
        came = self._exchange.meet(self.rank, shares)
        assert [len(each) for each in came] == [got.get(rank, 0) * size for rank in range(self.size)], (
            "as much comes as is awaited"
        )
        return torch.cat(came)


class Exchange:
    """The place where the messages of each data group meet; ``bytes`` counts them by (sender, receiver)."""

    def __init__(self, layout: Layout) -> None:
        self.bytes: Counter[tuple[int, int]] = Counter()
        self._shares: list[dict[int, torch.Tensor]] = [{}] * layout.world
        self._lock = threading.Lock()
        groups = [layout.data_group(rank) for rank in range(layout.world)]
        self.barriers = {group: threading.Barrier(len(group), timeout=PATIENCE_S) for group in groups}
        """A place for each data group: one may have fewer messages than another."""
        self._groups = groups

    def meet(self, rank: int, shares: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        group = self._groups[rank]
        barrier = self.barriers[group]
        assert not any(len(part) for target, part in shares.items() if target not in group), (
            "nothing travels between data groups"
        )
        self._shares[rank] = shares
        barrier.wait()
        found = [
            self._shares[source][rank] if source in group else shares[rank][:0]
            for source in range(len(self._groups))
        ]
        if barrier.wait() == 0:
            sent = {
                (source, target): part.nbytes
                for source in group
                for target, part in self._shares[source].items()
            }
            with self._lock:
                self.bytes.update(
                    {pair: count for pair, count in sent.items() if count and pair[0] != pair[1]}
                )
        barrier.wait()
        return found

    def abort(self) -> None:
        """Lets nobody wait any longer."""
        for barrier in self.barriers.values():
            barrier.abort()

    def out_of(self, nodes: Sequence[str]) -> Counter[str]:
        """Returns the bytes that left each node."""
        found: Counter[str] = Counter()
        for (source, target), count in self.bytes.items():
            if nodes[source] != nodes[target]:
                found[nodes[source]] += count
        return found


def run(
    layout: Layout, nodes: Sequence[str], function: Callable[..., Any], *arguments: Any
) -> tuple[list[Any], Exchange]:
    """Runs ``function(world, *arguments)`` in every member; returns the results by world rank, and what was
    exchanged.
    """
    exchange, results, errors = Exchange(layout), [None] * layout.world, list[Exception]()

    def member(rank: int) -> None:
        try:
            results[rank] = function(ModelWorld(layout, nodes, rank, exchange), *arguments)
        except Exception as error:
            errors.append(error)
            exchange.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(layout.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return results, exchange
