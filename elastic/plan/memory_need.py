"""The memory that a member needs on its device and its copies on their node, and the smallest shard degree at
which both fit.

Per parameter, a member of a world with S shards holds 1/S of the weights, of their moments, and of the sum of
the gradients in float32; with deferred sums, all of that sum.  It also holds the copy of the weights with
which it computes: in a world with one shard if that copy has another dtype, and in a world with more shards
unless weights are gathered block by block (stage 3 of ZeRO).  Where these copies live on the host, only those
of two blocks, and of what is in no block, count.  What comes and goes in a step, such as activations, does
not depend on the number of shards, if there are several; an estimate has it from a step on tensors without
memory, and a worker measures it before it joins.  While a world forms, a member holds its old part beside the
new one, and no gradients; the old part is not larger than that at the smallest degree.

Axes that divide the model cut the state as shards do, so S is the number of members of a replica.  It is not
counted that they also divide activations and the copies with which members compute, nor that one stage of a
pipeline may have more of the state than another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Policy = TypeVar("Policy", bound=str | float)
USABLE = 0.92
"""Part of a device's memory that is planned with.  The rest is for what nobody counts: contexts,
communication, fragments.
"""

COPIED = 0.8
"""Part of a node's memory that copies and saves are planned with.  The rest is for processes, and whatever
else runs there.
"""


class Transient(NamedTuple):
    """Bytes that come and go in a step beside the sums of gradients, as a step tells them: one on tensors
    without memory, or a real one.
    """

    alone: int
    """The bytes of a member with the whole state."""
    shared: int
    """The bytes of a member that shares the state with others."""


NOTHING = Transient(0, 0)


@dataclass(frozen=True)
class Need:
    """Bytes that training needs: the whole ``state``, ``gradients`` (sums, and what an optimizer prepares of
    them), and what is ``transient``.
    """

    state: int
    gradients: int
    computing: int
    """Copies of the weights with which a member of a world with one shard computes."""
    gathered: int = 0
    """Copies of the weights that a member keeps in a world with more shards."""
    fp8: int = 0
    """Parts of weights in fp8, from which blocks are gathered: a member of a world with more shards holds its
    share of them, too.
    """
    deferred: bool = False
    """True if sums over the members wait for the last round, so that each member holds the sums of all
    gradients.
    """
    streamed: int = 0
    """Buffers through which the state comes and goes at an update if it lives in host memory; 0 if it lives
    on the device.
    """
    hosted: int = 0
    """Copies of the weights in host memory, of which those that a block computes with come to the device."""
    transient: Transient = NOTHING

    def of_a_member(self, shards: int) -> int:
        """Returns the bytes of a member in worlds with ``shards`` or more shards."""
        stays = shards == 1 or self.streamed  # a whole state stays where it is
        forming = 0 if stays else 2 * -(-self.state // shards) + self.gathered
        comes = max(
            self.transient.alone if shards == 1 else self.transient.shared, -(-self.streamed // shards)
        )
        return max(self.held(shards) + comes, forming)

    def of_fewest(self, members: int) -> int:
        """Returns the fewest bytes with which a member trains if up to ``members`` share the state, but need
        not.
        """
        return min(self.of_a_member(shards) for shards in (1, members))  # from 2 on, more shards need no more

    def held(self, shards: int) -> int:
        """Returns the bytes that a member holds at the end of a backward pass."""
        state = 0 if self.streamed else self.state
        cut, kept = (state, self.gradients) if self.deferred else (state + self.gradients, 0)
        return -(-cut // shards) + kept + self.copies(shards)

    def summed(self, shards: int) -> int:
        """Returns the bytes of :attr:`gradients` that a member holds."""
        return self.gradients if self.deferred else -(-self.gradients // shards)

    def copies(self, shards: int) -> int:
        """Returns the bytes of the copies of weights that a member keeps from step to step."""
        return self.computing if shards == 1 else self.gathered + -(-self.fp8 // shards)


def least_roomy(need: Need, device: int, most: int) -> int:
    """Returns the smallest shard degree, up to ``most``, at which a member leaves room on a device with
    ``device`` bytes; 0 if none does.
    """
    return next((shards for shards in range(1, most + 1) if need.of_a_member(shards) <= USABLE * device), 0)


def least_shard(need: Need, device: int, most: int) -> int:
    """Returns the smallest shard degree, up to ``most``, at which a member fits a device with ``device``
    bytes; 0 if none does.

    The largest degree may take all of the device: the estimate refuses no run that might just fit.
    """
    return least_roomy(need, device, most) or (most if need.of_a_member(most) <= device else 0)


def enough(fewest: int, most: int) -> int:
    """Returns the number of members that must be able to train with what ``auto`` takes: ``fewest``, or half
    of ``most`` if that is 1.
    """
    return min(fewest, most) if fewest > 1 else max(most // 2, 1)


def first_roomy(
    policies: Sequence[Policy], least_of: Callable[[Policy], int], fewest: int, most: int
) -> Policy:
    """Returns the first policy with which ``fewest`` members can train; if ``fewest`` is 1, half of ``most``
    members.

    If there is none, returns the first policy with which ``most`` members can train, and if there is none of
    these either, the last one.  ``least_of`` returns the smallest shard degree at which a member fits with a
    policy; 0 if none does.  It is called for as few policies as possible.
    """
    found: dict[Policy, int] = {}
    for policy in policies:
        found[policy] = least_of(policy)
        if 0 < found[policy] <= enough(fewest, most):
            return policy
    return next((policy for policy, least in found.items() if least), policies[-1])
