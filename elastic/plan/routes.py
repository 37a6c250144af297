"""The routes by which the pieces of a sum travel between the members of a world, over few links between
nodes.

Every member owns one piece of the sum.  Its piece of a gradient goes to a member on the gradient's own node
first, the *handler*, and from there to the owner.  The handlers of a node share the owners of each node out
among them, so a member talks to the members of its own node and to one or two of each other node.  A node
adds what it may where its handlers are, so that it sends one sum in place of many gradients.

The other way round, members that need each other's finished pieces get them from other nodes once for each
node, and then share them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property

from elastic.plan.batch import Unit
from elastic.plan.layout import Layout
from elastic.plan.placement import data_rank

Pieces = dict[int, int]
"""Maps world ranks to numbers of pieces.  Members without pieces are left out."""


class Routes:
    """The routes of one member, ``rank``.  ``nodes[i]`` is the node of world rank i; without ``nodes`` all
    members are on one.

    Routes lead between the members of one data group, and a member is named by its world rank.
    """

    def __init__(self, layout: Layout, nodes: Sequence[Hashable], rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.node_of = tuple(nodes) or (None,) * layout.world
        self.group = layout.data_group(rank)
        """The data group, in the order of replicas and of the shards of each."""
        self.running = {data_rank(layout, member): member for member in self.group}
        """The member that has the gradient of the microbatches of each data rank."""
        assert len(self.running) == len(self.group), "members of a data group share a microbatch"
        self.members: dict[Hashable, list[int]] = defaultdict(list)
        """The members of each node, in order of world rank.  Nodes are in the order of their first members.
        """
        for member in self.group:
            self.members[self.node_of[member]].append(member)
        self.mates = self.members[self.node_of[rank]]
        """The members of this member's node."""
        self.one_node = len(self.members) == 1
        self.node_each = len(self.members) == len(self.group)
        self._number = {node: number for number, node in enumerate(self.members)}
        self._place = {member: place for mates in self.members.values() for place, member in enumerate(mates)}

    def units(self, dealt: Sequence[Unit]) -> list[Unit]:
        """Returns the units of a round whose sums leave the nodes of this data group.

        Microbatches are dealt by the nodes of the members that report them.  Where a unit has members on
        several nodes in this data group, its beginning on the first of them is a unit, and each further
        microbatch is one.  The sum is a left fold, so its bits are the same.
        """
        found = list[Unit]()
        for unit in dealt:
            nodes = [self.node_of[self.running[rank]] for rank in unit.ranks]
            here = next((place for place, node in enumerate(nodes) if node != nodes[0]), len(nodes))
            later = range(here, len(nodes))
            found.append(replace(unit, ranks=unit.ranks[:here], ends=unit.ends and not later))
            found += [
                Unit(unit.first + place, (unit.ranks[place],), False, unit.ends and place == later[-1])
                for place in later
            ]
        return found

    # ---- from those who computed a piece to its owner

    def handler(self, node: Hashable, owner: int) -> int:
        """Returns the member of ``node`` that handles the pieces of ``owner``."""
        return _one_of(self.members[node], self._place[owner], self._number[self.node_of[owner]])

    @cached_property
    def handled(self) -> dict[int, list[int]]:
        """The owners whose pieces each member of this node handles, in order of world rank."""
        found: dict[int, list[int]] = {mate: [] for mate in self.mates}
        for owner in self.group:
            found[self.handler(self.node_of[self.rank], owner)].append(owner)
        return found

    @property
    def order(self) -> list[int]:
        """All owners in the order in which this member's gradient is sent to the handlers."""
        return [owner for owners in self.handled.values() for owner in owners]

    def to_handlers(self) -> Pieces:
        """Returns the pieces that this member sends to each handler if it has a gradient."""
        return {mate: len(owners) for mate, owners in self.handled.items() if owners}

    def from_mates(self, busy: set[int]) -> Pieces:
        """Returns the pieces that this member gets as a handler, from the members of its node among the
        ``busy``.
        """
        handled = len(self.handled[self.rank])
        return {mate: handled for mate in self.mates if mate in busy} if handled else {}

    def to_owners(self, here: int) -> Pieces:
        """Returns the pieces that this member sends to each owner if this node has ``here`` units."""
        return dict.fromkeys(self.handled[self.rank], here) if here else {}

    def from_handlers(self, units: Sequence[Unit]) -> tuple[Pieces, list[int]]:
        """Returns the pieces that this member gets as an owner, and the places of the units among them.

        Pieces come in order of the world ranks of their handlers.
        """
        by_node: dict[Hashable, list[int]] = defaultdict(list)
        for number, unit in enumerate(units):
            by_node[self.node_of[self.running[unit.ranks[0]]]].append(number)
        sources = sorted((self.handler(node, self.rank), numbers) for node, numbers in by_node.items())
        places = [0] * len(units)
        for place, number in enumerate(number for _, numbers in sources for number in numbers):
            places[number] = place
        return {source: len(numbers) for source, numbers in sources}, places

    # ---- from an owner to the members of other replicas that hold the same shard

    @cached_property
    def _alike(self) -> dict[Hashable, list[int]]:
        """The members that hold the same shard as this one, by node."""
        found: dict[Hashable, list[int]] = defaultdict(list)
        for member in self.layout.replica_ranks(self.rank):
            found[self.node_of[member]].append(member)
        return found

    @cached_property
    def some_share(self) -> bool:
        """True if anywhere in the data group two members of one node hold the same shard."""
        held = Counter((self.node_of[member], self.layout.shard(member)) for member in self.group)
        return max(held.values()) > 1

    @property
    def near(self) -> list[int]:
        """The members of this node that hold the same shard as this one."""
        return self._alike[self.node_of[self.rank]]

    @cached_property
    def reached(self) -> list[int]:
        """The members that get this member's piece from itself, by world rank: itself, and one on each other
        node that needs it.
        """
        own, place = self.node_of[self.rank], self.near.index(self.rank)
        others = [
            _one_of(mates, place, self._number[own]) for node, mates in self._alike.items() if node != own
        ]
        return sorted([self.rank, *others])

    @cached_property
    def brought(self) -> dict[int, list[int]]:
        """The owners of the pieces that each of :attr:`near` gets from the owners themselves, in order of
        world rank.
        """
        found: dict[int, list[int]] = {mate: [] for mate in self.near}
        for node, mates in self._alike.items():
            for place, owner in enumerate(mates):
                at = owner if owner in found else _one_of(self.near, place, self._number[node])
                found[at].append(owner)
        return {mate: sorted(owners) for mate, owners in found.items()}


def _one_of(members: Sequence[int], place: int, number: int) -> int:
    """Returns the member at ``place``; if there are fewer members, one that depends on ``number``, so that no
    member gets all such pieces.
    """
    return members[place if place < len(members) else number % len(members)]
