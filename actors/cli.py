"""The command ``elastic`` trains jobs, and shows or changes runs, journals, data and checkpoints."""

from __future__ import annotations

import shlex
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

import elastic
from actors.terminal import console, say, show_for, show_result
from elastic.config.command_line import COMMAND_LINE, Parser
from elastic.errors import STOPPED, ElasticError, JobError, PlatformGaveUp
from elastic.imports import failure
from elastic.job import Job
from storage.errors import Damaged, StorageError

if TYPE_CHECKING:
    from storage.journal import Segment

MOST_PARAMS = 1e15
"""Largest number of parameters of `elastic estimate`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 0 finished, 3 stopped and resumable, 1 an error of the job, 2 the platform gave up."""
    try:
        known = _parser().parse_args(arguments)
        code: int = known.perform(known)
    except ElasticError as error:
        say(str(error), "elastic: ", "red")
        return error.exit_code
    except StorageError as error:
        say(str(error), "elastic: ", "red")
        return ElasticError.exit_code
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return STOPPED
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="elastic",
        description="Train large models on machines that come and go.",
        epilog="A command that takes a job file also takes the settings of the job, as --section.option value, after the file.",
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_run_commands(commands)
    _add_faults(commands)
    estimate = _takes_job(commands, "estimate", _estimate, "tell how much memory a job takes, before anything runs", optional=True)
    estimate.add_argument("--params", type=float, help="only tell what so many parameters take, say 7e9")
    evaluate = _takes_job(commands, "evaluate", _evaluate, "measure the loss of a checkpoint on held-out samples, in this process")
    evaluate.add_argument("--step", type=int, help="step of the checkpoint (default: the newest good one)")
    data = commands.add_parser("data", help="prepare datasets and look at them")
    _add_data(data.add_subparsers(metavar="command", required=True))
    checkpoint = commands.add_parser("checkpoint", help="look at the checkpoints of a run, and delete some")
    _add_checkpoint(checkpoint.add_subparsers(metavar="command", required=True))
    dtypes = commands.add_parser("dtypes", help="print the number formats: their bits, their range and their precision")
    dtypes.set_defaults(perform=_dtypes)
    settings = commands.add_parser("settings", help="print every setting of a job as a table, in markdown")
    settings.set_defaults(perform=_settings)
    return parser


def _takes_job(
    commands: Any, name: str, perform: Any, help: str, file: str = "the job file (TOML)", *, optional: bool = False, **options: Any
) -> Parser:
    """Adds a command that takes a job file and the settings of the job."""
    epilog = (
        None if options.get("listed") else "Settings of the job, as --section.option value, may follow; `elastic train --help` lists them."
    )
    command: Parser = commands.add_parser(name, help=help, settings=Job, beside=commands.choices, epilog=epilog, **options)
    command.add_argument("job", type=Path, help=file, nargs="?" if optional else None)
    command.set_defaults(perform=perform)
    return command


def _add_run_commands(commands: Any) -> None:
    usage = "elastic train [-h] [--local] [--branch] [--address ADDRESS] job [--section.option value ...]"
    train = _takes_job(commands, "train", _train, "train a job, or go on with its run", listed=True, usage=usage)
    train.add_argument("--local", action="store_true", help="train with one worker in this process, without Ray")
    train.add_argument(
        "--address", help="address of the Ray cluster (default: the one this was submitted to, or else a new one on this machine)"
    )
    train.add_argument("--branch", action="store_true", help="go on with a run whose settings were others, from its newest checkpoint")
    status = _takes_job(commands, "status", _on_run, "show where a run stands, and follow it")
    status.add_argument("--once", action="store_true", help="print it once, and do not follow")
    _takes_job(commands, "attach", _on_run, "follow a run from its start to its end; Ctrl-C leaves it running")
    _takes_job(commands, "stop", _on_run, "stop a run after a save; `elastic train` goes on from there")
    clean = _takes_job(
        commands, "clean", _on_run, "remove what a dead run has left on its cluster: actors, shared memory, logs on the nodes"
    )
    clean.add_argument("--force", action="store_true", help="end a run that lives, without a save")
    logs = _takes_job(commands, "logs", _on_run, "print the last lines of each worker, and how it ended", several="workers")
    logs.add_argument("workers", nargs="*", help="the workers (default: every one that has a log)")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what the workers that live print, until the run is over")
    story = "tell what happened in a run and why, from its journal alone"
    replay = _takes_job(commands, "replay", _replay, story, file="a job file (TOML), or a file of a journal")
    replay.add_argument("--check", action="store_true", help="decide everything again, and show where this version decides otherwise")
    replay.add_argument("--layers", action="store_true", help="show the norms of the gradients of layers, too, where they are recorded")
    metrics = _takes_job(commands, "metrics", _metrics, "print the metrics of a run, one line of JSON for each step")
    metrics.add_argument("--csv", action="store_true", help="print them as CSV")


def _add_faults(commands: Any) -> None:
    chaos = _takes_job(commands, "chaos", _chaos, "perform faults on a run that lives: real signals and real deaths, drawn from a seed")
    chaos.add_argument("--seed", type=int, default=0, help="the seed of the faults, not of the job (default: 0)")
    chaos.add_argument("--faults", type=int, default=10, help="number of faults (default: 10)")
    chaos.add_argument("--span", type=float, metavar="SECONDS", default=60.0, help="time in which they happen (default: 60)")
    chaos.add_argument("--kinds", nargs="+", metavar="KIND", help="kinds of faults (default: all that can be performed, but bucket_damage)")
    chaos.add_argument("--script", type=Path, help="perform the faults of this JSON file instead of drawn ones")

    simulate = commands.add_parser("simulate", help="run the control plane against simulated faults")
    simulate.add_argument("--seeds", default="1000", help="number of seeds, or FIRST..LAST without LAST (default: 1000)")
    simulate.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    instead = simulate.add_mutually_exclusive_group()
    instead.add_argument("--script", type=Path, metavar="FILE", help="take the faults from this JSON file, not from the seeds")
    instead.add_argument("--trace", type=Path, metavar="FILE", help="take the machines from this spot trace (CSV: seconds,event,node)")
    simulate.add_argument("--pace", type=float, default=1.0, help="factor by which the trace runs faster than it was recorded (default: 1)")
    simulate.set_defaults(perform=_simulate)


def _add_data(commands: Any) -> None:
    prepare = commands.add_parser("prepare", help="make token shards from text, JSON lines and parquet")
    prepare.add_argument("source", nargs="+", help="folders, files or URLs")
    prepare.add_argument("destination", help="a new folder or URL")
    prepare.add_argument("--suffix", action="append", help="suffix of the files to read (default: .txt .md .rst .py .jsonl .parquet)")
    prepare.add_argument("--text-field", default="text", help="field of JSON lines and parquet that holds the text (default: text)")
    tokenizer = prepare.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json of Hugging Face (default: the bytes of the text)")
    tokenizer.add_argument("--train-bpe", metavar="VOCABULARY", type=int, help="train a byte-level BPE with this many entries on the text")
    prepare.add_argument(
        "--end-of-document", metavar="TOKEN", help="token at the end of a document (default: the tokenizer's own, such as </s>)"
    )
    prepare.add_argument(
        "--held-out", metavar="PART", type=float, default=0.0, help="part of the documents for validation, such as 0.01, in held-out/"
    )
    prepare.add_argument("--unique", action="store_true", help="leave out documents whose text came before")
    prepare.set_defaults(perform=_prepare)
    show = commands.add_parser("show", help="tell what a dataset is")
    show.add_argument("dataset", help="a folder or URL")
    show.set_defaults(perform=_show_data)


def _add_checkpoint(commands: Any) -> None:
    _takes_job(commands, "ls", _checkpoint_ls, "list the checkpoints")
    rm = _takes_job(commands, "rm", _checkpoint_rm, "delete the checkpoint of a step, of a run that does not live")
    gc = _takes_job(commands, "gc", _checkpoint_gc, "delete what no rule of the job keeps, and what saves have begun and never completed")
    rm.add_argument("--step", type=int, required=True, help="step of the checkpoint")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    for command in (rm, gc):
        command.add_argument("--force", action="store_true", help="do so even if it is not certain that the run does not live")
    verify = _takes_job(commands, "verify", _checkpoint_verify, "check every digest of a checkpoint")
    export = _takes_job(commands, "export", _checkpoint_export, "write whole tensors as plain safetensors")
    for command in (verify, export):
        command.add_argument("--step", type=int, help="step of the checkpoint (default: the newest good one)")
    export.add_argument("--to", type=Path, required=True, help="folder to write to")


# ---- the commands


def _job(known: Namespace) -> Job:
    return Job.load(known.job, known.settings)


def _line(known: Namespace) -> str:
    """Returns the words that name the same run on the command line of another command."""
    return shlex.join([str(known.job), *known.line])


def _train(known: Namespace) -> int:
    from actors import cluster
    from actors.launch import launch

    sys.path.insert(0, str(Path.cwd()))
    cluster.check_file(known.job)
    job = _job(known)
    for warning in job.warnings():
        say(warning, "note: ", "yellow")
    line = f"{_line(known)} --local" if known.local else _line(known)
    try:
        result = launch(job, address=known.address, local=known.local, branch=known.branch, show=show_for(job))
    except (ElasticError, StorageError):
        raise
    except Exception as error:  # with --local the user's own code runs in this process
        if not known.local:
            raise
        traceback.print_exc()
        raise JobError(f"the job failed in this process: {failure(error)}; the traceback is above") from error
    return show_result(result, job, line)


def _on_run(known: Namespace) -> int:
    from actors import run_commands

    job = _job(known)
    match known.command:
        case "status":
            return run_commands.status(job, known.once)
        case "attach":
            return run_commands.attach(job, _line(known))
        case "stop":
            return run_commands.stop(job)
        case "clean":
            return run_commands.clean(job, known.force)
        case _:
            return run_commands.logs(job, known.workers, known.follow)


def _estimate(known: Namespace) -> int:
    from elastic.train import estimate

    if (known.params is None) is (known.job is None):
        raise JobError(f"{COMMAND_LINE}: elastic estimate takes a job file, or --params and a number, say --params 7e9")
    if known.params is not None:
        if known.line:
            raise JobError(f"{COMMAND_LINE}: {shlex.join(known.line)} has no effect with --params; name a job file in its place")
        if not 1 <= known.params <= MOST_PARAMS:
            raise JobError(f"{COMMAND_LINE}: --params = {known.params:g} is no number of parameters; give 1 to {MOST_PARAMS:g}, say 7e9")
        for line in estimate.of_parameters(known.params):
            say(line)
        return 0
    sys.path.insert(0, str(Path.cwd()))
    job = _sized(_job(known))
    tensors, tried = estimate.tensors_of_job(job), list[estimate.Tried]()
    try:
        tried = estimate.by_recompute(job, tensors)
    except Exception as error:  # of the data, the model or the loss: the rest can be told without them
        say(f"what a microbatch takes is not known: {error if isinstance(error, ElasticError) else failure(error)}", "note: ", "yellow")
    for line in estimate.of_job(job, tensors, tried):
        say(line)
    table = Table(
        "share the state", *(f"zero = {stage}" for stage in estimate.STAGES), title="what must fit a worker's device, without a microbatch"
    )
    for shards, sizes in estimate.by_stage(job, tensors, job.workers.max):
        table.add_row(str(shards), *map(estimate.gigabytes, sizes))
    console.print(table)
    if tried:
        table = Table("recompute", "comes and goes with a microbatch", "workers that must share the state")
        for each in tried:
            table.add_row(each.policy, estimate.gigabytes(each.transient), _workers(each.least, job))
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
    return job if job.global_batch != "all" else job.replace(global_batch=job.microbatch_size)  # memory does not depend on it


def _evaluate(known: Namespace) -> int:
    from elastic.protocol.commit_record import told_of
    from elastic.train.local import evaluate_here

    sys.path.insert(0, str(Path.cwd()))
    version, found = evaluate_here(_job(known), known.step)
    say(told_of(version.step, found))
    return 0


def _workers(least: int, job: Job) -> str:
    return str(least) if least else "not known" if job.workers.device_gb == "auto" else f"more than {job.workers.max}"


def _dtypes(_: Namespace) -> int:
    from elastic.engine.dtypes import FORMATS, format_of

    table = Table("format", "exponent / mantissa", "largest", "smallest normal", "smallest", "eps")
    for name, dtype in FORMATS.items():
        found = format_of(dtype)
        numbers = (found.smallest_normal, found.smallest_subnormal, found.eps)
        table.add_row(name, f"{found.exponent} / {found.mantissa}", f"±{found.largest:.6g}", *(f"{number:.3g}" for number in numbers))
    console.print(table)
    return 0


def _settings(_: Namespace) -> int:
    from elastic.config.describe import settings_page

    print(settings_page(Job), end="")
    return 0


def _replay(known: Namespace) -> int:
    from elastic.report.replay import differences, tell
    from elastic.runs import Run
    from storage import journal

    rules = None
    if known.job.suffix == ".toml":
        job = _job(known)
        segments, rules = journal.read(Run.begun(job).store, job.name), job.rules()
        if not segments:
            raise JobError(f"there is no journal of {job.name} in {job.bucket}: it has run there only with --local, which writes none")
    elif known.line:
        raise JobError(f"{COMMAND_LINE}: {shlex.join(known.line)}: {str(known.job)!r} is a file of a journal, and has no settings")
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


def _metrics(known: Namespace) -> int:
    from elastic.metrics import rows_of
    from elastic.report.metrics import csv_table, json_line
    from elastic.runs import Run

    rows = rows_of(Run.begun(_job(known)))
    if known.csv:
        print(csv_table(list(rows)), end="")
    else:
        for row in rows:
            print(json_line(row))
    return 0


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


def _chaos(known: Namespace) -> int:
    from actors.chaos import HARMLESS, PERFORMED, Chaos
    from actors.run_commands import Absent, coordinator_of
    from elastic.sim.faults import Kind, draw, from_json

    job = _job(known)
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


def _simulate(known: Namespace) -> int:
    from elastic.sim import command

    try:
        seeds = command.seeds_of(known.seeds)
        if known.script is not None:
            return command.simulate_script(known.script, seeds, print)
        if known.trace is not None:
            return command.simulate_trace(known.trace, seeds, known.pace, print)
    except (OSError, ValueError) as error:
        say(str(error))
        return 2
    return command.simulate_seeds(seeds, known.jobs, print)


def _prepare(known: Namespace) -> int:
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


def _show_data(known: Namespace) -> int:
    from elastic.data.show import show

    for name, text in show(known.dataset).items():
        say(text, f"{name:<12}", "dim")
    return 0


def _checkpoint_ls(known: Namespace) -> int:
    from actors.checkpoint_commands import ls

    return ls(_job(known))


def _checkpoint_rm(known: Namespace) -> int:
    from actors.checkpoint_commands import rm

    return rm(_job(known), known.step, known.force)


def _checkpoint_gc(known: Namespace) -> int:
    from actors.checkpoint_commands import gc

    return gc(_job(known), known.dry_run, known.force)


def _checkpoint_verify(known: Namespace) -> int:
    from elastic.runs import Run

    run = Run.begun(_job(known))
    report = run.checkpoints.verify(run.version_at(known.step))
    say(str(report))
    return 0 if report.good else 1


def _checkpoint_export(known: Namespace) -> int:
    from elastic.runs import Run
    from storage.checkpoints import EXPORTED

    run = Run.begun(_job(known))
    there = [name for name in EXPORTED if (known.to / name).exists()]
    if there:
        raise JobError(f"--to = {str(known.to)!r} has {' and '.join(there)} already, perhaps of another step; name a new folder")
    try:
        written = run.checkpoints.export(run.version_at(known.step), known.to)
    except OSError as error:  # an error of the bucket would be a StorageError
        raise JobError(f"--to = {str(known.to)!r} is not a folder that can be written: {error.strerror}; name a new folder") from error
    for path in written:
        say(str(path))
    return 0
