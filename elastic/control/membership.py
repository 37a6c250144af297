"""Which workers and keepers there are.  Ids are chosen here and never used again, so a message of a dead worker is known as such."""

from __future__ import annotations

from dataclasses import replace

from elastic.control import growth, saves
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import forgotten, silent
from elastic.control.run import Finishing, Host
from elastic.ids import NodeId, WorkerId
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Kill, StartWorkers
from elastic.protocol.events import Capacity, KeeperUp, StartFailed

# ---- workers that are started


def start_failed(decision: Decision, event: StartFailed) -> None:
    """The worker's place is free again; the next attempt waits a little, so that a storm of failures does not spin."""
    if event.worker not in decision.run.members.starting:
        return decision.refuse(f"{event.worker} is not being started")
    decision.know(members=decision.run.members.without_starting(event.worker))
    decision.do(Kill((event.worker,), "it did not start"))
    decision.know("members", start_after=decision.now + decision.rules.grow_debounce_s)
    decision.say(f"{event.worker} did not start ({event.reason})")


def capacity(decision: Decision, event: Capacity) -> None:
    """Room is not given away twice: a worker that is on its way and has not taken its place yet will take it."""
    coming = 0 if event.placed is None else len(decision.run.members.starting.keys() - frozenset(event.placed))
    decision.know("cluster", slots=max(0, event.slots - coming))


def start_workers(decision: Decision) -> None:
    """Asks for as many workers as the cluster has room for, up to the maximum and its spares."""
    _forget_the_late(decision)
    run, rules = decision.run, decision.rules
    starting = run.members.starting
    number = min(run.cluster.slots, rules.max_workers + rules.spares - len(run.workers) - len(starting))
    if number <= 0 or run.stop or decision.now < run.members.start_after or isinstance(run.state, Finishing):
        return
    new = tuple(WorkerId(f"w{run.members.next_worker + i}") for i in range(number))
    spares = count(rules.spares, "spare")
    asked = {**starting, **dict.fromkeys(new, decision.now)}
    decision.know("members", starting=asked, next_worker=run.members.next_worker + number)
    decision.know("cluster", slots=run.cluster.slots - number)
    avoid = (*run.cluster.refused, *silent(run.watch, run.cluster.keepers, decision.now, rules.silence_s, rules.silence_s))
    decision.do(StartWorkers(new, tuple(dict.fromkeys(avoid))))
    decision.say(
        f"start {names(new)}: {count(len(run.workers), 'worker')} of at most {rules.max_workers}{f' and {spares}' if rules.spares else ''}"
    )


def _forget_the_late(decision: Decision) -> None:
    """Workers that have not joined in time are not waited for any more."""
    form_s = decision.rules.form_s
    late = tuple(worker for worker, asked_at in decision.run.members.starting.items() if decision.now - asked_at >= form_s)
    for worker in late:
        decision.know(members=decision.run.members.without_starting(worker))
    if late:
        decision.do(Kill(late, f"not there {form_s:g} s after it was asked for"))
        decision.say(f"{names(late)} did not join within {form_s:g} s")


def number_of(worker: WorkerId) -> int:
    """Returns the worker's number: workers are numbered in the order in which they were asked for."""
    return int(worker.lstrip("w")) if worker.lstrip("w").isdigit() else 0


# ---- workers that joined


def remove(decision: Decision, workers: tuple[WorkerId, ...]) -> None:
    """The workers are no part of the run any more.  What they copied is with their keepers."""
    gone = frozenset(workers)
    nodes = dict.fromkeys(known.node for worker, known in decision.run.workers.items() if worker in gone)
    decision.know(members=decision.run.members.without(gone), saves=saves.survivors(decision.run.saves, gone))
    for node in nodes:
        _note_leaving(decision, node)


def expel(decision: Decision, workers: tuple[WorkerId, ...], why: str, *, examine: bool = False) -> None:
    """Ends the workers.  A kill is a wish: whatever they say from now on is refused.

    ``examine``: they stand still, so it is found out where before they end.
    """
    if workers:
        decision.do(Kill(workers, why, examine))
        remove(decision, workers)


def hold(decision: Decision, holdings: dict[WorkerId, tuple[Holding, ...]]) -> None:
    """Those of the named workers that are still here hold what ``holdings`` says."""
    members = decision.run.members.holding(holdings)
    if members is not decision.run.members:
        decision.know(members=members)


def unfit(decision: Decision, worker: WorkerId, why: str) -> None:
    """The worker can take part no more; it is replaced once the generation is settled."""
    workers = decision.run.workers
    decision.know("members", workers={**workers, worker: replace(workers[worker], unfit=why)})


# ---- keepers


def keeper_up(decision: Decision, event: KeeperUp) -> None:
    cluster, hosts, node = decision.run.cluster, decision.run.copies.hosts, event.node
    if node not in cluster.keepers:
        decision.know("cluster", keepers=tuple(sorted((*cluster.keepers, node))), nodes={**cluster.nodes, node: True})
    known = hosts.get(node, Host())
    if node not in hosts or (known.address, known.zone) != (event.address, event.zone):
        decision.know("copies", hosts={**hosts, node: replace(known, address=event.address, zone=event.zone)})


def keeper_lost(decision: Decision, node: NodeId, *, with_its_node: bool = False) -> None:
    """The keeper is gone, and all copies in its memory with it, also those that it had still to upload."""
    saves.without_keeper(decision, node)
    run = decision.run
    decision.know("cluster", keepers=tuple(keeper for keeper in run.cluster.keepers if keeper != node))
    decision.know("copies", hosts={keeper: host for keeper, host in run.copies.hosts.items() if keeper != node})
    decision.know(watch=forgotten(run.watch, node))
    _note_leaving(decision, node, surely=with_its_node)


def _note_leaving(decision: Decision, node: NodeId, *, surely: bool = False) -> None:
    """A node without workers and keeper has left; how long its machine stayed tells how long it will stay the next time."""
    run, cluster = decision.run, decision.run.cluster
    alone = node not in cluster.keepers and all(known.node != node for known in run.workers.values())
    left = surely or (alone and cluster.nodes.get(node, True))
    if left and (home := cluster.homes.get(node)) is not None:
        stays = growth.after_leaving(cluster.stays, home.host, decision.now - home.since)
        decision.know("cluster", stays=stays, homes={each: known for each, known in cluster.homes.items() if each != node})
