"""N1, N2, N3: what the coordinator computes and writes while N workers join, form, step, are fenced and form
again.

The decisions, the encoding, the journal on a local disk, the rules of its replicas and the performing of
actions are the product's.  Each message is pickled as Ray would; what a call of Ray costs beyond that is not
in these figures.  Nodes have eight workers; a step has 4,096 samples in microbatches of one at 1,024 workers,
and in proportion elsewhere.  The coordinator's own processor time is its clock during the fence: all answers
arrive within a second, and ``fence_s`` is 10 s.
"""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.coordinator import RARELY
from actors.perform import MANY
from elastic.control.inbox import Inbox
from elastic.control.machine import advance
from elastic.control.rules import Rules
from elastic.control.run import Forming, Running, RunState, Stopping
from elastic.ids import NodeId, Version, WorkerId
from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.plan.placement import bytes_by_class, cell_of, classes_of
from elastic.plan.transfer import Holding
from elastic.protocol import events as ev
from elastic.protocol.actions import Fence, Form, Go, Kill, Pause, Settle
from elastic.protocol.authority import Authority
from elastic.protocol.commit_record import Outcome
from elastic.protocol.copy_schedule import due
from elastic.protocol.member import Member
from elastic.protocol.plan import Plan
from storage.journal import Journal
from storage.objects import ObjectStore
from storage.slices import Tensor
from tests.support.cells import classes

CLASSES = classes((4096, 32768, 128256))
BLOCK = (
    ((8192, 8192), (0, 128)),
    ((1024, 8192), (0, 128)),
    ((8192, 8192), (1, 128)),
    ((28_672, 8192), (0, 1)),
    ((8192, 28_672), (1, 1)),
    ((8192,), ()),
)
"""The shape and the split of a tensor of each class in a block of a Llama of 70 B."""
CUT_CLASSES = (
    Tensor("embedding", "parameter", "F32", (128_256, 8192), (0, 1)),
    Tensor("norm", "parameter", "F32", (8192,)),
    Tensor("updates", "scalar", "F32", ()),
    *(
        Tensor(f"{block}.{number}", "parameter", "F32", shape, split, (block, 80))
        for block in range(80)
        for number, (shape, split) in enumerate(BLOCK)
    ),
)
"""A tensor of each class of that Llama if any number of pipeline stages may cut its 80 blocks."""
PER_NODE = 8
SHARDED = LayoutRule(dp_shard=8, min_shard=8)
DIVIDED = LayoutRule(dp_shard=1, model=(("pp", 2), ("tp", 4)))
"""Rules of replicas of eight members: shards, and stages of tensor groups."""
SAMPLES = 4
"""Samples of a step for each worker."""
STEPS, BEATS_S, LEASE_S = 20, 0.5, 120.0
SEGMENT_STEPS = 5
"""Steps in one object of the journal: in life an object ends after five seconds, and so many steps take half
a second here.
"""


class Coordinator:
    """A coordinator without Ray: its processor time, its journal and its messages are counted."""

    def __init__(
        self, workers: int, folder: Path, tensors: tuple[Tensor, ...] = CLASSES, rule: LayoutRule = SHARDED
    ) -> None:
        self.rules = Rules(
            8,
            workers,
            rule,
            target_step=10**6,
            save_every=1000,
            lease_s=LEASE_S,
            copy_every=1,
            buddy_every=1,
        )
        self.run = self.recorded = RunState.begin(1, 0.0)
        self.nodes = [NodeId(f"{number:056x}") for number in range(-(-workers // PER_NODE))]
        self.tensors = classes_of(tensors, rule.degrees)
        self.bytes = bytes_by_class(tensors, rule.degrees)
        self.names = [WorkerId(f"w{number}") for number in range(1, workers + 1)]
        self.home = {name: self.nodes[i // PER_NODE] for i, name in enumerate(self.names)}
        store = ObjectStore.open((folder / "bucket").as_uri())
        self.journal = Journal(store, "run", folder / "local", 0, codec.snapshot(self.run))
        self.authority = Authority(1, self.rules.coordinator_lease_s, 0.0, (), self.run)
        self.spent_s, self.given_up = 0.0, list[WorkerId]()
        self.sent = Counter[str]()
        self.now = 0.0
        self.inbox = Inbox(lambda: self.now)
        self.by_event = defaultdict[str, float](float)
        self.events = Counter[str]()

    def tell(self, *events: ev.Event) -> None:
        """Handles events that arrived together: the keepers get the journal at the end, or where a record
        must be durable.
        """
        kind, messages, before_s = (
            type(events[0]).__name__,
            [pickle.dumps(event) for event in events],
            self.spent_s,
        )
        self.receive(messages)
        while not self.inbox.empty():
            self.take()
        self.by_event[kind] += self.spent_s - before_s
        self.events[kind] += len(messages)

    def receive(self, messages: list[bytes]) -> None:
        """Puts messages that have just arrived into the inbox."""
        began = time.thread_time()
        for message in messages:
            self.inbox.put(pickle.loads(message))
        self.spent_s += time.thread_time() - began

    def take(self) -> None:
        """Handles what is next in the inbox; once that is empty, the keepers get the journal."""
        began = time.thread_time()
        if (waiting := self.inbox.take(0.0)) is not None:
            self._advance(waiting[0], self.inbox.heard_until()[1])
        if self.inbox.empty():
            self._replicate()
        self.spent_s += time.thread_time() - began

    def _advance(self, event: ev.Event, heard_until: float) -> None:
        before, done = self.run, advance(self.run, event, self.now, self.rules, heard_until)
        if codec.worth_recording(event, before, done):
            record = codec.record(self.journal.next, self.now, event, before, done, self.recorded)
            self.recorded = known = codec.known_after(event, before, done.run)
            self.journal.append(record, lambda: codec.snapshot(known, "", self.rules), durable=False)
            self.authority.note(self.journal.end, done.run.cluster.keepers, done.run)
            if done.durable:
                self._replicate()
        self.run = done.run
        for action in done.actions:
            self._perform(action)

    def _replicate(self) -> None:
        end, begun_at = self.journal.end, dict[int, Any]()
        self.sent["sends"] += 1
        for node, at in self.authority.requests(end, self.run.cluster.keepers, self.now):
            if at not in begun_at:
                begun_at[at] = self.journal.tail(at)
            self.sent["copies"] += 1
            self.sent["copied bytes"] += len(pickle.dumps(begun_at[at]))
            self.authority.answered(node, end)

    def _perform(self, action: Any) -> None:
        if isinstance(action, Kill):
            self.given_up += action.workers
        parts = orders(action)
        for number, part in parts:
            self.sent["orders"] += number
            # see actors/perform.py: a long message is put into Ray's object store once
            times = 1 if number >= MANY else number
            self.sent["order bytes"] += sum(len(pickle.dumps(part)) for _ in range(times))

    @property
    def plan(self) -> Plan:
        assert self.run.plan is not None
        return self.run.plan

    # ---- what all of them say

    def join(self) -> None:
        self.tell(
            *(
                each
                for node in self.nodes
                for each in (ev.NodeFound(node), ev.KeeperUp(node, f"{node[:8]}:7000"))
            )
        )
        self.tell(ev.Capacity(len(self.names)))
        self.tell(
            *(
                ev.Joined(name, self.home[name], "cuda", self.tensors, class_bytes=self.bytes)
                for name in self.names
            )
        )
        self.now += self.rules.grow_debounce_s
        self.tell(ev.Tick())

    def form(self) -> None:
        assert isinstance(self.run.state, Forming), self.run.state
        plan = self.plan
        self.tell(*(ev.Here(name, plan.generation) for name in plan.members))
        self.tell(*(ev.Ready(name, plan.generation, 1.5, 2.5, 10**9, "eth0") for name in plan.members))
        assert isinstance(self.run.state, Running), self.run.state

    def outcome(self, step: int) -> Outcome:
        """Returns the commit of a step as a run with a shuffled corpus of a billion samples has it."""
        count, generation = SAMPLES * len(self.names), self.plan.generation
        losses = tuple(2.0 + ((i * 7919 + step) % 1009) / 1013 for i in range(count))
        ids = tuple((((i + 1) * 48271 + step * 69621) * 16807 % 999_999_937,) for i in range(count))
        saves = due(step, self.rules.save_every, self.rules.target_step)
        return Outcome(
            step, generation, 1.5, losses, (8192,) * count, ids, True, saves=saves, copied_through=step - 1
        )

    def step(self, step: int) -> None:
        """Lets the world step for a second: beats, leases that are renewed every quarter of their time,
        ticks, and the commit.
        """
        members, generation = self.plan.members, self.plan.generation
        for half in range(round(1 / BEATS_S)):
            self.now += BEATS_S
            beats = list[ev.Event]()
            for first in range(0, len(self.names), PER_NODE):
                there = [name for name in self.names[first : first + PER_NODE] if name in self.run.workers]
                progress = tuple(
                    ev.Progress(name, generation, step, half, 3 * half + 1, "computes") for name in there
                )
                beats.append(ev.Beat(self.nodes[first // PER_NODE], progress))
            self.tell(*beats)
        share = max(1, round(len(members) / (LEASE_S / 4)))
        first = step * share % len(members)
        self.tell(*(ev.Renewed(name, generation) for name in members[first : first + share]))
        self.tell(*(ev.Tick() for _ in range(10)), ev.Capacity(0), ev.Capacity(0))
        self.tell(ev.StepDone(members[0], generation, self.outcome(step)))
        if step % SEGMENT_STEPS == 0:
            self.journal.ship(0.0)

    def fence(self, step: int) -> float:
        """Lets a member die while two steps are not acknowledged.  All answers arrive within a second.
        Returns the seconds it took.
        """
        seen, generation = (self.outcome(step), self.outcome(step + 1)), self.plan.generation
        plan = self.plan
        self.tell(ev.Lost(plan.members[3], "its process died"))
        assert isinstance(self.run.state, Stopping)
        version = Version(step + 1, generation)
        answers = []
        for rank, name in enumerate(plan.members):
            if name in self.run.workers:
                member = Member(name)
                member.heed(plan.incarnation)
                member.form(plan)
                member.enter(plan)
                member.healed(0.0, Holding(name, version, cell_of(plan.layout, rank)))
                member.prepare(step + 2)
                member.outcomes.extend(seen)
                answers.append(pickle.dumps(member.fence(generation)))
        began_s, began = self.spent_s, self.now
        self.sent["answers bytes"] += sum(map(len, answers))
        for number, answer in enumerate(answers):
            self.now = began + number / len(answers)
            self.receive([answer])
        while not self.inbox.empty():
            self.now = max(self.now, began + 1.0 + self.spent_s - began_s)
            self.take()
        for node in self.nodes:
            if not isinstance(self.run.state, Stopping):
                break
            self.tell(ev.Kept(node, generation, ()))
        return self.spent_s - began_s


def orders(action: Any) -> list[tuple[int, Any]]:
    """Returns the messages to workers that an action brings, as (number of receivers, content)."""
    match action:
        case Form(plan):
            return [(len(plan.members), (1, "form", plan, ("10.0.0.1", 7000)))]
        case Go(generation, members):
            return [(len(members), (1, "go", generation))]
        case Pause(generation, members, save, hand_over):
            return [(len(members), (1, "pause", generation, save, hand_over))]
        case Fence(generation, members):
            return [(len(members), (1, "fence", generation))]
        case Settle(generation, members, outcome):
            return [(len(members), (1, "settle", generation, outcome))]
    return []


def measure(n: int, tensors: tuple[Tensor, ...] = CLASSES, rule: LayoutRule = SHARDED) -> dict[str, float]:
    """Returns the coordinator's processor time in seconds and its journal in bytes, by phase.  ``tensors``
    are those of the model, and ``rule`` says which layouts are allowed.
    """
    gc.set_threshold(RARELY)
    with tempfile.TemporaryDirectory() as folder:
        one = Coordinator(n, Path(folder), tensors, rule)
        found: dict[str, float] = {}

        def phase(name: str, do: Callable[[], object]) -> None:
            before_s, before = one.spent_s, one.journal.end
            do()
            found[f"{name}_s"], found[f"{name}_journal_bytes"] = (
                one.spent_s - before_s,
                one.journal.end - before,
            )

        phase("join", one.join)
        phase("form", one.form)
        phase("steps", lambda: [one.step(step) for step in range(1, STEPS + 1)])
        phase("fence", lambda: one.fence(STEPS + 1))
        phase("form_again", one.form)
        one.journal.close()
        microbatches = SAMPLES * n
        found["step_core_percent"] = 100 * found.pop("steps_s") / STEPS
        found["journal_bytes_per_microbatch"] = found.pop("steps_journal_bytes") / STEPS / microbatches
        found["given_up_workers"] = len(one.given_up)
        found["order_bytes"] = one.sent["order bytes"]
        found["answers_bytes"] = one.sent["answers bytes"]
        found["copies_of_a_send"] = one.sent["copies"] / one.sent["sends"]
        for name, spent_s in sorted(one.by_event.items(), key=lambda each: -each[1])[:6]:
            found[f"event_{name.lower()}_us"] = 1e6 * spent_s / one.events[name]
        return found
