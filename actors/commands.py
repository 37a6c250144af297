"""The commands of ``elastic``: each reads the job, calls the code that does the work, and prints the answer."""

from __future__ import annotations

import shlex
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

import elastic
from actors.submitted import check_file
from actors.terminal import console, say
from elastic.config.command_line import words_to_show
from elastic.config.settings import COMMAND_LINE
from elastic.errors import ElasticError, JobError, PlatformGaveUp
from elastic.imports import check_packages, failure, less_memory, users_traceback
from elastic.job import Job
from elastic.runs.named import job_of_run
from storage.errors import Damaged, StorageError
from storage.journal import latest_claim

if TYPE_CHECKING:
    from storage.journal import Segment

MOST_PARAMS = 1e15
"""Largest number of parameters of `elastic estimate`."""


KEEPS = tuple(f"checkpoint.{name}" for name in ("keep_last", "keep_every", "keep_best", "keep_younger"))
"""The settings by which checkpoints are kept and deleted."""
DEVICE = tuple(f"workers.{name}" for name in ("gpus", "threads", "device_gb"))
"""The settings by which a command computes in its own process."""
HELD_OUT = tuple(f"validation.{name}" for name in ("every", "samples", "dataset", "args"))
"""The settings that say which samples `elastic evaluate` measures."""


def _job(known: Namespace) -> Job:
    return Job.load(known.job, known.settings)


def of_run(known: Namespace, *reads: str, file: str = "job") -> Job:
    """Returns the job of a command that finds a run and does not train it.

    The file may have mistakes in settings other than the name, the bucket and those that the command ``reads``: they are told as notes.
    ``file`` is the argument that names it.
    """
    path = Path(getattr(known, file))
    job, problems = job_of_run(path, known.settings, reads)
    for each in problems:
        print(f"note: {each}", file=sys.stderr)
    if problems:
        print(f"note: `elastic train` would refuse {path.name}; this command takes what the run has stored instead", file=sys.stderr)
    return job


def _import_from_here() -> None:
    """Lets the code of this folder be imported, as Python does for a script.  Raises as :func:`check_packages`."""
    sys.path.insert(0, str(Path.cwd()))
    check_packages()


def _line(known: Namespace) -> str:
    """Returns the words that name the same run on the command line of another command.

    An option whose value may be a secret has none: pasted, the command says that it lacks a value.
    """
    return shlex.join([str(known.job), *words_to_show(known)])


def train(known: Namespace) -> int:
    _import_from_here()
    check_file(known.job)
    job = _job(known)
    for warning in job.warnings() if not known.quiet else ():
        say(warning, "note: ", "yellow")
    from elastic.train.bucket import open_bucket
    from elastic.train.early import check_early

    if not known.address and not latest_claim(open_bucket(job), job.name):  # else it may live, and need no code of this machine
        check_early(job)
    if not known.quiet:  # off a terminal, too: on a busy machine the imports alone take ten seconds
        print("checking the job: loading PyTorch, building the model, trying the data and the bucket", file=sys.stderr, flush=True)
    from actors.launch import launch
    from actors.prints import Prints
    from actors.screen import screen_for, show_result

    line = f"{_line(known)} --local" if known.local else _line(known)
    screen = Prints(screen_for(job, quiet=known.quiet), known.prints)
    try:
        words = {"branch": known.branch, "accept_code": known.accept_code, "resume": known.resume, "again": known.again}
        result = launch(job, address=known.address, local=known.local, show=screen.show, look=screen.look, **words)
    except (ElasticError, StorageError):
        raise
    except Exception as error:  # with --local the user's own code runs in this process
        if not known.local:
            raise
        print(users_traceback(error), end="", file=sys.stderr)
        less = less_memory(error)
        why = f"{failure(error)}; {less}" if less else failure(error)
        raise JobError(f"the job failed in this process: {why}; the traceback is above") from error
    return show_result(result, job, line)


def on_run(known: Namespace) -> int:
    from actors import run_commands

    job = of_run(known)
    match known.command:
        case "status":
            return run_commands.status(job, known.once)
        case "attach":
            return run_commands.attach(job, _line(known), known.quiet, known.prints)
        case "stop":
            return run_commands.stop(job)
        case "clean":
            return run_commands.clean(job, known.force)
        case _:
            return run_commands.logs(job, known.workers, known.follow)


def estimate(known: Namespace) -> int:
    from elastic.train import estimate

    if (known.params is None) is (known.job is None):
        raise JobError(f"{COMMAND_LINE}: elastic estimate takes a job file, or --params and a number, say --params 7e9")
    if known.params is not None:
        if known.line:
            raise JobError(f"{COMMAND_LINE}: {shlex.join(words_to_show(known))} has no effect with --params; name a job file in its place")
        if not 1 <= known.params <= MOST_PARAMS:
            raise JobError(f"{COMMAND_LINE}: --params = {known.params:g} is no number of parameters; give 1 to {MOST_PARAMS:g}, say 7e9")
        for line in estimate.of_parameters(known.params):
            say(line)
        return 0
    _import_from_here()
    job = _sized(_job(known))
    tensors = estimate.tensors_of_job(job)
    try:
        found = estimate.by_recompute(job)
    except Exception as error:  # of the data, the model or the loss: the rest can be told without them
        found = {}
        say(f"what a microbatch takes is not known: {error if isinstance(error, ElasticError) else failure(error)}", "note: ", "yellow")
    for line in estimate.of_job(job, tensors, found):
        say(line)
    table = Table(
        "workers that share the state",
        *(f"zero = {stage}" for stage in estimate.STAGES),
        title="what must fit a worker's device, without a microbatch",
    )
    for shards, sizes in estimate.by_stage(job, tensors, job.workers.max):
        table.add_row(str(shards), *map(estimate.gigabytes, sizes))
    console.print(table)
    if found:
        limited = job.workers.device_gb != "auto"  # else a line above says what to name for it
        table = Table("recompute", "more while a microbatch is computed", *["workers that must share the state"] * limited)
        for policy, need in found.items():
            least = str(estimate.least_of(job, need) or f"more than {job.workers.max}")
            table.add_row(str(policy), estimate.gigabytes(max(need.transient)), *[least] * limited)
        console.print(table)
    return 0


def _sized(job: Job) -> Job:
    """Returns ``job`` with numbers for ``microbatch`` and ``global_batch``, and says what ``microbatch = "auto"`` stands for."""
    from elastic.train.machine.device import limit_of
    from elastic.train.microbatch import chosen
    from elastic.train.session import settled

    if job.microbatch == "auto":
        memory, one = limit_of(job), job.replace(microbatch=1)
        if not memory and job.workers.gpus:
            job, why = one, "not known before the memory of devices is; name that, say --workers.device-gb 80; all below is for 1"
        else:
            try:
                job, why = chosen(settled(job), memory)
            except (ElasticError, StorageError) as error:  # of the data, or a device that is too small
                job, why = one, f"not known: {error}; all below is for 1"
        say(f"microbatch = {job.microbatch if job is not one else 'auto'}: {why}")
    rounds = job.reduction.block + 2  # which hold all sums of gradients; memory does not depend on how many more there are
    return job if job.global_batch != "all" else job.replace(global_batch=rounds * job.microbatch_size)


def evaluate(known: Namespace) -> int:
    from elastic.protocol.commit_record import told_of
    from elastic.train.revisit import evaluate_here

    _import_from_here()
    job = of_run(known, *DEVICE, *HELD_OUT)
    version, found = evaluate_here(
        job, known.step, accept_code=known.accept_code, average=known.average, tell=lambda each: say(each, "note: ", "yellow")
    )
    say(f"{told_of(version.step, found)}{', of the average of the weights' if known.average else ''}")
    return 0


def owed(known: Namespace) -> int:
    from actors.owed_command import owed

    _import_from_here()
    return owed(of_run(known, *DEVICE), known.pay, accept_code=known.accept_code)


def rerun(known: Namespace) -> int:
    from elastic.train.revisit import rerun_here

    _import_from_here()
    again = rerun_here(of_run(known, *DEVICE), known.step, accept_code=known.accept_code)
    now, then = again.now, again.then
    table = Table("microbatch", "samples", "loss", "terms", "loss that the run recorded")
    for index, (loss, count, ids) in enumerate(zip(now.losses, now.counts, now.samples, strict=True)):
        named = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        told = "not known" if then is None else "the same bits" if then.losses[index] == loss else f"{then.losses[index]:g}"
        told += ", left out" if then is not None and index in then.left_out else ""
        table.add_row(str(index), named, f"{loss:g}", f"{count:g}", told)
    console.print(table)
    if now.layers:
        table = Table("layer", "norm of its gradient")
        for name, norm in now.layer_norms.items():
            table.add_row(name, f"{norm:.6g}")
        console.print(table)
    skipped = "" if now.finite else "; the gradient is not finite, so the step changes nothing"
    recorded = "" if then is None else f"; the run recorded {then.loss:.6g} and {then.norm:.6g}{', the same bits' if again.same else ''}"
    say(f"step {now.step}: loss {now.loss:.6g}, norm {now.norm:.6g}{recorded}{skipped}")
    return 0


def dtypes(_: Namespace) -> int:
    from elastic.engine.dtypes import FORMATS, format_of

    table = Table("format", "exponent / mantissa", "largest", "smallest normal", "smallest", "eps")
    for name, dtype in FORMATS.items():
        found = format_of(dtype)
        numbers = (found.smallest_normal, found.smallest_subnormal, found.eps)
        table.add_row(name, f"{found.exponent} / {found.mantissa}", f"±{found.largest:.6g}", *(f"{number:.3g}" for number in numbers))
    console.print(table)
    return 0


def settings(_: Namespace) -> int:
    from elastic.config.describe import settings_page
    from elastic.runs.branches import change_of

    print(settings_page(Job, change_of), end="")
    return 0


def replay(known: Namespace) -> int:
    from elastic.report.replay import differences, tell
    from elastic.runs.run import Run
    from storage import journal

    rules = None
    if known.job.suffix == ".toml":
        job = of_run(known)
        segments, rules = journal.read(Run.begun(job).store, job.name), job.rules()
        if not segments:
            raise JobError(f"there is no journal of {job.name} in {job.bucket}: it has run there only with --local, which writes none")
    elif known.line:
        raise JobError(
            f"{COMMAND_LINE}: {shlex.join(words_to_show(known))}: {str(known.job)!r} is a file of a journal, and has no settings"
        )
    else:
        segments = _journal_of(known.job)
    if not known.check:
        for line in tell(segments, layers=known.layers):
            say(line)
        return 0
    found = list(differences(segments, elastic.__version__, rules))
    for each in found:
        say(str(each))
    decisions, other = sum(len(records) for _, records in segments), {each.n for each in found if each.what != "reason"}
    worded = {each.n for each in found} - other
    say(f"{decisions} decisions: this version decides {len(other)} otherwise and words {len(worded)} differently")
    return 1 if other else 0


def metrics(known: Namespace) -> int:
    from elastic.report.metrics import csv_table, json_line
    from elastic.runs.metrics import with_origin
    from elastic.runs.run import Run

    job = of_run(known)
    try:
        rows = with_origin(Run.begun(job))
    except JobError:
        from actors.living import run_of  # it imports Ray

        run_of(job)
        rows = iter(())  # before its next save there are none, and its journal lacks the beginning
    if known.csv:
        print(csv_table(list(rows)), end="")
    else:
        for row in rows:
            print(json_line(row))
    return 0


def report(known: Namespace) -> int:
    from actors.report_command import report

    return report(of_run(known, *KEEPS), known.to, known.png)


def _journal_of(path: Path) -> list[Segment]:
    """Returns the segments in a file of a journal.  Raises :class:`JobError` for another file, and one that begins without a snapshot."""
    from storage import journal

    advice, named = "name a job file, or a file of a journal that begins with a snapshot", repr(str(path))
    try:
        raw = path.read_bytes()
        segments = journal.parse(journal.unpacked(raw, str(path)) if path.suffix == ".gz" else raw, tail=True)
    except OSError as error:
        raise JobError(f"{named} cannot be read ({error.strerror}); {advice}") from None
    except Damaged as error:
        if error.object not in ("line 1", str(path)):
            raise Damaged(f"{path}, {error.object}", error.expected, error.found) from None
        segments = []
    if not segments:
        raise JobError(f"{named} is not a file of a journal; {advice}")
    if (base := segments[0][0].get("continues")) is not None:
        where = f"the snapshot before it begins {base:012d}.jsonl"
        raise JobError(f"{named} goes on where another file of the journal ends: {where}; {advice}; the job file replays them all")
    return segments


def chaos(known: Namespace) -> int:
    from actors.chaos import HARMLESS, PERFORMED, Chaos
    from actors.living import coordinator_of
    from actors.run_commands import Absent
    from elastic.sim.faults import Kind, draw, from_json

    job = of_run(known)
    if unknown := [word for word in known.kinds or () if word not in {*Kind}]:
        raise JobError(f"--kinds: {unknown[0]!r} is no kind of fault; those that can be performed are {', '.join(sorted(PERFORMED))}")
    try:
        kinds = [Kind(kind) for kind in known.kinds or HARMLESS]
        faults = from_json(known.script.read_text()) if known.script else draw(known.seed, known.faults, known.span, kinds)
        if coordinator_of(job) is None:
            raise PlatformGaveUp(Absent.of(job).said)
        chaos = Chaos(job, faults, lambda strike: say(str(strike), f"{time.strftime('%H:%M:%S')} ", "dim"))
    except (ValueError, OSError) as error:
        raise JobError(f"{f'--script {known.script}' if known.script else '--kinds'}: {error}") from None
    chaos.run()
    chaos.close()
    said = f"{len(chaos.performed)} of {len(faults)} faults performed, written to {chaos.record}"
    say(f"{said}; `elastic replay {_line(known)}` tells the rest")
    return 0


def simulate(known: Namespace) -> int:
    from elastic.sim import command

    try:
        seeds = command.seeds_of(known.seeds)
        if known.script is not None:
            return command.simulate_script(known.script, seeds, print)
        if known.trace is not None:
            return command.simulate_trace(known.trace, seeds, known.pace, print)
    except (OSError, ValueError) as error:
        raise JobError(str(error)) from None
    return command.simulate_seeds(seeds, known.jobs, print)


def prepare(known: Namespace) -> int:
    from elastic.data.prepare import prepare
    from elastic.data.sources import SUFFIXES

    summary = prepare(
        known.source,
        known.destination,
        tuple(known.suffix or SUFFIXES),
        known.text_field,
        tokenizer=known.tokenizer,
        bpe=known.train_bpe,
        end_of_document=known.end_of_document,
        held_out=known.held_out,
        unique=known.unique,
    )
    say(str(summary))
    return 0


def show_data(known: Namespace) -> int:
    from elastic.data.show import show

    for name, text in show(known.dataset).items():
        say(text, f"{name:<12}", "dim")
    return 0


def checkpoint_ls(known: Namespace) -> int:
    from actors.checkpoint_commands import ls

    return ls(of_run(known, *KEEPS))


def checkpoint_rm(known: Namespace) -> int:
    from actors.checkpoint_commands import rm

    return rm(of_run(known), known.step, known.force)


def checkpoint_gc(known: Namespace) -> int:
    from actors.checkpoint_commands import gc

    return gc(of_run(known, *KEEPS), known.dry_run, known.force)


def checkpoint_show(known: Namespace) -> int:
    from actors.checkpoint_commands import show

    return show(of_run(known, *KEEPS), known.step, known.quarantine)


def checkpoint_diff(known: Namespace) -> int:
    from actors.checkpoint_commands import diff

    return diff(of_run(known), known.between, known.all, known.top)


def checkpoint_verify(known: Namespace) -> int:
    from actors.checkpoint_commands import verify

    return verify(of_run(known), known.step)


def checkpoint_export(known: Namespace) -> int:
    from actors.checkpoint_commands import export

    _import_from_here()
    job, to = of_run(known), known.to
    return export(job, known.step, to, average=known.average, transformers=known.transformers, accept_code=known.accept_code)
