"""The ordered reduction: a sum of gradients that does not depend on the number of data ranks.

Floating-point addition is not associative.  A library's reduce-scatter adds in an order that depends on the
number of ranks, and rounds are accumulated afterwards; so 2, 3 and 4 workers give three different sums.  Here
bytes travel in all-to-alls instead, and every addition is ours, in an order that the job fixes: the
microbatches of a block (``reduction.block``) are added from left to right, and so are the sums of the blocks.
A sum starts with its first piece and not with zeros, which would turn -0.0 into 0.0.  Gradients have the
dtype of the precision policy, whether they travel or not, and all sums are float32, or float64 if the
gradients are.  With ``wire`` the gradient of each microbatch is rounded to that dtype first of all, whether
it travels or not.  A sum never is: where sums begin depends on the layout.

Within a round, ``plan/batch.py`` gives whole blocks to single nodes.  A node adds such a block, or the
beginning of one, before it sends it.  So with as many microbatches in a block as a node has ranks, a node
sends one sum in place of many gradients.  ``plan/routes.py`` says which member of the node adds which piece,
and to whom it goes.  Nothing else is added on the way.  The owner adds the pieces of a round to the sum of
the open block, or of all blocks before; it holds these two sums at most.

With R replicas of S shards, member r·S + s of a data group owns sub-piece r of shard s while the sum runs (R·S distinct
pieces, so no element is added twice), and the replicas exchange the finished sub-pieces once, after the last
round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from elastic.engine.sync.base import GradientReduction, Scheme
from elastic.engine.world import World
from elastic.plan.batch import Deal, Unit
from elastic.plan.routes import Pieces, Routes

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers with so many bytes."""


class Ordered(Scheme):
    """Adds gradients in the order of the microbatches, which gives the same bits for any number of members."""

    keeps_sums = True
    needs_replicate_group = False

    def __init__(self, world: World, deal: Deal, *, deferred: bool = False) -> None:
        # its sums cannot be deferred, since each microbatch is added in its turn
        super().__init__(world, deal, deferred=deferred)
        self.routes = Routes(world.layout, world.nodes, world.rank)
        self._legs: dict[tuple[int, int], _Legs] = {}
        order, shards = self.routes.order, world.layout.shards
        self.order: tuple[Tensor, Tensor] | None = None
        """The shards, and the sub-pieces of each, in the order of the handlers; None if that is the order in
        which they are.
        """
        if order != [*self.routes.group] or world.layout.replicas > 1:
            places = {owner: divmod(place, shards)[::-1] for place, owner in enumerate(self.routes.group)}
            found = torch.tensor([places[owner] for owner in order], device=world.device)
            self.order = found[:, 0], found[:, 1]

    def reduction(self, wire: torch.dtype | None = None) -> OrderedReduction:
        return OrderedReduction(self, wire)

    def legs(self) -> _Legs:
        """Returns what travels in the present round.  All wrapped modules and all steps use it again."""
        place = self.deal.microbatches, self.round.number
        if place not in self._legs:
            dealt = self.deal.units[self.round.number]
            self._legs[place] = _Legs(self.routes, self.routes.units(dealt))
        return self._legs[place]


@dataclass(frozen=True)
class _Leg:
    """The units of one kind, sums or single gradients, on their way from node to node."""

    units: list[Unit]
    here: list[Unit]
    """The units of this member's node."""
    sent: Pieces
    got: Pieces
    places: list[int]
    """The place of each of ``units`` among the pieces that come."""


class _Legs:
    """The pieces that travel in one round, seen from one member."""

    def __init__(self, routes: Routes, units: Sequence[Unit]) -> None:
        self.routes, self.units = routes, units
        busy = {routes.running[rank] for unit in units for rank in unit.ranks}
        self.sent = routes.to_handlers() if routes.rank in busy else {}
        self.got = routes.from_mates(busy)
        self.row = {mate: row for row, mate in enumerate(mate for mate in routes.mates if mate in busy)}
        """The rows in which the gradients of this node's members come to a handler."""

    @cached_property
    def between_nodes(self) -> list[_Leg]:
        """The sums, and then the single gradients; a kind that no node has is left out, and all if there is
        one node.
        """
        legs = []
        for units in (
            [unit for unit in self.units if len(unit.ranks) > 1],
            [unit for unit in self.units if len(unit.ranks) == 1],
        ):
            if units:
                here = [unit for unit in units if self.routes.running[unit.ranks[0]] in self.row]
                legs.append(
                    _Leg(units, here, self.routes.to_owners(len(here)), *self.routes.from_handlers(units))
                )
        return legs


class OrderedReduction(GradientReduction):
    """Sums the gradients of one wrapped module, over data ranks, replicas and rounds."""

    def __init__(self, scheme: Ordered, wire: torch.dtype | None) -> None:
        self.scheme, self.world, self.routes, self.wire = scheme, scheme.world, scheme.routes, wire
        self.total: Tensor | None = None
        """The sum of all complete blocks."""
        self.open: Tensor | None = None
        """The sum of the microbatches of the block that is not complete yet."""

    def reduce(self, grads: Tensor) -> Tensor | None:
        self.world.keep_up()
        if (now := self.scheme.round).digest is not None:
            now.digest.add_(_bits(grads))
            if now.again:
                return None
        grads, legs = grads.to(self.wire or grads.dtype), self.scheme.legs()
        alone = len(self.routes.group) == 1  # nothing travels then
        pieces = [grads] if alone else self._to_owner(self._to_handler(self._by_owner(grads), legs), legs)
        for unit, piece in zip(legs.units, pieces, strict=True):
            self._add(unit, piece)
        if not self.scheme.round.last:
            return None
        assert self.total is not None and self.open is None, "the last round ends the last block"
        total, self.total = self.total, None
        return self._from_replicas(total, grads.numel() // self.world.layout.shards)

    def _add(self, unit: Unit, piece: Tensor) -> None:
        """Adds the unit to the sum that it continues.  A sum has memory of its own, because pieces lie in
        buffers of a whole round.
        """
        if not unit.begins:
            assert self.open is not None
            self.open.add_(piece)
        elif not unit.ends:
            self.open = piece.to(_wide(piece), copy=True)
            return
        if unit.ends:
            whole = piece if unit.begins else self.open
            assert whole is not None
            self.total = whole.to(_wide(whole), copy=True) if self.total is None else self.total.add_(whole)
            self.open = None

    def _by_owner(self, grads: Tensor) -> Tensor:
        """Turns the gradient of all shards into [owners, part], in the order of the handlers."""
        layout = self.world.layout
        grads = grads.view(layout.shards, -1)
        part = -(-grads.shape[1] // layout.replicas)
        if padding := part * layout.replicas - grads.shape[1]:
            grads = torch.nn.functional.pad(grads, (0, padding))
        if self.scheme.order is None:
            return grads
        return grads.reshape(layout.shards, layout.replicas, part)[self.scheme.order]

    def _to_handler(self, grads: Tensor, legs: _Legs) -> Tensor:
        """Turns [owners, part] of this member into [members of this node with a gradient, owners that this
        member handles, part].
        """
        part = grads.shape[1]
        if not self.routes.node_each:
            grads = self.world.all_to_all(grads.view(-1), legs.sent, legs.got, part)
        return grads.view(-1, len(self.routes.handled[self.routes.rank]), part)[: len(legs.row)]

    def _to_owner(self, grads: Tensor, legs: _Legs) -> list[Tensor]:
        """Adds what this node may add, and returns this member's piece of every unit of the round."""
        found, part = dict[Unit, Tensor](), grads.shape[2]
        for leg in legs.between_nodes:
            outgoing = [self._added(unit, grads, legs) for unit in leg.here]
            if self.routes.one_node:
                found.update(zip(leg.here, (each[0] for each in outgoing), strict=True))
                continue
            dtype = _wide(grads) if len(leg.units[0].ranks) > 1 else grads.dtype
            flat = torch.stack(outgoing, 1).view(-1) if outgoing else grads.new_empty(0, dtype=dtype)
            came = self.world.all_to_all(flat, leg.sent, leg.got, part).view(-1, part)
            found.update((unit, came[place]) for unit, place in zip(leg.units, leg.places, strict=True))
        return [found[unit] for unit in legs.units]

    def _added(self, unit: Unit, grads: Tensor, legs: _Legs) -> Tensor:
        """Returns a unit of this node, [owners that this member handles, part]."""
        first, *others = (grads[legs.row[self.routes.running[rank]]] for rank in unit.ranks)
        for number, other in enumerate(others):
            first = first.to(_wide(first)) + other if number == 0 else first.add_(other)
        return first

    def _from_replicas(self, total: Tensor, count: int) -> Tensor:
        """Joins the sub-pieces of all replicas: flat [count].

        Each sub-piece goes to every other node once, and is shared there.  These are all-to-alls among all
        members, in which only few send each other anything.  That saves communicators for the replicas.
        """
        routes, part = self.routes, total.numel()
        if self.world.layout.replicas == 1:
            return total
        owners = routes.brought[routes.rank]
        if not routes.one_node:
            total = self.world.all_to_all(
                total.repeat(len(routes.reached)),
                dict.fromkeys(routes.reached, 1),
                dict.fromkeys(owners, 1),
                part,
            )
        if routes.some_share:
            got = {mate: len(brought) for mate, brought in routes.brought.items()}
            total = self.world.all_to_all(
                total.repeat(len(routes.near)), dict.fromkeys(routes.near, len(owners)), got, part
            )
            owners = [owner for brought in routes.brought.values() for owner in brought]
        if owners != sorted(owners):
            places = sorted(range(len(owners)), key=owners.__getitem__)
            total = torch.cat([total[place * part : (place + 1) * part] for place in places])
        return total[:count]


def _bits(grads: Tensor) -> Tensor:
    """Returns the wrapping sum of the words of flat gradients: an int64 scalar, which any flipped bit changes."""
    return grads.view(WORDS[grads.itemsize]).sum(dtype=torch.int64)


def _wide(piece: Tensor) -> torch.dtype:
    """Returns the dtype of sums of such pieces."""
    return torch.promote_types(piece.dtype, torch.float32)
