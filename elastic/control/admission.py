"""Admission decides which events count, and which workers and nodes may take part.

Worlds are numbered.  An event is refused if it carries an older number, or if its sender was lost or
expelled.  A worker must have the build that the job was checked with.  With ``reproducible`` it must also be
of the same kind as the others.  The node of a worker that does not fit is refused together with the worker.
"""

from __future__ import annotations

from elastic.control import growth, membership
from elastic.control.decision import Decision, names
from elastic.control.liveness import averaged
from elastic.control.run import Home, Refusal, RunState, Stopping, Worker
from elastic.ids import NodeId, WorkerId
from elastic.plan.placement import same_classes
from elastic.protocol.actions import Kill
from elastic.protocol.builds import difference
from elastic.protocol.events import (
    ASKED_EARLY,
    Broken,
    Ends,
    Event,
    Fenced,
    Here,
    Joined,
    NodeRefused,
    Ready,
    Renewed,
    StepDone,
)

ANY_NODE = NodeId("")
"""Stands for all nodes in ``Cluster.replaced`` if a member of earlier worlds reports that a world did not
form.
"""
OfAGeneration = Here | Ready | StepDone | Ends | Renewed | Broken | Fenced

# ---- events


def refusal(run: RunState, event: Event, now: float) -> str | None:
    """Returns the reason why ``event`` changes nothing, or None if it counts."""
    if run.over:
        return f"the run is over ({type(run.state).__name__})"
    if not isinstance(event, OfAGeneration) or (isinstance(event, Fenced) and _left_out(run, event, now)):
        return None
    return _out_of_date(run, event)


def _left_out(run: RunState, event: Fenced, now: float) -> bool:
    """Returns whether this is a fence reply from a worker outside the current plan, and the journal may not
    say why it was left out.

    A coordinator that was cut off may have expelled the worker and then died.  The worker applies nothing any
    more, so what it holds counts.
    """
    if (
        now >= run.takeover.blind_until
        or not isinstance(run.state, Stopping)
        or event.generation >= run.generation
    ):
        return False
    return event.worker in run.workers and event.worker not in run.state.plan.ranks


def _out_of_date(run: RunState, event: OfAGeneration) -> str | None:
    what = f"{type(event).__name__} of {event.worker}"
    if event.generation != run.generation:
        return f"{what} is of generation {event.generation}, but the run is at generation {run.generation}"
    if run.plan is None:
        return f"{what} came too late: generation {event.generation} is settled"
    if event.worker not in run.plan.ranks:
        return f"{what}, which is not a member of generation {event.generation}"
    if event.worker not in run.workers and not _evidence_of_the_dead(run, event):
        return f"{what}, which is lost or expelled"
    return None


def _evidence_of_the_dead(run: RunState, event: OfAGeneration) -> bool:
    """Returns whether the event of a dead worker still counts.

    A commit that was reported before the reporter died is a fact; an expelled worker may still live and say
    more.
    """
    return (
        isinstance(event, StepDone | Fenced)
        and isinstance(run.state, Stopping)
        and event.worker not in run.state.expelled
    )


# ---- workers


def joined(decision: Decision, event: Joined) -> None:
    run = decision.run
    if event.worker in run.workers:
        return decision.refuse(f"{event.worker} has joined already")
    if event.worker not in run.members.starting:
        decision.do(Kill((event.worker,), "nobody waits for it"))
        if membership.number_of(event.worker) < run.members.next_worker:
            return decision.refuse(f"{event.worker} was not started by this run, or joined too late")
        # another coordinator has given this name to the worker
        decision.know("members", next_worker=membership.number_of(event.worker) + 1)
        return decision.say(
            f"{event.worker} was started by an earlier coordinator; it is ended, and its name is not "
            "used again"
        )
    took_s = decision.now - run.members.starting[event.worker]
    membership.no_longer_starting(decision, event.worker)
    decision.know("watch", start_s=averaged(run.watch.start_s, took_s))
    if (misfit := _misfit(decision, event)) is not None:
        why, shared = misfit
        decision.do(Kill((event.worker,), "its node is refused"))
        said = f"{_called(event.worker, event.node, event.build.host)} cannot be a member: {why}"
        return refuse_node(decision, event.node, said, shared, by_job=shared)
    if (other := _on_its_device(decision, event)) is not None:
        decision.do(Kill((event.worker,), "another worker has its device"))
        both = (
            f"{_called(event.worker, event.node, event.build.host)} and {other} compute on one device "
            f"({event.device}); {ASKED_EARLY}"
        )
        decision.say(both)
        return replaced(decision, event.node, (event.worker,), both)
    latest = next(reversed(run.workers.values()), None) if run.workers else None
    newcomer = Worker(
        event.node,
        event.kind,
        decision.now,
        host=event.build.host,
        least_shard=event.least_shard,
        states=event.states,
        least_whole=event.least_whole,
        device=event.device,
    )
    decision.open("members", "workers")[event.worker] = newcomer
    if event.device:
        decision.devices[event.node, event.device] = event.worker
    decision.know("members", classes=event.classes, class_bytes=event.class_bytes)
    if event.node not in run.cluster.homes:
        decision.open("cluster", "homes")[event.node] = Home(growth.host_of(newcomer), decision.now)
    decision.say(f"{event.worker} joined on node {event.node[:8]}")
    known = latest.least_shard if latest is not None else decision.rules.layout.min_parts
    if event.least_shard > known and decision.rules.layout.shards is None:
        decision.say(
            f"the memory of its device requires that {event.least_shard} or more workers share the state"
        )
    if (
        event.states
        and event.states < decision.rules.max_workers
        and (latest is None or latest.states != event.states)
    ):
        decision.say(
            f"its node has memory for the copies of {event.states:.3g} workers; if it has more "
            "workers, they share the state"
        )


def _on_its_device(decision: Decision, event: Joined) -> WorkerId | None:
    """Returns another worker of the node that computes on the same device: NCCL forms no world with both."""
    other = decision.devices.get((event.node, event.device)) if event.device else None
    return other if other in decision.run.workers else None


def _misfit(decision: Decision, event: Joined) -> tuple[str, bool] | None:
    """Returns why the worker cannot be a member, and whether the reason is that it sees other data; None if
    it can be one.
    """
    run, rules = decision.run, decision.rules
    differs = difference(event.build, run.members.reference, rules.reproducible)
    if event.node in run.cluster.refused:
        return run.cluster.refused[event.node].why, False
    if differs is not None:
        return differs.sentence, differs.part in ("data", "held_out")
    if rules.reproducible and run.members.kind not in ("", event.kind):
        return _of_another_kind(event.kind, run.members.kind), False
    if run.members.classes and not same_classes(event.classes, run.members.classes):
        return (
            "its model has other sizes than the models of other workers; the model must depend on "
            "model_args alone",
            False,
        )
    return None


def _of_another_kind(kind: str, others: str) -> str:
    return (
        f"it is {kind}, but the run began on {others}, and only that kind gives equal bits; use "
        "machines of one kind, or set reproducible = false"
    )


def _called(worker: WorkerId, node: NodeId, host: str) -> str:
    return f"{worker} on node {node[:8]}{f' ({host})' if host else ''}"


def refuse_other_kinds(decision: Decision) -> None:
    """Expels workers whose kind differs from the first world's kind, which all members must have.  Other
    workers take their places.
    """
    run = decision.run
    for worker, known in run.workers.items():
        if decision.rules.reproducible and known.kind != run.members.kind and not known.unfit:
            membership.expel(decision, (worker,), "its node is refused")
            why = _of_another_kind(known.kind, run.members.kind)
            refuse_node(
                decision, known.node, f"{_called(worker, known.node, known.host)} cannot be a member: {why}"
            )


# ---- nodes


def node_found(decision: Decision, node: NodeId) -> None:
    """Notes a new node.  A node whose keeper is started again is not new: its workers were members and stay
    members.
    """
    if node not in decision.run.cluster.nodes:
        decision.know("cluster", nodes={**decision.run.cluster.nodes, node: False})


def gone(decision: Decision, node: NodeId) -> None:
    """Forgets a node whose machine is gone: no node has its id again, and a run may see thousands in a month.

    As long as no world was formed, the refusals stay: a run that cannot begin ends with their reasons.
    """
    run, cluster = decision.run, decision.run.cluster
    if node in cluster.nodes:
        decision.know("cluster", nodes={each: up for each, up in cluster.nodes.items() if each != node})
    if run.members.seats and (node in cluster.refused or any(node == each for each, _ in cluster.replaced)):
        decision.know(
            "cluster",
            refused={each: known for each, known in cluster.refused.items() if each != node},
            replaced=tuple(each for each in cluster.replaced if each[0] != node),
        )


def note(decision: Decision, node: NodeId, occasion: int) -> None:
    """Notes an occasion on which processes of the node were replaced, once.  Of :data:`ANY_NODE` only the latest
    occasion counts.
    """
    replaced = decision.run.cluster.replaced
    if (node, occasion) not in replaced:
        others = tuple(each for each in replaced if node != ANY_NODE or each[0] != ANY_NODE)
        decision.know("cluster", replaced=(*others, (node, occasion)))


def replaced(
    decision: Decision, node: NodeId, workers: tuple[WorkerId, ...], why: str, generation: int = 0
) -> None:
    """Reports that new processes replace ``workers``, whose processes are set up wrongly; the second time,
    their node is refused.

    All replacements in one ``generation`` count once.  With ``generation`` 0 no world had to form to find the
    fault; then all workers that were asked for before the first replacement count once.
    """
    rounds = [-each for known, each in decision.run.cluster.replaced if known == node and each < 0]
    if not generation and rounds and membership.number_of(workers[0]) < max(rounds):
        generation = -max(rounds)
    note(decision, node, generation or -decision.run.members.next_worker)
    decision.know("members", start_after=decision.now + decision.rules.grow_debounce_s)
    if sum(known == node for known, _ in decision.run.cluster.replaced) > 1:
        refuse_node(decision, node, why, by_job=True)
    else:
        decision.say(f"{names(workers)} {'is' if len(workers) == 1 else 'are'} replaced")


def node_refused(decision: Decision, event: NodeRefused) -> None:
    host = decision.run.members.reference.host
    checked = f"; the job was checked on {host}" if host and host not in event.why else ""
    refuse_node(decision, event.node, f"{event.why}{checked}", event.shared, event.by_job)


def refuse_node(
    decision: Decision, node: NodeId, why: str, shared: bool = False, by_job: bool = False
) -> None:
    """Refuses the node: no worker is started there any more, and its workers are expelled if its keeper has
    not come up yet.

    The next ``Capacity`` tells how much room there is on other nodes.
    """
    run = decision.run
    unseated = (
        ()
        if run.cluster.nodes.get(node, True)
        else tuple(worker for worker, known in run.workers.items() if known.node == node)
    )
    membership.expel(decision, unseated, "its node is refused")
    if node not in run.cluster.refused:
        decision.know(
            "cluster", refused={**run.cluster.refused, node: Refusal(why, decision.now, shared, by_job)}
        )
        refused = f"node {node[:8]} is refused"
        # a fault of the job is named first, since the node is not to blame
        decision.say(f"{why}; {refused}" if by_job else f"{refused}: {why}")
    decision.know("cluster", slots=0)
    decision.know("members", start_after=decision.now + decision.rules.grow_debounce_s)
