"""The lease, the copies of keepers, followers and drivers decide which coordinator may act; in a simulated
world, never two at once.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.ids import NodeId
from elastic.protocol import authority as product
from elastic.protocol.authority import (
    COPY_S,
    DEPOSED,
    MARKS,
    Audience,
    Authority,
    JournalCopy,
    Replica,
    furthest,
    has_read_all,
    waits_s,
)
from tests.sim.mutants import Edit, copied

pytestmark = pytest.mark.fast

A, B, C, D = (NodeId(name) for name in "abcd")
ALL = (A, B, C)
LEASE_S = 10.0


def first(
    keepers: tuple[NodeId, ...] = ALL, *, follows: bool = False, incarnation: int = 1
) -> Authority[str]:
    """Returns the authority of a coordinator that claimed the run at 0 s."""
    return Authority(incarnation, LEASE_S, 0.0, keepers, "nothing", follows=follows)


# ---- the lease


def test_the_lease_counts_from_the_question_and_not_from_the_answer() -> None:
    authority = first()
    assert authority.holds(9.9) and not authority.holds(10.0)
    authority.confirmed(4.0)
    assert authority.holds(13.9) and not authority.holds(14.0)
    authority.claimed(2.0, latest=1)
    assert authority.holds(13.9), "the answer to an earlier question takes nothing away"
    assert not authority.holds(18.9), "nor is a lease honoured for five more seconds"


def test_the_bucket_is_asked_when_the_head_has_been_silent_for_half_of_the_lease() -> None:
    authority = first()
    assert not authority.asks_bucket(5.0) and authority.asks_bucket(5.1)
    authority.confirmed(5.1)
    assert not authority.asks_bucket(10.1) and authority.asks_bucket(10.2)


def test_whoever_finds_a_later_claim_is_deposed_for_good() -> None:
    authority = first()
    authority.note(1, ALL, "one")
    authority.in_bucket(1, asked_at=0.0, latest=1)
    assert authority.secured(1, 1.0)
    authority.claimed(1.0, latest=2)
    assert authority.deposed == "coordinator 2 has claimed the run"
    authority.confirmed(2.0)
    assert not authority.holds(2.0) and not authority.secured(1, 2.0) and not authority.asks_bucket(9.0)
    authority.note(2, ALL, "two")
    assert authority.requests(2, ALL, 2.0) == []


# ---- the journal's copies


def test_more_than_half_of_the_keepers_secure_a_record() -> None:
    authority = first((A, B, C, D))
    authority.note(7, (A, B, C, D), "seven")
    assert authority.requests(7, (A, B, C, D), 0.0) == [(A, 0), (B, 0), (C, 0), (D, 0)]
    authority.answered(A, 7)
    authority.answered(B, 7)
    assert not authority.secured(7, 1.0) and authority.safe == "nothing", "half of four is no majority"
    authority.answered(C, 6)
    assert not authority.secured(7, 1.0) and authority.holders(7) == (2, 4)
    assert authority.requests(7, ALL, 1.0) == [(C, 6)], "D has not answered yet, and the others have it all"
    authority.answered(C, 7)
    assert authority.secured(7, 1.0) and authority.safe == "seven"
    assert not authority.secured(8, 1.0)
    assert not authority.secured(7, 10.0), "the lease is over: it may be cut off together with all of them"


def test_a_majority_of_every_list_of_keepers_since_the_last_time_is_needed() -> None:
    """Keepers that were given up meanwhile may be the ones that a follower reaches."""
    authority = first()
    authority.note(1, (A,), "b and c are given up")
    authority.answered(A, 1)
    assert not authority.secured(1, 1.0)
    authority.answered(B, 1)
    assert authority.secured(1, 1.0)
    authority.note(2, (A,), "and from now on")
    assert authority.requests(2, ALL, 1.0) == [(A, 1)]
    authority.answered(A, 2)
    assert authority.secured(2, 1.0), "a is a majority of one"


def test_without_any_keeper_its_own_disk_is_enough_while_the_lease_holds() -> None:
    authority = first(())
    authority.note(1, (), "one")
    assert authority.secured(1, 9.9) and not authority.secured(1, 10.0) and authority.safe == "one"
    authority.note(2, (A,), "a keeper")
    assert not authority.secured(2, 1.0)


def test_the_bucket_is_enough_unless_somebody_has_claimed_the_run() -> None:
    authority = first()
    authority.note(3, ALL, "three")
    authority.in_bucket(3, asked_at=20.0, latest=1)
    assert authority.secured(3, 29.0) and authority.safe == "three"
    assert authority.secured(3, 99.0), "whoever follows reads the bucket, whenever that is"
    authority.note(4, ALL, "four")
    authority.in_bucket(4, asked_at=30.0, latest=2)
    assert not authority.secured(4, 30.0) and authority.safe == "three" and authority.deposed


def test_whoever_follows_acts_on_nothing_before_the_bucket_has_it() -> None:
    """A follower waits for the bucket, because then the coordinator before it can no longer write there."""
    authority = first(follows=True, incarnation=2)
    authority.note(5, ALL, "two takes over")
    assert authority.requests(5, ALL, 0.0) == [] and not authority.secured(5, 0.0)
    authority.in_bucket(0, asked_at=0.0, latest=2)
    assert not authority.begun, "the bucket answers, and has nothing of it"
    authority.in_bucket(5, asked_at=1.0, latest=2)
    assert authority.secured(5, 1.0) and authority.begun
    authority.note(6, ALL, "six")
    assert [node for node, _ in authority.requests(6, ALL, 1.0)] == [A, B, C], (
        "from then on its keepers are enough"
    )


def test_a_keeper_that_has_heard_a_later_coordinator_deposes() -> None:
    authority = first()
    authority.note(1, ALL, "one")
    authority.answered(A, 1)
    authority.answered(B, DEPOSED)
    assert authority.deposed == "the keeper of b has heard a later coordinator" and not authority.holds(0.0)


def test_a_keeper_that_is_late_or_lost_is_not_waited_for() -> None:
    authority = first()
    authority.note(1, ALL, "one")
    assert authority.waits_s(0.0) == 0.0, "nobody was asked"
    authority.requests(1, (A, B), 0.0)
    assert authority.waits_s(0.4) == pytest.approx(COPY_S - 0.4)
    authority.failed(A)
    assert authority.requests(1, (A,), 0.5) == [(A, 0)], "another one may have taken its place"
    authority.answered(B, 1)
    assert authority.waits_s(0.6) == 0.0, "but nobody waits for it until it has answered"
    authority.answered(A, 1)
    authority.note(2, ALL, "two")
    authority.requests(2, (A,), 1.0)
    assert authority.waits_s(1.0) == COPY_S and authority.waits_s(1.0 + COPY_S) <= 0.0


def test_while_no_majority_is_in_reach_only_so_much_is_remembered() -> None:
    authority = first()
    for end in range(1, 10 * MARKS):
        authority.note(end, ALL, str(end))
    assert len(authority._marks) <= MARKS + 1
    for node in (A, B):
        authority.answered(node, 10 * MARKS - 1)
    assert authority.safe == str(10 * MARKS - 1) and authority._marks == []


# ---- a keeper's side


def test_a_copy_grows_in_order_and_lets_go() -> None:
    replica = Replica()
    assert replica.copy(1, 0, 0, b"abc") == 3
    assert replica.copy(1, 0, 3, b"def") == 6
    assert replica.copy(1, 0, 2, b"cdefg") == 7, "what is there already is passed over"
    assert replica.copy(1, 0, 9, b"jk") == 7, "what leaves a gap is not taken"
    assert replica.copy(1, 4, 7, b"h") == 8
    assert bytes(replica.data) == b"efgh"
    assert replica.copy(1, 20, 20, b"xyz") == 23, "all before is in the bucket"
    assert bytes(replica.data) == b"xyz"


def test_a_copy_heeds_the_latest_writer_only() -> None:
    replica = Replica()
    replica.copy(1, 0, 0, b"first")
    assert replica.copy(2, 10, 15, b"from the middle") == 10, "from its beginning, please"
    assert bytes(replica.data) == b"first", "until then it is of use"
    assert replica.copy(2, 10, 10, b"second") == 16
    assert bytes(replica.data) == b"second"
    assert replica.copy(1, 0, 5, b" again") == DEPOSED
    assert bytes(replica.data) == b"second"


def test_whoever_was_heard_is_heeded_before_it_has_written() -> None:
    replica = Replica([])
    replica.copy(1, 0, 0, ["one"])
    assert replica.heed(3) and not replica.heed(2) and replica.heed(3)
    assert replica.copy(1, 0, 1, ["two"]) == DEPOSED and replica.copy(2, 0, 0, ["two"]) == DEPOSED
    assert (replica.by, replica.data) == (1, ["one"]), "what the first has left is still there to be read"


def test_a_keeper_that_was_made_anew_heeds_whoever_made_it() -> None:
    replica = Replica([], heeds=2)
    assert replica.copy(1, 0, 0, ["one"]) == DEPOSED and replica.copy(2, 0, 0, ["two"]) == 1


# ---- a follower's side


def found(by: int, first: int, last: int) -> JournalCopy:
    return JournalCopy(by, first, last, list(range(first, last + 1)))


def test_the_copy_that_reaches_furthest_without_a_gap() -> None:
    copies = [found(1, 4, 7), found(1, 4, 12), found(1, 6, 20), found(1, 0, 3)]
    assert furthest(5, 1, copies) == found(1, 4, 12), "6 to 20 would leave a gap"
    assert furthest(6, 1, copies) == found(1, 6, 20)
    assert furthest(21, 1, copies) is None, "the bucket has them all"
    assert furthest(0, 0, []) is None


def test_what_an_earlier_writer_has_written_on_its_own_is_nothing() -> None:
    """The earlier writer was cut off with some keepers; the next one has gone on from the last record that
    both know.
    """
    copies = [found(1, 4, 20), found(2, 4, 9), found(1, 4, 7)]
    assert furthest(5, 1, copies) == found(2, 4, 9)
    assert furthest(10, 2, copies) is None, (
        "the bucket has all that the later one wrote, and takes no more from the earlier one"
    )
    assert furthest(10, 1, copies) == found(1, 4, 20), "had nobody followed it"


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2)),
)
def test_a_follower_has_read_all_when_no_majority_is_left_to_any_other(
    keepers: list[str], attached: dict[str, int]
) -> None:
    """The simple second implementation tries every set of keepers that the follower has not reached."""
    others = [node for node in keepers if not attached.get(node)]
    sets = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(others) + 1))
    left = any(len(each) > len(keepers) - len(each) for each in sets)
    read_all = has_read_all(
        {NodeId(node): by for node, by in attached.items()}, [NodeId(node) for node in keepers]
    )
    assert read_all is (bool(keepers) and not left)


def test_a_follower_that_has_not_read_all_waits_for_the_lease_before_it() -> None:
    assert waits_s(100.0, 10.5, True, 101.0) == 0.0
    assert waits_s(100.0, 10.5, False, 101.0) == pytest.approx(9.5)
    assert waits_s(100.0, 10.5, False, 110.5) == waits_s(100.0, 10.5, False, 999.0) == 0.0


# ---- the drivers


def test_the_run_stops_with_the_driver_that_started_it() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("second", 1)
    assert audience.stops_with("first", 2), "whoever watches"
    assert not audience.stops_with("second", 2), "it only attached"
    audience.leave("second")
    assert audience.present(3) == ["first"]


def test_the_last_driver_takes_its_place() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("second", 15)
    assert not audience.stops_with("second", 20)
    assert audience.stops_with("second", 21), "the first has vanished"
    audience.hear("third", 21)
    assert not audience.stops_with("second", 21), "two that attached: one may go"


def test_a_run_that_nobody_watches() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    assert not audience.left_alone(20)
    assert audience.left_alone(20.1)
    audience.hear("second", 21)
    assert not audience.left_alone(22)
    audience.leave("second")
    assert audience.left_alone(22)


def test_detached_it_needs_nobody() -> None:
    audience = Audience("first", "detach", driver_s=20, now=0)
    assert not audience.stops_with("first", 1)
    assert not audience.left_alone(1000)
    assert audience.present(1000) == []


def test_who_only_watches_keeps_nothing_alive_and_stops_nothing() -> None:
    audience = Audience("first", "stop", driver_s=20, now=0)
    audience.hear("watcher", 15, only=True)
    assert audience.stops_with("first", 16)
    assert audience.left_alone(21), "the first has vanished"
    assert audience.present(21) == ["watcher"], "but it is to see the end"
    audience.hear("second", 21)
    assert audience.stops_with("second", 22), "a watcher is no other driver"


# ---- a simulated world: each coordinator that acts is compared with all that acted before it

OVER_S = 1.05 * LEASE_S


@dataclass
class Actor:
    """One coordinator, with the records on its disk and its messages under way."""

    rules: Any
    first: int
    records: list[str]
    whole: bool
    cut: bool = False
    """True if it reaches neither the head nor the bucket."""
    in_bucket: int = 0
    acted_to: int = 0
    calls: list[tuple[NodeId, Any, tuple[int, int, list[str]]]] = field(default_factory=list)
    answers: list[tuple[float, int | None]] = field(default_factory=list)
    """Each answer is (time asked, latest claim), where None means that the head has confirmed."""

    @property
    def end(self) -> int:
        return len(self.records)


class World:
    """Coordinators, keepers and a bucket; ``rng`` decides which messages arrive.  ``rules`` is the module
    under test.
    """

    def __init__(self, rng: random.Random, rules: ModuleType) -> None:
        self.rng, self.rules, self.now, self.claims = rng, rules, 0.0, 1
        self.nodes = [NodeId(f"n{n}") for n in range(rng.randint(1, 5))]
        self.keepers = {node: rules.Replica([]) for node in self.nodes}
        self.bucket: list[tuple[int, str]] = []
        """Each entry is (writer, record)."""
        keepers = tuple(self.nodes)
        self.actors = [Actor(rules.Authority(1, LEASE_S, 0.0, keepers, None), 0, [], True)]
        self.lists = {"": keepers}
        self.acting = self.actors[0]
        self.following: float | None = None
        self.reached: list[NodeId] = []
        self.names = itertools.count()

    def play(self, moves: int) -> None:
        for _ in range(moves):
            self.now += self.rng.choice((0.0, 0.0, 0.1, 0.5, 1.5))
            actor = self.rng.choice(self.actors[-2:])
            move = self.rng.choice(
                (
                    self.append,
                    self.append,
                    self.send,
                    self.send,
                    self.arrive,
                    self.arrive,
                    self.ask,
                    self.hear,
                    self.put,
                )
            )
            actor.cut ^= self.rng.random() < 0.03
            move(actor)
            self.act(actor)
            if self.rng.random() < 0.02 or self.following is not None:
                self.follow()
            if self.rng.random() < 0.02:
                self.keepers[self.rng.choice(self.nodes)] = self.rules.Replica(
                    [], heeds=self.actors[-1].rules.incarnation
                )

    def append(self, actor: Actor) -> None:
        if not actor.rules.deposed and actor.acted_to == actor.end:  # one decision at a time
            name = f"{actor.rules.incarnation}-{next(self.names)}"
            some = tuple(node for node in self.nodes if self.rng.random() < 0.7)
            self.lists[name] = (
                some
                if self.rng.random() < 0.2
                else self.lists[self.log(actor)[-1] if self.log(actor) else ""]
            )
            actor.records.append(name)
            actor.rules.note(actor.end, self.lists[name], name)

    def send(self, actor: Actor) -> None:
        for node, at in actor.rules.requests(actor.end, self.nodes, self.now):
            at = max(at, actor.in_bucket)
            actor.calls.append((node, self.keepers[node], (actor.in_bucket, at, actor.records[at:])))

    def arrive(self, actor: Actor) -> None:
        for call in [call for call in actor.calls if self.rng.random() < 0.6]:
            actor.calls.remove(call)
            node, replica, sent = call
            if replica is self.keepers[node]:
                actor.rules.answered(node, replica.copy(actor.rules.incarnation, *sent))
            else:
                actor.rules.failed(node)

    def ask(self, actor: Actor) -> None:
        if self.claims == actor.rules.incarnation and self.rng.random() < 0.5 and not actor.cut:
            actor.answers.append((self.now, None))
        elif not actor.cut:
            actor.answers.append((self.now, self.claims))

    def hear(self, actor: Actor) -> None:
        for asked_at, latest in actor.answers:
            actor.rules.confirmed(asked_at) if latest is None else actor.rules.claimed(asked_at, latest)
        actor.answers.clear()

    def put(self, actor: Actor) -> None:
        if actor.rules.deposed or actor.cut or self.rng.random() < 0.5:
            return
        if actor.records[actor.in_bucket :] and len(self.bucket) != actor.first + actor.in_bucket:
            actor.rules.deposed = "somebody else has written there"
            return
        self.bucket += [(actor.rules.incarnation, record) for record in actor.records[actor.in_bucket :]]
        actor.in_bucket = actor.end
        actor.rules.in_bucket(actor.end, self.now, self.claims)

    def follow(self) -> None:
        """Another coordinator claims the run, reads, waits as long as it must, and then takes over."""
        if self.following is None:
            self.following, self.claims = self.now, self.claims + 1
            share = self.rng.choice((0.2, 0.5, 0.8))
            self.reached = [node for node in self.nodes if self.rng.random() < share]
        attached, copies = {}, []
        for node in self.reached:
            replica = self.keepers[node]
            replica.heed(self.claims)
            attached[node] = replica.by
            copies.append((replica.by, list(replica.data)))
        numbers = {record: actor.first + n for actor in self.actors for n, record in enumerate(actor.records)}
        parsed = [
            self.rules.JournalCopy(by, numbers[data[0]], numbers[data[-1]], data)
            for by, data in copies
            if data
        ]
        end = len(self.bucket)
        best = self.rules.furthest(end, self.bucket[-1][0] if self.bucket else 0, parsed)
        ahead = [record for record in best.records if numbers[record] >= end] if best is not None else []
        newest = [*("" for _ in range(1)), *(record for _, record in self.bucket), *ahead][-1]
        whole = self.rules.has_read_all(attached, self.lists[newest])
        if self.rules.waits_s(self.following, OVER_S, whole, self.now) > 0:
            return
        rules = self.rules.Authority(
            self.claims, LEASE_S, self.following, self.lists[newest], None, follows=True
        )
        self.actors.append(Actor(rules, end, ahead, whole))
        self.following = None

    def log(self, actor: Actor) -> list[str]:
        """Returns all records that ``actor`` knows of, in order."""
        return [record for _, record in self.bucket[: actor.first]] + actor.records

    @staticmethod
    def wrote(actor: Actor, log: list[str]) -> bool:
        return any(record.startswith(f"{actor.rules.incarnation}-") for record in log)

    def forked(self, acting: Actor, actor: Actor, log: list[str]) -> bool:
        """Returns whether a coordinator after ``acting``, up to ``actor``, has recorded that it may not have
        read everything.
        """
        since = [
            each
            for each in self.actors
            if acting.rules.incarnation < each.rules.incarnation <= actor.rules.incarnation
        ]
        return any(not each.whole and (each is actor or self.wrote(each, log)) for each in since)

    def act(self, actor: Actor) -> None:
        """The coordinator acts on its last record, if it may."""
        if actor.acted_to == actor.end or not actor.rules.secured(actor.end, self.now):
            return
        acting, log = self.acting, self.log(actor)
        if actor.rules.incarnation > acting.rules.incarnation:  # it begins
            before = self.log(acting)[: acting.first + acting.acted_to]
            assert self.forked(acting, actor, log) or log[: len(before)] == before, (
                "a coordinator begins and has not read what was acted on"
            )
            self.acting = actor
        elif actor is not acting:
            assert self.log(acting)[: len(log)] == log, (
                "two coordinators act, and one knows nothing of the other"
            )
        actor.acted_to = actor.end


def conflict(seed: int, rules: ModuleType = product, moves: int = 200) -> str:
    """Returns the first error in the simulated world of ``seed``, or an empty text."""
    try:
        World(random.Random(seed), rules).play(moves)
    except AssertionError as error:
        return str(error).splitlines()[0]
    return ""


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_no_two_coordinators_act_on_what_the_other_does_not_know(seed: int) -> None:
    assert conflict(seed) == ""


def test_in_the_dumb_world_coordinators_do_act() -> None:
    """The control: in most worlds several coordinators act, one after the other, some by their keepers and
    some by the bucket.
    """
    worlds = [World(random.Random(seed), product) for seed in range(50)]
    for world in worlds:
        world.play(200)
    acted = [[actor for actor in world.actors if actor.acted_to] for world in worlds]
    assert sum(len(each) >= 2 for each in acted) > 25
    assert any(actor.acted_to > actor.in_bucket for each in acted for actor in each) and any(
        actor.whole for each in acted for actor in each[1:]
    )
    assert any(not actor.whole for each in acted for actor in each)


@pytest.mark.parametrize(
    ("old", "new", "seed"),
    [
        ("ends[len(ends) // 2]", "ends[(len(ends) - 1) // 2]", 65),
        ("for _, keepers in self._lists if keepers", "for _, keepers in self._lists[-1:] if keepers", 1339),
        ("return self._until - now", "return self._until + 5.0 - now", 2005),
        ("if latest > self.incarnation:", "if False:", 4),
        (
            "self.claimed(asked_at, latest)\n        if self.deposed:",
            "self.claimed(asked_at, self.incarnation)\n        if self.deposed:",
            99,
        ),
        (
            "        if incarnation < self.heeds:\n            return False",
            "        if incarnation < self.heeds:\n            return True",
            5,
        ),
        ("there > 0 and 2 * there >=", "there > 0 and 3 * there >=", 249),
        ("attached.get(node, 0) > 0", "attached.get(node, -1) >= 0", 13),
        ("return 0.0 if read_all else", "return 0.0 if True else", 177),
        ("self.begun = not follows", "self.begun = True", 301),
    ],
)
def test_in_the_dumb_world_a_broken_rule_is_noticed(old: str, new: str, seed: int) -> None:
    """It was noticed at ``seed``; if the product has changed since, at another one."""
    rules = copied(product, Edit("authority", old, new))
    assert any(conflict(each, rules) for each in (seed, *range(4000))) and not conflict(seed)
