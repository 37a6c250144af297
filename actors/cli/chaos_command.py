"""The command ``elastic chaos``: faults for a run that lives, or a rehearsal of a job under faults or on a spot
trace, which is judged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median

from actors import cluster
from actors.chaos import HARMLESS, PERFORMED, Chaos
from actors.cli.job_file import JobFile, import_from_here
from actors.cli.parser import command
from actors.fleet import Fleet
from actors.living import coordinator_of
from actors.local_nodes import LocalNodes
from actors.rehearsal import Judged, Rehearsal
from actors.terminal import say, show_table
from elastic.errors import DIFFERS, JobError
from elastic.job import Job
from elastic.journal import codec
from elastic.protocol.faults import Fault, Kind, draw, from_json, to_json
from elastic.report.goodput import of_fleet
from elastic.report.measured_costs import costs_of
from elastic.report.page.parquet import parquet_of
from elastic.report.timeline import Timeline
from elastic.report.words import clipped, counted
from elastic.runs.run import Run
from elastic.sim.costs import Costs
from elastic.sim.page import replay
from elastic.sim.replay import Replayed, most_machines, rules_of
from elastic.sim.trace import Row, numbers_of, rows_of, sped_up, text_of, thinned

NODES, MOST = 2, 8
"""Number of nodes of a local cluster unless --nodes says otherwise, and their largest number: each is half a
dozen processes of Ray.
"""
FAULTS, TRIES = 10, 12
"""Number of faults, and of runs in which --minimise tries fewer, unless --faults and --tries say otherwise."""
SPAN_S = 60.0
"""Seconds in which faults strike a run that lives, unless --span says otherwise."""
WORDS = {True: "yes", False: "NO", None: "not seen"}


@command("chaos")
def chaos(
    file: JobFile,
    /,
    seed: int | None = None,
    faults: int | None = None,
    span: float | None = None,
    kinds: Sequence[str] = (),
    script: Path | None = None,
    schedule: Path | None = None,
    reference: str | None = None,
    nodes: int | None = None,
    minimise: bool = False,
    tries: int | None = None,
    trace: Path | None = None,
    speed: float | None = None,
    lead: float | None = None,
    quiet: bool = False,
) -> int:
    """Trains a job twice, undisturbed and under real faults, and says whether anything differs.

    If a run of the job lives, it performs the faults on that run instead, and judges nothing.

    seed: the seed of the faults, not of the job (default: 0)
    faults: number of faults (default: 10)
    span SECONDS: time in which they happen (default: 0.7 of the undisturbed run's; 60 on a run that lives)
    kinds KIND: kinds of faults, such as SIGKILL node_kill node_notice (default: all that can be performed, but
        bucket_damage)
    script FILE.json: another name for --schedule
    schedule FILE.json: perform the faults of this file, as an earlier chaos has written it
    reference RUN: take this finished run of the same job as the undisturbed one, in place of training it
    nodes: number of nodes of a Ray cluster that starts on this machine (default: 2, or no cluster starts where
        this command is part of one)
    minimise: if anything differs, try fewer faults, and write the fewest with which something differs
    tries: number of runs in which --minimise tries fewer faults (default: 12)
    trace FILE.csv: let the nodes of this spot trace come and go (seconds,event,node), in place of faults
    speed: factor by which the trace runs faster than it was recorded (default: 1)
    lead SECONDS: notice that a node of the trace gets before it is taken, not sped up (default: 0, none)
    quiet -q: do not show the steps of the runs

    Ends with exit code 5 if anything differs.
    """
    schedule = schedule or script
    of_faults = {"--seed": seed, "--faults": faults, "--span": span, "--kinds": kinds or None}
    of_trace = {"--speed": speed, "--lead": lead}
    of_schedule = {"--minimise": minimise or None, "--tries": tries}
    _fits("--trace", trace, of_faults | of_schedule | {"--schedule": schedule}, of_trace)
    _fits("--schedule", schedule, of_faults, {})
    _fits("--minimise", minimise or None, {}, {"--tries": tries})
    _check(kinds, nodes, speed, lead, faults, span, tries)
    seed, faults = seed or 0, FAULTS if faults is None else faults
    living = file.of_run()
    scheduled = _read_schedule(schedule)
    if trace is None and coordinator_of(living) is not None:
        chosen = scheduled or draw(seed, faults, span or SPAN_S, _kinds(kinds))
        return _strike(living, chosen)
    import_from_here()
    job = file.load()
    rows = _read_trace(trace, nodes or MOST, speed or 1.0) if trace is not None else ()
    _performer(job, scheduled)  # a fault that cannot be performed is refused before anything is trained
    with ExitStack() as stack:
        local = _cluster(job, nodes or most_machines(rows), stack)
        rehearsal = Rehearsal(job, local, _note, quiet)
        if reference is not None:
            rehearsal.as_before(reference)
        if local is not None and (reference is None or not rows):
            local.fill()
        if reference is None:
            say(f"first {job.name} is trained undisturbed, as {rehearsal.name('calm')}")
            rehearsal.undisturbed()
        if local is not None and rows:
            local.empty()
            return _judge_trace(rehearsal, local, rows, lead or 0.0)
        chosen = scheduled or draw(seed, faults, span or rehearsal.span_s, _kinds(kinds))
        return _judge(rehearsal, chosen, file, schedule, (tries or TRIES) if minimise else 0)


# ---- what is typed


def _fits(option: str, value: object, without: Mapping[str, object], only_with: Mapping[str, object]) -> None:
    """Raises :class:`JobError` if an option of ``without`` is given beside ``option``, or one of ``only_with``
    where ``option`` is not given.
    """
    given = value is not None
    for other, other_value in (without if given else only_with).items():
        if other_value is not None:
            raise JobError(
                f"{other} does nothing with {option}; leave one of them out"
                if given
                else f"{other} does nothing without {option}; give that, too, or leave it out"
            )


def _check(
    kinds: Sequence[str],
    nodes: int | None,
    speed: float | None,
    lead: float | None,
    faults: int | None,
    span: float | None,
    tries: int | None,
) -> None:
    """Raises :class:`JobError` for values that are none."""
    if unknown := [word for word in kinds if word not in {*Kind}]:
        raise JobError(
            f"--kinds: {unknown[0]!r} is no kind of fault; use one of {', '.join(sorted(PERFORMED))}"
        )
    if nodes is not None and not 1 <= nodes <= MOST:
        raise JobError(f"--nodes {nodes} must be between 1 and {MOST}: all nodes are on this machine")
    if speed is not None and not 0 < speed < inf:
        raise JobError(f"--speed {speed:g} must be a number greater than 0; 60 turns an hour into a minute")
    if lead is not None and not 0 <= lead < inf:
        raise JobError(f"--lead {lead:g} must be a number of at least 0: seconds of notice; 0 means none")
    if span is not None and not 0 < span < inf:
        raise JobError(f"--span {span:g} must be a number greater than 0: seconds in which the faults happen")
    for option, number in {"--faults": faults, "--tries": tries}.items():
        if number is not None and number < 1:
            raise JobError(f"{option} {number} must be at least 1")


def _kinds(words: Sequence[str]) -> list[Kind]:
    return [Kind(word) for word in words or HARMLESS]


def _read_schedule(path: Path | None) -> tuple[Fault, ...]:
    if path is None:
        return ()
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise JobError(f"--schedule {path}: {error}") from None


def _read_trace(path: Path, nodes: int, speed: float) -> tuple[Row, ...]:
    try:
        return sped_up(thinned(rows_of(path.read_text(encoding="utf-8")), nodes), speed)
    except (ValueError, OSError) as error:
        raise JobError(f"--trace {path}: {error}") from None


def _note(sentence: str) -> None:
    say(sentence, f"{time.strftime('%H:%M:%S')} ", "dim")


# ---- a run that lives


def _strike(job: Job, chosen: Sequence[Fault]) -> int:
    say(f"{job.name} lives, so its run gets the faults, and is not judged")
    performer = _performer(job, chosen)
    performer.run()
    performer.close()
    said = f"{len(performer.performed)} of {len(chosen)} faults performed, written to {performer.record}"
    say(f"{said}; `elastic replay` tells the rest")
    return 0


def _performer(job: Job, chosen: Sequence[Fault]) -> Chaos:
    try:
        return Chaos(job, chosen, lambda strike: _note(str(strike)))
    except ValueError as error:
        raise JobError(f"--schedule or --kinds: {error}") from None


# ---- a rehearsal


def _cluster(job: Job, nodes: int, stack: ExitStack) -> LocalNodes | None:
    """Starts a cluster of ``nodes`` on this machine, or of :data:`NODES` if the number is 0 and this command is
    part of no cluster; else joins the cluster to which this command was submitted.
    """
    if nodes or (cluster.begins_here() and not job.workers.gpus):
        return stack.enter_context(LocalNodes(job.workers, nodes or NODES, say))
    cluster.connect(None, job.workers, tell=say)
    return None


def _judge(
    rehearsal: Rehearsal, chosen: Sequence[Fault], file: JobFile, written: Path | None, tries: int
) -> int:
    """Trains under ``chosen``, which are in the file ``written`` if they were read from there, and judges."""
    name = rehearsal.name("chaos")
    if written is None:
        written = Path(f"{name}.schedule.json")
        _write(written, to_json(chosen))
    again = f"`elastic chaos {file.typed} --schedule {written} --reference {rehearsal.calm_job.name}`"
    say(f"now it is trained under {counted(len(chosen), 'fault')}, as {name}; {again} does so again")
    judged = rehearsal.under(chosen, name)
    _show(judged, rehearsal)
    if judged.differs and tries:
        least = rehearsal.minimised(chosen, tries)
        smaller = Path(f"{name}.least.json")
        _write(smaller, to_json(least))
        said = (
            f"{len(least)} of {len(chosen)} faults are enough; written to {smaller}, for --schedule"
            if least
            else "it differs without any fault, too: the job itself does not give the same bits twice"
        )
        say(said)
    elif judged.differs:
        say("--minimise looks for the fewest faults with which it still differs")
    return 0 if judged.agrees else DIFFERS


def _judge_trace(rehearsal: Rehearsal, local: LocalNodes, rows: Sequence[Row], lead: float) -> int:
    """Trains on the nodes of a trace, and judges the run and what its nodes have bought."""
    name, workers = rehearsal.name("chaos"), rehearsal.job.workers
    removals = sum(not row.comes for row in rows)
    notice = f"each with {lead:g} s of notice" if lead else "none with notice"
    say(
        f"now it is trained on a trace of at most {local.number} nodes and {rows[-1].at:.0f} s, as {name}: "
        f"{counted(removals, 'node')} will be taken, {notice}"
    )
    fleet = Fleet(rows, local, lead, -(-workers.min // local.room), _note)
    judged = rehearsal.on_trace(fleet, name)
    _show(judged, rehearsal)
    if fleet.due:
        say(
            f"the run ended {fleet.due[-1].at - fleet.elapsed_s:.0f} s before the trace, so {len(fleet.due)} of "
            f"{len(rows)} rows were not performed; a job with more steps lasts longer"
        )
    paid, present = fleet.paid(), fleet.present(joined(judged.job))
    _write(Path(f"{name}.trace.csv"), text_of(paid, f"nodes of {name} as they came and went"))
    _write(
        Path(f"{name}.present.csv"), text_of(present, f"nodes of {name} from when their workers could step")
    )
    intervals = judged.timeline.account.intervals
    Path(f"{name}.timeline.parquet").write_bytes(parquet_of(intervals))
    say(
        f"{name}.trace.csv has the nodes as they came and went, {name}.present.csv from when their workers could "
        f"step, and {name}.timeline.parquet the time of the run"
    )
    real = of_fleet(intervals, numbers_of(present), numbers_of(paid))
    say(
        f"goodput: {real.present:.1%} of what the nodes present could do, {real.paid:.1%} of what all nodes could "
        "do, with those whose workers were starting"
    )
    found = simulated(judged.job, judged.timeline, paid, present, lead)
    say(
        f"the simulator, for these nodes at this run's costs: {found.goodput:.1%} and {found.goodput_paid:.1%}"
    )
    return 0 if judged.agrees else DIFFERS


def joined(job: Job) -> dict[str, float]:
    """Returns the time at which the first worker of each node joined the run."""
    found: dict[str, float] = {}
    for record in Run.find(job).records():
        for each in codec.parts_of(record["event"]):
            if each["$"] == "Joined":
                found.setdefault(each["node"], record["at"])
    return found


def simulated(
    job: Job, timeline: Timeline, paid: Sequence[Row], present: Sequence[Row], lead: float
) -> Replayed:
    """Returns what the simulator says of the nodes of a run, at the costs of that run: each node takes to start
    what it took, or for ever if no worker of it joined.
    """
    lost_at = [row.at for row in paid if not row.comes]
    known = {
        name: 0.0 if cost is None else cost
        for name, cost in costs_of(Run.find(job).segments(), job.name, lost_at).items()
    }
    # nodes that wait for the run come with it
    begun_at = timeline.began_at or 0.0
    last_at = max(each.end for each in timeline.account.intervals if each.steps)
    rows = [replace(row, at=max(row.at, begun_at)) for row in paid if row.at < last_at]
    joined = [row for row in present if row.comes]
    starts_s = [
        min((each.at - row.at for each in joined if each.node == row.node and each.at >= row.at), default=inf)
        for row in rows
        if row.comes
    ]
    took = [each.took_s for each in timeline.saves.values() if each.took_s is not None]
    costs = replace(
        Costs.of(known),
        save_every=job.checkpoint.save_every,
        save_s=median(took) if took else 0.0,
        starts_s=starts_s,
    )
    rules = rules_of(costs, most_machines(rows))
    rules = replace(rules, grow_debounce_s=job.deadlines.grow_debounce_s)
    return replay(rows, costs, lead, last_at - rows[0].at, rules)


def _show(judged: Judged, rehearsal: Rehearsal) -> None:
    findings = [(each.name, WORDS[each.holds], each.said) for each in judged.findings]
    show_table("what must hold", "holds", "what was seen", rows=findings)
    rows = [
        (
            each.step,
            each.fault,
            each.tier,
            "" if each.seconds is None else f"{each.seconds:.2f}",
            "" if each.redone is None else each.redone,
            clipped(each.reason),
        )
        for each in judged.rows
    ]
    show_table("step", "fault", "state from", "seconds", "steps redone", "the run says", rows=rows)
    same = f"{judged.job.name} is as {rehearsal.calm_job.name}"
    wrong = ", ".join(each.name for each in judged.findings if each.holds is False)
    say(f"nothing differs: {same}" if judged.agrees else f"NOT as it must be: {wrong}")
    say(f"both runs stay in {judged.job.bucket}; delete their folders when nobody needs them")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror}; run the command in a folder of yours"
        ) from None
