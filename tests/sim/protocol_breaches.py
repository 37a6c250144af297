"""The broken rules of elastic.protocol, which members, keepers and coordinators keep themselves, by families.

Some are broken in the model that the simulator has of a member or a keeper: what such a patch does is the
rule of production.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elastic.control.rules import Rules
from elastic.ids import NodeId
from elastic.plan.transfer import Holding
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import Copy, CopySchedule, NoRoom
from elastic.sim import cluster
from elastic.sim.cluster import Cluster
from elastic.sim.worker import Worker
from tests.sim.mutants import FOLLOWED, GIVEN_UP, OVERWRITTEN, TWICE, Breach, Edit

# ---- rules that are broken by a patch


def coordinators_lease_without_end(patch: pytest.MonkeyPatch) -> None:
    """A coordinator that is cut off with all its keepers goes on for ever."""
    patch.setattr(Rules, "coordinator_lease_s", property(lambda _: float("inf")))
    patch.setattr(Rules, "coordinator_lease_over_s", property(lambda rules: 0.5 * rules.lease_s))


def lease_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """An answer may be long under way, or wait in a process that stood still."""
    renewed = Worker.renewed
    patch.setattr(
        Worker, "renewed", lambda worker, generation, _, *rest: renewed(worker, generation, worker.now, *rest)
    )


def slot_of_the_complete_copy(patch: pytest.MonkeyPatch) -> None:
    """The copy that is complete everywhere makes room for the next one."""

    def slot(copies: CopySchedule, slots: list[Copy | None]) -> int | None:
        held = [
            (copy is not None and copy == copies.copied, n)
            for n, copy in enumerate(slots)
            if copy not in copies.saving
        ]
        if not held:
            raise NoRoom
        return None if copies.begun in slots else max(held)[1]

    patch.setattr(CopySchedule, "slot", slot)


def slot_of_a_save(patch: pytest.MonkeyPatch) -> None:
    """The slot of a save under way is not protected."""
    free = CopySchedule.free
    patch.setattr(CopySchedule, "free", lambda copies, slots: free(replace(copies, saving=()), slots))


def copies_at_once(patch: pytest.MonkeyPatch) -> None:
    """The next copy is begun before the one before is known to be complete everywhere, and takes the place of
    the last that was.
    """
    after = CopySchedule.after

    def at_once(copies: CopySchedule, outcome: Outcome) -> CopySchedule:
        new = after(replace(copies, begun=copies._of(outcome.copied_through)), outcome)
        return replace(new, copied=new.begun)

    patch.setattr(CopySchedule, "after", at_once)


def copies_that_each_member_skips(patch: pytest.MonkeyPatch) -> None:
    """The oldest of the members' newest copies may be one that some members never made."""
    rng, after = random.Random(0), CopySchedule.after

    def alone(copies: CopySchedule, outcome: Outcome) -> CopySchedule:
        return after(
            replace(copies, begun=copies._of(outcome.copied_through) if rng.random() < 0.5 else copies.begun),
            outcome,
        )

    patch.setattr(CopySchedule, "after", alone)


def torn_copies(patch: pytest.MonkeyPatch) -> None:
    """Keepers count copies that a death has torn."""

    def held(sim: Cluster, node: NodeId) -> tuple[Holding, ...]:
        shelf = sim.shelf(node)
        left = [] if shelf is None else list(shelf.left.items())
        return tuple(
            Holding(name, *slot.copy, keeper=node)
            for name, slots in left
            for slot in slots
            if slot is not None
        )

    patch.setattr(cluster, "held_at", held)


# ---- the families

LATE = "after it has answered its fence"
RAN_OUT = "its lease ran out"
HOLDS = "answers that it holds"
UNREAD = "has not read all that coordinator"
GONE = "has no complete copy any more"
DEFERRED = "or self.applying or self.leaving or older"
HEEDS = "if incarnation < self.heeds:\n            return "
CLAIMED = Edit("authority", "if latest > self.incarnation:", "if False:")
LOSES = "        self.held, self.applying, self.prepared, self._updated = "
HARMED = "dict([self._updated] if self._updated else [])"

PROTOCOL: dict[str, tuple[Breach, ...]] = {
    # A member that was fenced does nothing more in that world.
    "the member's fence": (
        Breach(
            "a fence bars nothing",
            "may still commit",
            ("drawn", 0),
            Edit("member", "        self._bar(generation)\n        self._owed", "        self._owed"),
        ),
        Breach(
            "a fence in the midst of an update is answered at once",
            "in the midst of an update",
            ("drawn", 2072),
            Edit("member", DEFERRED, "or self.leaving or older"),
        ),
        Breach(
            "a fence is answered although the world before is still to be settled",
            LATE,
            ("relapsing", 14),
            Edit("member", DEFERRED, "or self.applying"),
        ),
        Breach(
            "a fenced member prepares",
            LATE,
            ("drawn", 123),
            Edit(
                "member",
                '        if self.barred:\n            raise FencedOff(f"step',
                '        if False:\n            raise FencedOff(f"step',
            ),
        ),
        Breach(
            "a fenced member applies",
            LATE,
            ("drawn", 6),
            Edit("member", "if not settled and self.barred:", "if False:"),
        ),
        Breach(
            "a fenced member believes what it was sent",
            "steps on garbage",
            ("drawn", 123),
            Edit("member", '        self.go_on("healed")\n', ""),
        ),
        Breach(
            "a plan is entered in the midst of another",
            "has not left",
            ("drawn", 0),
            Edit("member", "if plan is not self.waiting or self.inside:", "if False:"),
        ),
    ),
    # A member whose lease has run out applies nothing.
    "leases, as the member counts them": (
        Breach(
            "a lease has no end",
            RAN_OUT,
            ("isolation", 5),
            Edit("member", "self.ready_at + self.lease_s\n", "float('inf')\n"),
        ),
        Breach(
            "a lease is honoured too long",
            RAN_OUT,
            ("isolation", 40),
            Edit("member", "now > self.lease_until:", "now > self.lease_until + 5.0:"),
        ),
        Breach("a lease counts from the answer", RAN_OUT, ("isolation", 2), lease_from_the_answer),
    ),
    # A member keeps the commits that nobody has recorded, applies what is settled, and holds what it says
    # that it holds.
    "what a member knows": (
        Breach(
            "an outcome is applied though not prepared",
            "applies step",
            ("drawn", 3),
            Edit("member", "and outcome.step == self.prepared and self.held", "and self.held"),
        ),
        Breach(
            "the newest commit is forgotten",
            "the last it has applied",
            ("drawn", 2),
            Edit("member", "            len(self.outcomes) > 1\n", "            self.outcomes\n"),
        ),
        Breach(
            "an acknowledgement of another generation forgets",
            "which no coordinator was told of",
            ("laggard", 1),
            Edit("member", "            and self.outcomes[0].generation <= generation\n", ""),
        ),
        Breach(
            "a commit is not kept at all",
            "nobody told what step",
            ("drawn", 30),
            Edit("member", "        self.outcomes.append(outcome)\n", ""),
        ),
        Breach(
            "a settlement is dropped",
            "is said to hold",
            ("drawn", 2071),
            Edit("member", "return outcome if outcome is not None and", "return outcome if False and"),
        ),
        Breach(
            "what a failed update has harmed is held",
            HOLDS,
            ("drawn", 33),
            Edit("member", f"{LOSES}{{}}, False, None, None\n", f"{LOSES}{HARMED}, False, None, None\n"),
        ),
        Breach(
            "older layouts are held after go",
            HOLDS,
            ("drawn", 2072),
            Edit("member", "        self.held = {newest: memory}\n", ""),
        ),
    ),
    # One coordinator acts for the run: with a majority of the keepers, or the bucket, behind it, and for as
    # long as its lease holds.
    "authority": (
        Breach(
            "workers obey an older coordinator, and keepers record such orders",
            FOLLOWED,
            ("interregnum", 17),
            Edit("member", "        if incarnation < self.incarnation:\n            return False\n", ""),
            Edit("authority", f"{HEEDS}False", f"{HEEDS}True"),
        ),
        Breach(
            "half of the keepers are a majority",
            UNREAD,
            ("divided", 82),
            Edit("authority", "ends[len(ends) // 2]", "ends[(len(ends) - 1) // 2]"),
        ),
        Breach(
            "records count that only the coordinator's own disk holds",
            UNREAD,
            ("severed", 17),
            Edit(
                "authority",
                "        if self.deposed or not self.begun:\n            return False\n        return end <=",
                "        return True or end <=",
            ),
        ),
        Breach(
            "only the newest list of keepers counts",
            UNREAD,
            ("divided", 31),
            Edit(
                "authority",
                "for _, keepers in self._lists if keepers",
                "for _, keepers in self._lists[-1:] if keepers",
            ),
        ),
        Breach(
            "the lease is honoured for five more seconds",
            FOLLOWED,
            ("severed", 73),
            Edit("authority", "return self._until - now", "return self._until + 5.0 - now"),
        ),
        Breach(
            "the lease does not matter",
            FOLLOWED,
            ("severed", 73),
            Edit("authority", "end <= self._safe_end and self.holds(now)", "end <= self._safe_end"),
        ),
        Breach("the lease never ends", FOLLOWED, ("severed", 19), coordinators_lease_without_end),
        Breach(
            "the bucket counts, and prolongs the lease, although somebody has claimed the run",
            FOLLOWED,
            ("severed", 0),
            CLAIMED,
        ),
        Breach(
            "nobody heeds that it was deposed",
            FOLLOWED,
            ("unshipped", 18),
            Edit("authority", "if held == DEPOSED:", "if False:"),
            CLAIMED,
        ),
        Breach(
            "a keeper accepts an older coordinator",
            FOLLOWED,
            ("interregnum", 17),
            Edit("authority", f"{HEEDS}False", f"{HEEDS}True"),
        ),
        Breach(
            "a third of a list is enough for a follower",
            FOLLOWED,
            ("divided", 479),
            Edit("authority", "and 2 * there >= len(keepers)", "and 3 * there >= len(keepers)"),
        ),
        Breach(
            "whatever could be read is all there is",
            UNREAD,
            ("severed", 73),
            Edit("authority", "return there > 0 and 2 * there >= len(keepers)", "return True"),
        ),
        Breach(
            "a keeper that was made anew proves something",
            UNREAD,
            ("divided", 109),
            Edit("authority", "attached.get(node, 0) > 0", "attached.get(node, -1) >= 0"),
        ),
        Breach(
            "a follower does not wait for the lease before it",
            FOLLOWED,
            ("divided", 479),
            Edit("authority", "return 0.0 if read_all else", "return 0.0 if True else"),
        ),
        Breach(
            "a follower acts before the bucket knows of it",
            TWICE,
            ("interregnum", 16),
            Edit("authority", "self.begun = not follows", "self.begun = True"),
        ),
        Breach(
            "an earlier writer's copy is gone on with",
            GIVEN_UP,
            ("relapsed", 25),
            Edit("authority", "each.by >= by and each.first", "each.first"),
        ),
    ),
    # A keeper uploads a save until it is in the bucket or given up.
    "uploads": (
        Breach(
            "a save is over although it is under way",
            OVERWRITTEN,
            ("drawn", 2072),
            Edit("uploads", "if any(age(save.version) <= age(version) and", "if any(False and"),
        ),
        Breach(
            "a save is over although its commit is not known",
            OVERWRITTEN,
            ("isolation", 40),
            Edit("uploads", "return version.step <= self.version.step", "return True"),
        ),
        Breach(
            "a part that was refused once never counts again",
            "which is being written",
            ("last_minute", 136),
            Edit("uploads", "REFUSALS = 5", "REFUSALS = 0"),
        ),
    ),
    # One version is complete in host memory at any moment.
    "copies, as the member makes them": (
        Breach("a slot is overwritten early", GONE, ("drawn", 8), slot_of_the_complete_copy),
        Breach("what the others have copied is ignored", GONE, ("interregnum", 17), copies_at_once),
        Breach("members skip copies by themselves", GONE, ("drawn", 33), copies_that_each_member_skips),
        Breach("a save on its way is overwritten", OVERWRITTEN, ("drawn", 8), slot_of_a_save),
        Breach("a torn copy counts", "or it is torn", ("drawn", 8), torn_copies),
    ),
}
"""Maps the name of a family to its broken rules."""
