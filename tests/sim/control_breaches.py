"""The broken rules of elastic.control, by families: which generations there are, what became of a step, and
what is kept of it.
"""

from __future__ import annotations

from elastic.sim import coordinators
from elastic.sim.worker import Worker
from tests.sim.mutants import FOLLOWED, GIVEN_UP, OVERWRITTEN, TWICE, Breach, Edit

UNANSWERED = "has neither answered its fence nor been expelled"
RUNS = "nobody is out and a lease runs"
HAPPENED = "is not what happened"
HELD = "although every slice of it is held"
ROOM = "gets more of the state than it has room for"
ON_ITS_WAY = "has been on its way for"
COVERED = "live = newest_covered(held, run.members.classes)"
JOURNALED = "Form | Go | Settle | StartWorkers"
ABORTS = "__import__('elastic.protocol.actions', fromlist=['Settle']).Settle(plan.generation, pending, None)"
FENCES = (
    '    if pending:\n        decision.do(Fence(plan.generation, pending))\n    decision.say(f"{cause}: stop'
)
EVIDENCE = "settle(plan, answers, newest((run.history.last,), plan.generation))"
NEXT_STEP = (
    "run.history.last and __import__('dataclasses').replace(run.history.last, step=run.history.last.step + 1)"
)
RETAINS = "    if decision.rules.keep.last:\n        retain(decision)\n"
SAID_FAILED = '    decision.say(f"the checkpoint of {version} failed'
UNREPORTED = "version.generation == run.copies.unreported > 0 and version.step > run.step"
GUESSED = (
    "lineage.extended(run.history.lineage, plan.version) if plan.version > run.version else plan.lineage"
)

CONTROL: dict[str, tuple[Breach, ...]] = {
    # The coordinator forms the next world once everybody of the last one has answered its fence or is
    # expelled.
    "the coordinator's fence": (
        Breach(
            "it does not wait for the answers to the fence",
            UNANSWERED,
            ("drawn", 42),
            Edit(
                "stopping",
                "if state.pending or not _certain(decision, state)",
                "if not _certain(decision, state)",
            ),
        ),
        Breach(
            "it takes answers to older fences",
            UNANSWERED,
            ("drawn", 0),
            Edit(
                "admission",
                "if event.generation != run.generation:",
                "if event.generation > run.generation:",
            ),
            Edit("stopping", "if event.generation < state.plan.generation:", "if False:"),
        ),
        Breach(
            "it aborts before the fence",
            UNANSWERED,
            ("drawn", 42),
            Edit(
                "edges",
                FENCES,
                FENCES.replace("decision.do(Fence", f"decision.do({ABORTS})\n        decision.do(Fence"),
            ),
        ),
        Breach(
            "it does not tell a later world that a loop has ended the run",
            "which nobody committed",
            ("drawn", 4678),
            Edit("seating", "ends=run.enough,", "ends=0,"),
        ),
        Breach(
            "it leaves a world unsettled",
            "was not settled",
            ("drawn", 0),
            Edit(
                "stopping",
                "        decision.do(Settle(plan.generation, survivors, settlement.outcome))",
                "        pass",
            ),
        ),
        Breach(
            "it never expels the silent",
            "no end after",
            ("drawn", 18),
            Edit("stopping", "if state.pending and decision.due(state.deadline):", "if False:"),
        ),
        Breach(
            "members that said Here are blamed for those that did not",
            "said Here and is expelled",
            ("drawn", 8),
            Edit("forming", "        _note(decision, state, event.worker, ready=False)", "        pass"),
        ),
        Breach(
            "it fails with its budget unspent",
            "budget unspent",
            ("poor", 11),
            Edit("commits", "furthest=version, fruitless=0", "furthest=version"),
        ),
    ),
    # Where nobody answers, leases keep two worlds apart: the coordinator waits until they have run out.
    "leases, as the coordinator counts them": (
        Breach(
            "those of a silent world are forgotten",
            RUNS,
            ("isolation", 40),
            Edit(
                "stopping", "bool(state.answers or state.lost) or decision.due(run.watch.lease_until)", "True"
            ),
        ),
        # The rule is kept for the first loss that is heard of, and for later ones.
        Breach(
            "a node that is cut off is taken for a dead one",
            RUNS,
            ("isolation", 40),
            Edit("stopping", "expelled=() if certain else members", "expelled=()"),
            Edit("stopping", "        if certain:\n", "        if True:\n"),
        ),
        Breach(
            "a member's clock is never slower",
            RUNS,
            ("skewed", 5),
            Edit(
                "machine",
                "decision.now + decision.rules.lease_over_s",
                "decision.now + decision.rules.lease_s",
            ),
        ),
        Breach(
            "they are too short",
            RUNS,
            ("isolation", 5),
            Edit(
                "machine",
                "decision.now + decision.rules.lease_over_s",
                "decision.now + 0.5 * decision.rules.lease_s",
            ),
        ),
        Breach(
            "those that a dead coordinator granted are forgotten",
            RUNS,
            ("isolated_interregnum", 2),
            Edit(
                "takeover",
                "        now + rules.coordinator_lease_over_s + rules.lease_over_s\n",
                "        0.0\n",
            ),
        ),
        Breach(
            "those of an unknown world are forgotten",
            RUNS,
            ("abandoned", 41),
            Edit(
                "takeover",
                "skipped = decision.now + decision.rules.lease_over_s, UNREAD",
                "skipped = 0.0, UNREAD",
            ),
        ),
    ),
    # A step is settled by what is known of it: as committed if anybody saw that, as dropped if nobody can
    # have.
    "evidence": (
        Breach(
            "a step is dropped in spite of evidence",
            "is dropped in spite of evidence",
            ("drawn", 14),
            Edit("stopping", "newest((run.history.last,), plan.generation)", "None"),
        ),
        Breach(
            "the commit of the step before is taken for that of the prepared step",
            "evidence",
            ("drawn", 8),
            Edit("stopping", EVIDENCE, f"settle(plan, answers, {NEXT_STEP})"),
        ),
        # Members remember such a commit, and say so in their answers.
        Breach(
            "a commit of the world before counts",
            HAPPENED,
            ("drawn", 8),
            Edit("commits", "    if outcome.generation != plan.generation:\n        return\n", ""),
        ),
        Breach(
            "the lineage is not cut",
            HAPPENED,
            ("drawn", 33),
            Edit("edges", "lineage=plan.lineage,\n", "lineage=line,\n"),
        ),
        # The steps since the journal's end are taken for those of the generation that committed the plan's
        # version.
        Breach(
            "the committed steps of a generation that no journal tells of are guessed",
            HAPPENED,
            ("unshipped", 1),
            Edit("edges", "lineage=plan.lineage, saved=saved", f"lineage={GUESSED}, saved=saved"),
        ),
    ),
    # The next world begins with the newest version of which every slice is held, and where there is room for
    # it.
    "seating": (
        Breach(
            "a node's copies need no room",
            ROOM,
            ("drawn", 42),
            Edit(
                "seating",
                "at_least(max(least_shard(members, there), copied))",
                "at_least(least_shard(members, there))",
            ),
        ),
        Breach(
            "a version that is held in part is taken",
            "which nobody holds whole",
            ("drawn", 0),
            Edit("seating", COVERED, "live = max((each.version for each in held), default=None)"),
        ),
        Breach("what is still held is given up", HELD, ("drawn", 0), Edit("seating", COVERED, "live = None")),
        Breach(
            "a copy spares no holder",
            HELD,
            ("drawn", 297_461),
            Edit("seating", "(held, both) if kept else (held,)", "(held,)"),
        ),
        Breach(
            "versions are mixed",
            "and its holders hold",
            ("drawn", 8),
            Edit("seating", "tuple(each for each in holders if each.version == version)", "tuple(holders)"),
        ),
        Breach(
            "what needs room is rounded down",
            ROOM,
            ("drawn", 42),
            Edit("seating", "ceil(number / room[node])", "int(number / room[node])"),
        ),
    ),
    # The next coordinator knows all that the one before has acted on.
    "the journal": (
        Breach(
            "it has no generations",
            f"{FOLLOWED} Form(",
            ("interregnum", 17),
            Edit("decision", JOURNALED, "Go | Settle | StartWorkers"),
        ),
        Breach(
            "it has no outcomes",
            f"{FOLLOWED} Settle(",
            ("interregnum", 69),
            Edit("decision", JOURNALED, "Form | Go | StartWorkers"),
        ),
        # Names are durable before there are processes of that name, and a stranger's name is passed over.
        Breach(
            "it has no names",
            TWICE,
            ("usurpers", 0),
            Edit("decision", JOURNALED, "Form | Go | Settle"),
            Edit(
                "admission",
                '        decision.know("members", next_worker=membership.number_of(event.worker) + 1)\n',
                "",
            ),
        ),
        Breach(
            "it has no checkpoints",
            HELD,
            ("interregnum", 946),
            Edit("saves", f"    decision.durable = True\n{RETAINS}", RETAINS),
        ),
        Breach(
            "what was folded from it is thrown away",
            HAPPENED,
            ("interregnum", 16),
            Edit(
                "takeover",
                "    _say_again(decision)\n",
                '    decision.know("history", lineage=())\n    _say_again(decision)\n',
            ),
        ),
        Breach(
            "a number that may be taken is taken",
            "is begun twice",
            ("severed", 18),
            Edit("takeover", "UNREAD = 100\n", "UNREAD = 0\n"),
        ),
    ),
    # A member that a world left out, since it was out of reach, may hold what the next world needs.
    "who was left out": (
        Breach(
            "who was out of reach at the takeover is not asked again",
            HELD,
            ("left_out", 834),
            Edit("takeover", "event.worker in run.state.pending", "False"),
        ),
        Breach(
            "whom the last generation left out is not heard",
            HELD,
            ("left_out", 143),
            Edit("admission", "isinstance(event, Fenced) and _left_out(run, event, now)", "False"),
        ),
        # Such a member was expelled before the fence reached it, lives on, and is heard after a member of the
        # later generation.
        Breach(
            "whom a later generation left out is not fenced",
            HELD,
            ("left_out", 573),
            Edit("takeover", "        elif event.worker not in run.state.plan.ranks:", "        elif False:"),
        ),
    ),
    # What is on its way to the bucket is not overwritten, and a run that ends waits for it, but not in vain.
    "saves": (
        # Its copies are overwritten, and the next coordinator waits for them.
        Breach(
            "a save is given up before that is durable",
            OVERWRITTEN,
            ("interregnum", 117),
            Edit("saves", f"        decision.durable = True\n{SAID_FAILED}", SAID_FAILED),
        ),
        # The rule is kept by the lineage, and by what was asked for.
        Breach(
            "a zombie's manifest counts",
            "given up",
            ("drawn", 2072),
            Edit("saves", "if not run.history.contains(version):", "if False:"),
            Edit("saves", "if known is None or not known.asked:", "if False:"),
        ),
        Breach(
            "a part that is being written does not count",
            "does not wait for its last save",
            ("widowed", 3),
            Edit(
                "saves",
                "return max(deadline, run.watch.uploaded_at + rules.stop_s, *until)",
                "return max(deadline, deadline, *until)",
            ),
        ),
        # If nothing but saves is copied, the end then waits for the last save anew.
        Breach(
            "the last save does not wait for the slot of the one before",
            "does not wait for its last save",
            ("last_minute", 2278),
            Edit("saves", "    if version != decision.run.version:", "    if False:"),
        ),
        Breach(
            "a bucket that is down at the end is not waited for",
            "does not wait for the bucket",
            ("outage", 3),
            Edit(
                "saves",
                "until = refused_until(rules, run.saves.pending) + manifests_until",
                "until = manifests_until",
            ),
        ),
        Breach(
            "parts that nobody can report any more are waited for",
            ON_ITS_WAY,
            ("widowed", 22),
            Edit(
                "takeover",
                "    saves.without_keepers(decision, [node for node in writers if node not in nodes])\n",
                "",
            ),
        ),
        Breach(
            "a manifest that nobody can write any more is waited for",
            ON_ITS_WAY,
            ("widowed", 12),
            Edit(
                "saves",
                "            each.asked and (each",
                "            False and (each",
            ),
        ),
        Breach(
            "a manifest that can never be written is asked for again",
            ON_ITS_WAY,
            ("widowed", 12),
            Edit("saves", "if event.again:", "if event.again or event.manifest:"),
        ),
    ),
    # The coordinator asks keepers for the copies of the dead, believes what is on the lineage, and releases
    # what nobody needs.
    "copies, as the coordinator knows them": (
        Breach(
            "nobody says what is to be protected",
            "protects None, and keepers have all of",
            ("drawn", 18),
            Edit(
                "seating", "protected=newest_covered(kept, run.members.classes) or copied", "protected=None"
            ),
        ),
        Breach(
            "keepers are not asked",
            HELD,
            ("drawn", 33),
            Edit(
                "copy_inventory", "        decision.do(ListCopies(run.generation, run.cluster.keepers))\n", ""
            ),
        ),
        Breach(
            "the answers of keepers are not waited for",
            HELD,
            ("drawn", 8),
            Edit(
                "copy_inventory",
                "    return () if decision.due(copies.answers_until) else missing",
                "    return ()",
            ),
        ),
        Breach(
            "copies are ignored",
            HELD,
            ("drawn", 33),
            Edit(
                "seating",
                "host = newest_covered([*held, *kept], run.members.classes) if kept else live",
                "host = live",
            ),
        ),
        Breach(
            "a copy that is not on the lineage is taken",
            GIVEN_UP,
            ("drawn", 21),
            Edit("copy_inventory", f"        {UNREPORTED}\n", "        True\n"),
        ),
        Breach(
            "the copies of a silent world are not believed",
            HELD,
            ("darkness", 5),
            Edit("copy_inventory", f"        {UNREPORTED}\n", "        False\n"),
        ),
        Breach(
            "copies of a step that was dropped are believed",
            GIVEN_UP,
            ("duel", 44),
            Edit("stopping", "unreported=0 if survivors else plan.generation", "unreported=plan.generation"),
        ),
        # A lost keeper's copies are forgotten, and only keepers that are there are looked at.
        Breach(
            "copies are taken from a keeper that is lost",
            "takes copies from",
            ("drawn", 23),
            Edit(
                "membership",
                "hosts={keeper: host for keeper, host in run.copies.hosts.items() if keeper != node}",
                "",
            ),
            Edit(
                "copy_inventory",
                "for node in run.cluster.keepers if node in copies.hosts and",
                "for node in copies.hosts if",
            ),
        ),
        Breach(
            "copies are released too early",
            "are freed, and",
            ("drawn", 8),
            Edit(
                "copy_inventory",
                "safe = _safe(plan, copied, buddied)",
                "safe = Version(outcome.step, outcome.generation)",
            ),
        ),
        Breach(
            "what buddies do not have yet is released",
            "and no buddy has it",
            ("drawn", 18),
            Edit("copy_inventory", "version = buddied if plan.buddy_every else copied", "version = copied"),
        ),
    ),
    # A node that will be taken is out of the world before, and nothing is lost with it.
    "notices": (
        Breach(
            "nodes leave when they are taken",
            "is in a world",
            ("noticed", 0),
            Edit("draining", "HAND_OVERS = 2\n", "HAND_OVERS = 0\n"),
        ),
        Breach(
            "a world takes groups that not all have connected",
            "has not connected",
            ("noticed", 128),
            Edit("ahead", "len(state.connected) < len(ahead.members)", "False"),
        ),
        Breach(
            "a world takes the groups of other members",
            "has not connected",
            ("drawn", 0),
            Edit(
                "ahead",
                "plan, ahead=ahead.ahead, store_node=ahead.store_node) if same",
                "plan, ahead=ahead.ahead, store_node=ahead.store_node) if True",
            ),
        ),
        Breach(
            "the time of a hand-over is not measured",
            "nothing but notices happened",
            ("noticed_by_another_clock", 24),
            Edit("stopping", "hand_over_s=averaged(known_s, took_s)", "hand_over_s=0.0"),
        ),
        Breach(
            "keepers tell deadlines by their own clocks",
            "is in a world",
            ("noticed_by_another_clock", 0),
            lambda patch: patch.setattr(coordinators, "in_time_of", lambda word, ahead_s: word),
        ),
        Breach(
            "members stop before their copies are complete",
            "is in a world",
            ("noticed", 0),
            lambda patch: patch.setattr(Worker, "_hand_over", Worker.fence),
        ),
        Breach(
            "a node that may be taken has copies of others",
            "the buddy of node",
            ("noticed", 0),
            Edit("copy_inventory", "leave = frozenset(run.cluster.notices)", "leave = frozenset[NodeId]()"),
        ),
        Breach(
            "a node that may be taken has the store",
            "the store is on node",
            ("noticed", 0),
            Edit(
                "seating",
                "            cluster.deadline(node) is not None,\n            node in cluster.notices,\n",
                "",
            ),
        ),
        Breach(
            "workers start on a node that may be taken",
            "may start on node",
            ("noticed", 0),
            Edit(
                "membership", "        *run.cluster.closed(few=len(run.workers) < rules.min_workers),\n", ""
            ),
        ),
        Breach(
            "a notice that is withdrawn still counts",
            "the run still does without it",
            ("noticed", 1),
            Edit(
                "draining",
                '    decision.say(f"node {event.node[:8]} is not taken after all',
                '    return decision.refuse(f"node {event.node[:8]} is not taken after all',
            ),
        ),
        Breach(
            "advice counts as a notice",
            "nobody says that it will be taken",
            ("noticed", 0),
            Edit("draining", "advice = isinstance(event, NodeAdvised)", "advice = False"),
        ),
        Breach(
            "advice warms no spare",
            "workers on nodes that stay, and there is room for more",
            ("noticed", 0),
            Edit(
                "membership",
                "leave = run.cluster.deadlines if few else run.cluster.notices",
                "leave = run.cluster.deadlines",
            ),
        ),
        Breach(
            "spares that were started for advice stay for ever",
            "is kept, and the run has",
            ("noticed", 0),
            Edit("membership", "    _end_surplus(decision)\n", ""),
        ),
        Breach(
            "a state that nobody was handed is left behind",
            "nothing but notices happened",
            ("drawn", 501587),
            Edit("draining", "    if newest_source(run, rest).version == newest:\n", "    if True:\n"),
        ),
        Breach(
            "a member that joins again on such a node is ended",
            "which was given up",
            ("drawn", 705045),
            Edit("machine", "if not known and event.worker in", "if event.worker in"),
        ),
        Breach(
            "a stop ends a run whose world has agreed on a boundary without a save",
            "nothing but notices happened",
            ("noticed_and_stopped", 8),
            Edit("stopping", "run.stop and not _another_world_saves(run, state)", "run.stop"),
        ),
        Breach(
            "a spare takes the seat of a member that leaves the same node",
            "nothing but notices happened",
            ("noticed_and_stopped", 13),
            Edit(
                "draining",
                "and worker not in members and",
                "and known.node not in (decision.plan.nodes if members else ()) and",
            ),
        ),
        Breach(
            "worlds that cannot do without a member stop before they step because it leaves",
            "nothing but notices happened",
            ("drawn", 503158),
            Edit("draining", "if has_all and evicting.forms_without(decision, members):", "if has_all:"),
        ),
        Breach(
            "a node is let go that is in the world",
            "is let go, and is in the world",
            ("noticed", 0),
            Edit(
                "draining",
                "[node for node in doomed if node not in seats])\n\n\ndef forget",
                "doomed)\n\n\ndef forget",
            ),
        ),
    ),
    # A worker that is slow for long is named, and may leave; nobody else does, and nothing is lost with it.
    "stragglers": (
        Breach(
            "a slow step makes a straggler",
            "is named, and was late in",
            ("straggling", 0),
            Edit("stragglers", "self.steps.bit_count() >= ENOUGH", "self.steps.bit_count() >= 1"),
        ),
        Breach(
            "nobody is a straggler",
            "and is not named",
            ("straggling", 0),
            Edit("stragglers", "if now.often and not now.named:", "if False:"),
        ),
        Breach(
            "stragglers are evicted one after the other",
            "steps after another slow one",
            ("straggling", 4),
            Edit("evicting", "if run.step < run.stragglers.free_from:", "if False:"),
        ),
        Breach(
            "a straggler is evicted although too few are left",
            "others are too few",
            ("straggling", 4),
            Edit("evicting", "if not forms_without(decision, (worker,)):", "if False:"),
        ),
        Breach(
            "a straggler is evicted although the job only reports",
            "and the job says otherwise",
            ("drawn", 600018),
            Edit("evicting", "not decision.rules.evicts or not", "not"),
        ),
        Breach(
            "a straggler leaves with what only it holds",
            "some were slow, and nothing else happened",
            ("straggling", 0),
            Edit("draining", "    if newest_source(run, rest).version == newest:\n", "    if True:\n"),
            Edit(
                "draining",
                "    return (False, True) if copied and forms else (True, False)\n",
                "    return False, False\n",
            ),
        ),
        Breach(
            "a straggler stays in the next world",
            "is in the next world",
            ("straggling", 0),
            Edit("draining", "    membership.expel(decision, evicted, evicting.SLOW)\n", ""),
        ),
    ),
    # No checkpoint is made of replicas that differ, nor of what they have computed since.
    "corruption": (
        Breach(
            "replicas are not compared",
            "is of replicas that differ",
            ("flipped", 0),
            Edit("machine", "        corruption.compare(decision)\n", ""),
        ),
        Breach(
            "a world begins with what replicas differ in",
            "and replicas of the state differed",
            ("flipped", 0),
            Edit("corruption", "trusted=trusted, dispute", "trusted=None, dispute"),
        ),
        Breach(
            "what counts again never counts",
            "although every slice of it is held",
            ("flipped", 0),
            Edit("edges", "        trusted=None,\n        fruitless", "        fruitless"),
        ),
        Breach(
            "the replica that differs stays",
            "and is a member again",
            ("flipped", 3),
            Edit("corruption", "membership.unfit(decision, vote.worker, why)", "pass"),
        ),
        Breach(
            "most replicas are called wrong",
            "is called wrong, and no bit of it flipped",
            ("flipped", 3),
            Edit(
                "corruption",
                "if right.get(vote.about, vote.digest) != vote.digest)",
                "if right.get(vote.about) == vote.digest)",
            ),
        ),
        Breach(
            "the replica that was right is called wrong",
            "is called wrong, and no bit of it flipped",
            ("flipped", 173),
            Edit("corruption", "vote.digest != right[vote.about])", "vote.digest == right[vote.about])"),
        ),
    ),
    # Whoever computes wrong gradients is found, and nobody else is; no step has them.
    "gradients": (
        Breach(
            "what is said when the step is done again counts alone",
            "and is a member again",
            ("lying", 0),
            Edit(
                "wrong_gradients",
                "known.votes if known is not None and known.step == event.step else ()",
                "()",
            ),
        ),
        Breach(
            "the worker that was wrong stays",
            "and is a member again",
            ("lying", 0),
            Edit("wrong_gradients", "    corruption.replace_wrong(decision, wrong, cause)\n", ""),
        ),
        Breach(
            "who was one of the two each time stays",
            "and is a member again",
            ("lying", 0),
            Edit("wrong_gradients", " or in_every_pair((*before, *votes))", ""),
        ),
        Breach(
            "who said two different things stays",
            "and is a member again",
            ("lying", 31),
            Edit("wrong_gradients", "corruption.outvoted((*before, *votes)) or ", ""),
        ),
        Breach(
            "the step that is done again shows nobody",
            "and is a member again",
            ("lying", 9),
            Edit(
                "wrong_gradients",
                "corruption.refuted(right, known.votes) if outcome.step == known.step else ()",
                "()",
            ),
        ),
        Breach(
            "an earlier step ends what is open",
            "and is a member again",
            ("wrong", 5),
            Edit("wrong_gradients", "each.reran and each.step >= known.step", "each.reran"),
        ),
        Breach(
            "the others are called wrong",
            "and its gradients were right",
            ("lying", 0),
            Edit("wrong_gradients", "if one(each) in common)", "if one(each) not in common)"),
        ),
        Breach(
            "each member that tells it counts",
            "failed with its budget unspent",
            ("lying", 0),
            Edit("wrong_gradients", "if known is None or known.generation != event.generation:", "if True:"),
        ),
        Breach(
            "members may differ again and again",
            "the run goes on, and members differed",
            ("lying", 18),
            Edit("wrong_gradients", "if times >= corruption.LIMIT:", "if False:"),
        ),
        Breach(
            "whoever is found, three times are the last",
            "failed with its budget unspent",
            ("wrong", 0),
            Edit("wrong_gradients", "times = 0 if wrong else 1 + ", "times = 1 + "),
        ),
        Breach(
            "to find one hides what others have said",
            "and is a member again",
            ("wrong", 44),
            Edit("wrong_gradients", "tuple(chain.from_iterable(rest))", "() if wrong else (*before, *votes)"),
        ),
        Breach(
            "the answer to a fence shows nobody",
            "and is a member again",
            ("wrong", 44),
            Edit("machine", "            wrong_gradients.agree(decision, event.outcomes)\n", ""),
        ),
        Breach(
            "a run whose members differ begins anew",
            "although every slice of it is held",
            ("lying", 0),
            Edit("wrong_gradients", '"history", rerun=dispute)', '"history", rerun=dispute, trusted=0)'),
        ),
        Breach(
            "another node is refused",
            "and no worker there was called wrong",
            ("lying", 2),
            Edit("wrong_gradients", "plan.nodes[rank] if plan.nodes", "plan.nodes[0] if plan.nodes"),
        ),
        Breach(
            "a node where workers were wrong twice gets another one",
            "where workers were wrong twice",
            ("lying", 2),
            Edit("corruption", "decision.run.cluster.replaced) > 1:", "decision.run.cluster.replaced) > 9:"),
        ),
        Breach(
            "only the first member is compared",
            "computed wrong gradients",
            ("lying", 3),
            Edit("reruns", "if known == again:", "if known == again or data_rank:"),
        ),
    ),
    # A world that waits for workers that are starting does so for a limited time.
    "waits": (
        Breach(
            "it waits for as long as somebody starts",
            "and wanted to until",
            ("lemons", 168),
            Edit("waiting", "return more and not decision.due(state.until)", "return more"),
        ),
    ),
    # A node on which workers fail again and again gets no worker for a time that doubles.
    "lemons": (
        Breach(
            "they get workers all the same",
            "where workers fail",
            ("lemons", 0),
            Edit("lemons", "since=now, until=now + cool_s)", "since=now, until=now)"),
        ),
        Breach(
            "they are closed for ever",
            "is closed for longer than its incidents explain",
            ("lemons", 0),
            Edit("lemons", "known.closed and decision.due(known.until)", "False"),
        ),
        Breach(
            "their time does not double",
            "s before",
            ("lemons", 7),
            Edit("lemons", "2 ** min(times, DOUBLINGS)", "1"),
        ),
        Breach(
            "what fails everywhere closes nodes",
            "workers fail elsewhere as often",
            ("lemons", 6),
            Edit("lemons", "return len(failures) > TYPICAL * median_low(others or [0])", "return True"),
        ),
        Breach(
            "what fails at once counts several times",
            "workers fail elsewhere as often",
            ("lemons", 140),
            Edit("lemons", "(failures and now - failures[-1] < rules.grow_debounce_s)", "False"),
        ),
        Breach(
            "the last node stays closed",
            "does not use a node that is closed",
            ("lemons", 21),
            Edit("lemons", "if now - last < decision.rules.refused_s:", "if True:"),
        ),
        Breach(
            "a node is used before others could offer room",
            "is used before its time",
            ("lemons", 10),
            Edit("lemons", "if now - last < decision.rules.refused_s:", "if now - last < 0:"),
        ),
    ),
    # The coordinator knows which samples are in quarantine, on its lineage.
    "quarantine": (
        Breach(
            "the quarantine is forgotten",
            "the coordinator knows the quarantine",
            ("drawn", 18),
            Edit("skips", "quarantined=(*skips.quarantined, *new)", "quarantined=new"),
        ),
        Breach(
            "what was given up stays in quarantine",
            "the coordinator knows",
            ("drawn", 7),
            Edit("edges", "        skips=run.skips.cut(plan.version.step),\n", ""),
        ),
    ),
}
"""Maps the name of a family to its broken rules."""
