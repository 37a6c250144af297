"""Membership keeps the list of workers and keepers.

It chooses the ids of workers and never uses one again, so a dead worker's messages can be recognised.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from itertools import takewhile

from elastic.control import growth, lemons, saves
from elastic.control.decision import Decision, count, names
from elastic.control.evolve import evolve
from elastic.control.liveness import Start, forgotten, silent
from elastic.control.rules import Rules
from elastic.control.run import TERMINAL, Finishing, Host, Running, RunState
from elastic.ids import NodeId, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Kill, StartWorkers
from elastic.protocol.events import Capacity, KeeperUp, StartFailed, Starting

# ---- workers that are started


def start_failed(decision: Decision, event: StartFailed) -> None:
    """Frees the worker's place.  The next attempt waits ``grow_debounce_s``, so that repeated failures do not
    spin.
    """
    if event.worker not in decision.run.members.starting:
        return decision.refuse(f"{event.worker} is not being started")
    no_longer_starting(decision, event.worker)
    decision.do(Kill((event.worker,), "it did not start"))
    decision.know("members", start_after=decision.now + decision.rules.grow_debounce_s)
    decision.say(f"{event.worker} did not start ({event.reason})")
    if event.node is not None:
        lemons.failed(decision, event.node, f"{event.worker} did not start")


def starting(decision: Decision, event: Starting) -> None:
    """Gives the worker ``form_s`` from now on to get further or to join: only standing still is limited."""
    asked, starts = decision.run.members.starting, decision.run.watch.starts
    if event.worker not in asked:
        return decision.refuse(f"{event.worker} is not being started")
    if not starts:
        decision.say(f"{event.worker} is still starting: it {event.doing}")
    decision.know("watch", starts={**starts, event.worker: Start(decision.now, event.doing)})


def no_longer_starting(decision: Decision, worker: WorkerId) -> None:
    """Forgets that the worker was asked for: it has joined, or it never will."""
    del decision.open("members", "starting")[worker]
    if worker in decision.run.watch.starts:
        del decision.open("watch", "starts")[worker]


def get_further(decision: Decision, asked_before: float) -> bool:
    """Returns whether a worker that was asked for earlier than ``asked_before`` is slow to start, but has
    made progress within ``form_s``.
    """
    asked, form_s = decision.run.members.starting, decision.rules.form_s
    starts = decision.run.watch.starts.items()
    return any(
        asked.get(worker, asked_before) < asked_before and not decision.due(known.at + form_s)
        for worker, known in starts
    )


def capacity(decision: Decision, event: Capacity) -> None:
    """Notes the free slots, less those of workers that are starting and have not taken their slot yet: no
    slot is given away twice.
    """
    coming = (
        0 if event.placed is None else len(decision.run.members.starting.keys() - frozenset(event.placed))
    )
    decision.know("cluster", slots=max(0, event.slots - coming))


def start_workers(decision: Decision) -> None:
    """Asks for as many workers as the cluster has room for, up to ``max_workers`` and the spares.  While the machine
    of a node may be taken, each of its workers has a warm spare elsewhere, if there is room.
    """
    _forget_the_late(decision)
    _end_surplus(decision)
    run, rules = decision.run, decision.rules
    starting = run.members.starting
    number = min(run.cluster.slots, wanted(run, rules) - _staying(run, rules) - len(starting))
    if number <= 0 or decision.now < run.members.start_after:
        return
    new = tuple(WorkerId(f"w{run.members.next_worker + i}") for i in range(number))
    spares = count(rules.spares, "spare")
    asked = {**starting, **dict.fromkeys(new, decision.now)}
    decision.know("members", starting=asked, next_worker=run.members.next_worker + number)
    decision.know("cluster", slots=run.cluster.slots - number)
    avoid = (
        *run.cluster.refused,
        *run.cluster.closed(few=len(run.workers) < rules.min_workers),
        *silent(run.watch, run.cluster.keepers, decision.heard_until, rules.silence_s, rules.silence_s),
    )
    decision.do(StartWorkers(new, tuple(dict.fromkeys(avoid))))
    decision.say(
        f"start {names(new)}: {count(len(run.workers), 'worker')} of at most "
        f"{rules.max_workers}{f' and {spares}' if rules.spares else ''}"
    )


def wanted(run: RunState, rules: Rules) -> int:
    """Returns the number of workers, spares included, that the run wants as long as it goes on; 0 if it ends."""
    ends = run.stop or isinstance(run.state, (Finishing, *TERMINAL))
    return 0 if ends else rules.max_workers + rules.spares


def _staying(run: RunState, rules: Rules) -> int:
    """Returns the number of workers on nodes that will not be taken, nor may be.  If workers are few, a node that
    may be taken gets workers of its own, and none elsewhere for them.
    """
    few = len(run.workers) < rules.min_workers
    leave = run.cluster.deadlines if few else run.cluster.notices
    return _beside(run, leave) if leave else len(run.workers)


def _beside(run: RunState, nodes: Container[NodeId]) -> int:
    return len([known for known in run.workers.values() if known.node not in nodes])


def _end_surplus(decision: Decision) -> None:
    """Ends the newest workers outside the world that are more than the run wants: an advice is over, or a notice was
    withdrawn, and nobody needs the spares that were started for the node.
    """
    run, plan, number = decision.run, decision.run.plan, wanted(decision.run, decision.rules)
    if not isinstance(run.state, Running) or plan is None or not number or len(run.workers) <= number:
        return
    if (surplus := _beside(run, run.cluster.notices) - number) <= 0:
        return
    outside = [
        worker
        for worker, known in run.workers.items()
        if worker not in plan.ranks and not known.holdings and known.node not in run.cluster.notices
    ]
    if over := tuple(outside[-surplus:]):
        expel(decision, over, "the run has enough workers without it")
        decision.say(f"{names(over)} {'is' if len(over) == 1 else 'are'} ended: no spare is needed any more")


def _forget_the_late(decision: Decision) -> None:
    """Gives up and kills workers that have neither joined nor got further for ``form_s``."""
    form_s, starts = decision.rules.form_s, decision.run.watch.starts
    asked = decision.run.members.starting.items()  # in the order in which they were asked for
    slow = [worker for worker, _ in takewhile(lambda each: decision.due(each[1] + form_s), asked)]
    late = tuple(
        worker for worker in slow if worker not in starts or decision.due(starts[worker].at + form_s)
    )
    for worker in late:
        no_longer_starting(decision, worker)
    if late:
        did = next((f"; {worker} {starts[worker].doing}" for worker in late if worker in starts), "")
        decision.do(Kill(late, f"it neither joined nor made progress for {form_s:g} s"))
        decision.say(f"{names(late)} neither joined nor made progress for {form_s:g} s{did}")


def number_of(worker: WorkerId) -> int:
    """Returns the worker's number: workers are numbered in the order in which they were asked for.

    Returns 0 for a name of another form.
    """
    return int(worker.lstrip("w")) if worker.lstrip("w").isdigit() else 0


# ---- workers that joined


def workers_on(run: RunState, node: NodeId) -> tuple[WorkerId, ...]:
    """Returns the workers of ``node``."""
    return tuple(worker for worker, known in run.workers.items() if known.node == node)


def remove(decision: Decision, workers: tuple[WorkerId, ...]) -> None:
    """Removes the workers from the run.  Their copies stay with their keepers."""
    gone = frozenset(workers)
    nodes = dict.fromkeys(known.node for worker, known in decision.run.workers.items() if worker in gone)
    decision.know(
        members=decision.run.members.without(gone), stragglers=decision.run.stragglers.without(gone)
    )
    for node in nodes:
        _note_leaving(decision, node)


def expel(decision: Decision, workers: tuple[WorkerId, ...], why: str, *, examine: bool = False) -> None:
    """Kills the workers.  An order to kill proves nothing, so everything that they say from now on is
    refused.

    ``examine`` says that they stand still; where they stand is found out before they are killed.
    """
    if workers:
        decision.do(Kill(workers, why, examine))
        hung = {known.node: each for each in workers if (known := decision.run.workers.get(each)) and examine}
        remove(decision, workers)
        for node, worker in hung.items():
            lemons.failed(decision, node, f"{worker} stood still")


def hold(decision: Decision, holdings: dict[WorkerId, tuple[Holding, ...]]) -> None:
    """Notes what each named worker holds, if it is still part of the run."""
    for worker, held in holdings.items():
        known = decision.run.workers.get(worker)
        if known is not None and known.holdings != held:
            decision.open("members", "workers")[worker] = evolve(known, holdings=held)


def unfit(decision: Decision, worker: WorkerId, why: str) -> None:
    """Marks a worker that cannot take part any more; it is replaced once the generation is settled."""
    decision.open("members", "workers")[worker] = evolve(decision.run.workers[worker], unfit=why)


# ---- keepers


def keeper_up(decision: Decision, event: KeeperUp) -> None:
    cluster, hosts, node = decision.run.cluster, decision.run.copies.hosts, event.node
    if node not in cluster.keepers:
        decision.know(
            "cluster", keepers=tuple(sorted((*cluster.keepers, node))), nodes={**cluster.nodes, node: True}
        )
    known = hosts.get(node, Host())
    if node not in hosts or (known.address, known.zone) != (event.address, event.zone):
        decision.know("copies", hosts={**hosts, node: replace(known, address=event.address, zone=event.zone)})


def is_known(run: RunState, node: NodeId) -> bool:
    """Returns whether the run knows ``node``, or has a keeper, copies, a stay or a notice of it."""
    cluster = run.cluster
    known = (cluster.nodes, cluster.keepers, run.copies.hosts, cluster.homes, cluster.notices)
    return any(node in each for each in known)


def keeper_lost(decision: Decision, node: NodeId, *, with_its_node: bool = False) -> None:
    """Removes a keeper that is gone, with all copies in its memory, including those that it had not uploaded
    yet.
    """
    saves.without_keepers(decision, (node,))
    run = decision.run
    decision.know("cluster", keepers=tuple(keeper for keeper in run.cluster.keepers if keeper != node))
    decision.know(
        "copies", hosts={keeper: host for keeper, host in run.copies.hosts.items() if keeper != node}
    )
    decision.know(watch=forgotten(run.watch, node))
    _note_leaving(decision, node, surely=with_its_node)


def _note_leaving(decision: Decision, node: NodeId, *, surely: bool = False) -> None:
    """Notes that a node without workers and keeper has left.  The length of its machine's stay predicts the
    next stay.
    """
    run, cluster = decision.run, decision.run.cluster
    alone = node not in cluster.keepers and all(known.node != node for known in run.workers.values())
    left = surely or (alone and cluster.nodes.get(node, True))
    if left and (home := cluster.homes.get(node)) is not None:
        stayed_s, machines = decision.now - home.since, len(cluster.homes)
        stays = growth.after_leaving(cluster.stays, home.host, stayed_s, machines)
        decision.know(
            "cluster",
            stays=stays,
            homes={each: known for each, known in cluster.homes.items() if each != node},
        )
