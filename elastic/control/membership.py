"""Which workers and keepers there are.  Ids are chosen here and never used again, so a word of the dead is known as such."""

from __future__ import annotations

from dataclasses import replace

from elastic.control import checkpoints, growth, saving
from elastic.control.decision import Decision, count, names
from elastic.control.liveness import forgotten, silent
from elastic.control.states import Finishing, Home, Host, Refusal, Worker
from elastic.ids import NodeId, WorkerId
from elastic.plan.placement import same_classes
from elastic.plan.transfer import Holding
from elastic.protocol.actions import Kill, StartWorkers
from elastic.protocol.builds import difference
from elastic.protocol.events import Capacity, Joined, KeeperUp, NodeRefused, StartFailed


def joined(decision: Decision, event: Joined) -> None:
    run = decision.run
    if event.worker in run.workers:
        return decision.refuse(f"{event.worker} has joined already")
    if event.worker not in run.starting:
        decision.do(Kill((event.worker,), "nobody waits for it"))
        if number_of(event.worker) < run.next_worker:
            return decision.refuse(f"nobody waits for {event.worker}")
        decision.know(next_worker=number_of(event.worker) + 1)  # another coordinator has given it its name
        return decision.say(f"nobody waits for {event.worker}, and nobody else shall have its name")
    _start_is_over(decision, event.worker)
    if (misfit := _misfit(decision, event)) is not None:
        why, shared = misfit
        decision.do(Kill((event.worker,), "its node is refused"))
        return refuse_node(decision, event.node, f"{_called(event.worker, event.node, event.build.host)} cannot be a member: {why}", shared)
    newcomer = Worker(event.node, event.kind, decision.now, host=event.build.host)
    home = run.homes.get(event.node, Home(growth.host_of(newcomer), decision.now))
    decision.know(workers={**run.workers, event.worker: newcomer}, homes={**run.homes, event.node: home})
    decision.know(classes=event.classes)
    decision.say(f"{event.worker} joined on node {event.node[:8]}")


def _misfit(decision: Decision, event: Joined) -> tuple[str, bool] | None:
    """Why it cannot be a member, and whether because it does not see the same data."""
    run, rules = decision.run, decision.rules
    differs = difference(event.build, run.reference, rules.reproducible)
    if event.node in run.refused:
        return run.refused[event.node].why, False
    if differs is not None:
        return differs.sentence, differs.part == "data"
    if rules.reproducible and run.kind not in ("", event.kind):
        return _of_another_kind(event.kind, run.kind), False
    if run.classes and not same_classes(event.classes, run.classes):
        return "its model has other sizes than the others'; the model must be a function of model_args alone", False
    return None


def _of_another_kind(kind: str, others: str) -> str:
    return f"it is {kind}, and only {others} gives equal bits; use machines of one kind, or set reproducible = false"


def _called(worker: WorkerId, node: NodeId, host: str) -> str:
    return f"{worker} on node {node[:8]}{f' ({host})' if host else ''}"


def refuse_other_kinds(decision: Decision) -> None:
    """The first world has decided what all are to be: whoever is of another kind gives its place to others."""
    run = decision.run
    for worker, known in run.workers.items():
        if decision.rules.reproducible and known.kind != run.kind and not known.unfit:
            expel(decision, (worker,), "its node is refused")
            why = _of_another_kind(known.kind, run.kind)
            refuse_node(decision, known.node, f"{_called(worker, known.node, known.host)} cannot be a member: {why}")


def node_found(decision: Decision, node: NodeId) -> None:
    """A keeper that is started again finds nothing new: its workers were members, and stay so."""
    if node not in decision.run.nodes:
        decision.know(nodes={**decision.run.nodes, node: False})


def node_refused(decision: Decision, event: NodeRefused) -> None:
    host = decision.run.reference.host
    checked = f"; the job was checked on {host}" if host and host not in event.why else ""
    refuse_node(decision, event.node, f"{event.why}{checked}", event.shared)


def refuse_node(decision: Decision, node: NodeId, why: str, shared: bool = False) -> None:
    """No worker is started there any more, and none stays that waits to be seated.  What room is elsewhere, ``Capacity`` will say."""
    run = decision.run
    unseated = () if run.nodes.get(node, True) else tuple(worker for worker, known in run.workers.items() if known.node == node)
    expel(decision, unseated, "its node is refused")
    if node not in run.refused:
        decision.know(refused={**run.refused, node: Refusal(why, decision.now, shared)})
        decision.say(f"node {node[:8]} is refused: {why}")
    decision.know(slots=0, start_after=decision.now + decision.rules.grow_debounce_s)


def start_failed(decision: Decision, event: StartFailed) -> None:
    """Its place among the workers is free again; the next attempt waits a little, so that a storm of failures does not spin."""
    if event.worker not in decision.run.starting:
        return decision.refuse(f"{event.worker} is not being started")
    _start_is_over(decision, event.worker)
    decision.do(Kill((event.worker,), "it did not start"))
    decision.know(start_after=decision.now + decision.rules.grow_debounce_s)
    decision.say(f"{event.worker} did not start ({event.reason})")


def _start_is_over(decision: Decision, worker: WorkerId) -> None:
    decision.know(starting={each: asked_at for each, asked_at in decision.run.starting.items() if each != worker})


def capacity(decision: Decision, event: Capacity) -> None:
    """Room is free for nobody twice: a worker that is on its way, and has not taken its place yet, will."""
    coming = 0 if event.placed is None else len(decision.run.starting.keys() - frozenset(event.placed))
    decision.know(slots=max(0, event.slots - coming))


def start_workers(decision: Decision) -> None:
    """Ask for as many as the cluster has room for, up to the maximum and its spares; forget those that do not come."""
    run, rules = decision.run, decision.rules
    late = tuple(worker for worker, asked_at in run.starting.items() if decision.now - asked_at >= rules.form_s)
    for worker in late:
        _start_is_over(decision, worker)
    if late:
        decision.do(Kill(late, f"not there {rules.form_s:g} s after it was asked for"))
        decision.say(f"{names(late)} did not join within {rules.form_s:g} s")
    number = min(run.slots, rules.max_workers + rules.spares - len(run.workers) - len(decision.run.starting))
    if number <= 0 or run.stop or decision.now < run.start_after or isinstance(run.state, Finishing):
        return
    new = tuple(WorkerId(f"w{run.next_worker + i}") for i in range(number))
    spares = count(rules.spares, "spare")
    asked = {**decision.run.starting, **dict.fromkeys(new, decision.now)}
    decision.know(starting=asked, slots=run.slots - number, next_worker=run.next_worker + number)
    avoid = (*run.refused, *silent(run.watch, run.keepers, decision.now, rules.silence_s, rules.silence_s))
    decision.do(StartWorkers(new, tuple(dict.fromkeys(avoid))))
    decision.say(
        f"start {names(new)}: {count(len(run.workers), 'worker')} of at most {rules.max_workers}{f' and {spares}' if rules.spares else ''}"
    )


def number_of(worker: WorkerId) -> int:
    """Workers are numbered in the order in which they were asked for."""
    return int(worker.lstrip("w")) if worker.lstrip("w").isdigit() else 0


def remove(decision: Decision, workers: tuple[WorkerId, ...]) -> None:
    """They are no part of the run any more.  What they copied is with their keepers."""
    gone = frozenset(workers)
    nodes = dict.fromkeys(known.node for worker, known in decision.run.workers.items() if worker in gone)
    kept = {worker: known for worker, known in decision.run.workers.items() if worker not in gone}
    decision.know(workers=kept, saves=saving.survivors(decision.run.saves, workers))
    for node in nodes:
        _note_leaving(decision, node)


def expel(decision: Decision, workers: tuple[WorkerId, ...], why: str, *, examine: bool = False) -> None:
    """End them.  A kill is a wish: whatever they say from now on is refused.  ``examine``: because they stand still."""
    if workers:
        decision.do(Kill(workers, why, examine))
        remove(decision, workers)


def hold(decision: Decision, holdings: dict[WorkerId, tuple[Holding, ...]]) -> None:
    """What those workers hold, as far as they are still here."""
    known = decision.run.workers
    new = {w: replace(known[w], holdings=held) for w, held in holdings.items() if w in known and known[w].holdings != held}
    if new:
        decision.know(workers={**known, **new})


def unfit(decision: Decision, worker: WorkerId, why: str) -> None:
    """It can take part no more, and is replaced once the generation is settled."""
    decision.know(workers={**decision.run.workers, worker: replace(decision.run.workers[worker], unfit=why)})


def keeper_up(decision: Decision, event: KeeperUp) -> None:
    run, node = decision.run, event.node
    if node not in run.keepers:
        decision.know(keepers=tuple(sorted((*run.keepers, node))), nodes={**run.nodes, node: True})
    known = run.hosts.get(node, Host())
    if node not in run.hosts or (known.address, known.zone) != (event.address, event.zone):
        decision.know(hosts={**run.hosts, node: replace(known, address=event.address, zone=event.zone)})


def keeper_lost(decision: Decision, node: NodeId, *, with_its_node: bool = False) -> None:
    """And all copies in its memory, also those that it had still to upload."""
    checkpoints.without_keeper(decision, node)
    run = decision.run
    decision.know(keepers=tuple(keeper for keeper in run.keepers if keeper != node))
    decision.know(hosts={keeper: host for keeper, host in run.hosts.items() if keeper != node})
    decision.know(watch=forgotten(run.watch, node))
    _note_leaving(decision, node, surely=with_its_node)


def _note_leaving(decision: Decision, node: NodeId, *, surely: bool = False) -> None:
    """A node of whose workers and keeper none is left has left; how long its machine stayed tells how long it will the next time."""
    run = decision.run
    empty = run.nodes.get(node, True) and node not in run.keepers and all(known.node != node for known in run.workers.values())
    if (surely or empty) and (home := run.homes.get(node)) is not None:
        stays = growth.after_leaving(run.stays, home.host, decision.now - home.since)
        decision.know(stays=stays, homes={each: known for each, known in run.homes.items() if each != node})
