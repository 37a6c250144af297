"""The command ``elastic``: its words and options.

What each command does is in :mod:`actors.commands`, and named here as ``module:function``, so that only the one which was asked for is
imported: help takes a tenth of a second, and a mistake in a job file half of one.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.terminal import console, forget, lasting, say
from elastic.config.plain_line import PlainParser
from elastic.errors import STOPPED, ElasticError, JobError
from elastic.imports import load
from storage.errors import StorageError, Unavailable

UNREAD = 141
"""Exit code of a command that only tells something and has lost its reader, as of a program that SIGPIPE ends."""
TELLERS = ("status", "attach", "logs", "replay", "metrics")
"""The commands that end with their reader.  All others go on without one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    0: finished, 1: an error of the job or of the line, 2: the platform gave up, and a repeat may help, 3: stopped and resumable,
    4: restarted in vain too often.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with contextlib.nullcontext() if words and words[0] in TELLERS else lasting():
        try:
            return _main(words)
        except BrokenPipeError:
            forget(sys.stdout)
            return UNREAD


def _main(arguments: Sequence[str]) -> int:
    known = Namespace()
    console.job = next((shlex.quote(word) for word in arguments if word.endswith(".toml")), "")  # of a line that cannot be read
    try:
        known = _parser(arguments).parse_args(arguments)
        file, console.job = str(getattr(known, "job", None) or getattr(known, "bucket", "")), ""
        if file.endswith(".toml"):
            from elastic.config.command_line import words_to_show

            console.job = shlex.join([file, *words_to_show(known)])
        code: int = load(f"actors.{known.perform}")(known)
    except (ElasticError, StorageError) as error:
        from actors.origin import told

        say(told(error, known), "elastic: ", "red")
        if isinstance(error, ElasticError):
            return error.exit_code
        return ElasticError.exit_code if isinstance(error, Unavailable) else JobError.exit_code  # the rest is the same the next time
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return STOPPED
    finally:
        console.job = ""
    return code


def _parser(words: Sequence[str]) -> PlainParser:
    """Returns the parser of ``words``.  Of the commands, only the one that they name knows the settings of a job."""

    def made(*, listed: bool = False, several: str = "", beside: Mapping[str, PlainParser] | None = None, **options: Any) -> PlainParser:
        named = options["prog"].split()[1:]
        if beside is None or named != [*words[: len(named)]]:
            return PlainParser(**options)
        from elastic.config.command_line import Parser
        from elastic.job import Job

        return Parser(settings=Job, listed=listed, several=several, beside=beside, **options)

    maker: Any = made  # argparse calls it as a class
    parser = PlainParser(
        prog="elastic",
        description="Train large models on machines that come and go.",
        epilog="A command that takes a job file also takes the settings of the job, as --section.option value, after the file.",
    )
    parsers = parser.add_subparsers(dest="command", metavar="command", required=True, parser_class=maker)
    _add_run_commands(parsers)
    _add_faults(parsers)
    estimate = _takes_job(parsers, "estimate", "commands:estimate", "tell how much memory a job takes, before anything runs", optional=True)
    estimate.add_argument("--params", type=float, help="only tell what so many parameters take, say 7e9")
    evaluate = _takes_job(parsers, "evaluate", "commands:evaluate", "measure the loss of a checkpoint on held-out samples, in this process")
    which = "step of the checkpoint, STEP.GENERATION of one left behind, or best, as RUN@best is (default: the newest good one)"
    evaluate.add_argument("--step", help=which)
    evaluate.add_argument("--average", action="store_true", help="measure the average of the weights (optim.average)")
    rerun = _takes_job(parsers, "rerun", "commands:rerun", "compute a step again from the checkpoint before it, in this process")
    which = "the step, or STEP.GENERATION of one left behind; there must be a checkpoint of the step before it"
    rerun.add_argument("--step", required=True, help=which)
    for looks in (evaluate, rerun):
        looks.add_argument("--accept-code", action="store_true", help="use today's code, although the step was made by other code")
    data = parsers.add_parser("data", help="prepare datasets and look at them")
    _add_data(data.add_subparsers(metavar="command", required=True))
    checkpoint = parsers.add_parser("checkpoint", help="look at the checkpoints of a run, and delete some")
    _add_checkpoint(checkpoint.add_subparsers(metavar="command", required=True, parser_class=maker))
    dtypes = parsers.add_parser("dtypes", help="print the number formats: their bits, their range and their precision")
    dtypes.set_defaults(perform="commands:dtypes")
    settings = parsers.add_parser("settings", help="print every setting of a job as a table, in markdown")
    settings.set_defaults(perform="commands:settings")
    return parser


def _takes_job(
    parsers: Any, name: str, perform: Any, help: str, file: str = "the job file (TOML)", *, optional: bool = False, **options: Any
) -> PlainParser:
    """Adds a command that takes a job file and the settings of the job."""
    epilog = (
        None if options.get("listed") else "Settings of the job, as --section.option value, may follow; `elastic train --help` lists them."
    )
    about = f"{help[0].upper()}{help[1:]}."
    command: PlainParser = parsers.add_parser(name, help=help, description=about, beside=parsers.choices, epilog=epilog, **options)
    command.add_argument("job", type=Path, help=file, nargs="?" if optional else None)
    command.set_defaults(perform=perform)
    return command


def _add_run_commands(parsers: Any) -> None:
    usage = (
        "elastic train [-h] [--local] [--branch] [--accept-code] [--resume WORD] [--again] [--address ADDRESS] [-q] [--prints WORKERS] job "
        "[--section.option value ...]"
    )
    train = _takes_job(parsers, "train", "commands:train", "train a job, or go on with its run", listed=True, usage=usage)
    train.add_argument("--local", action="store_true", help="train with one worker in this process, without Ray")
    train.add_argument(
        "--address",
        help="address of the Ray cluster (default: the one this was submitted to, or where the run lives, or a new one on this machine)",
    )
    train.add_argument(
        "--branch", action="store_true", help="go on from the newest checkpoint of a run although its settings were different"
    )
    _add_shown(train)
    train.add_argument(
        "--accept-code", action="store_true", help="go on from the newest checkpoint of a run although its code was different"
    )
    train.add_argument(
        "--again", action="store_true", help="start a run although too many restarts in a row have saved no new step (watch.max_restarts)"
    )
    train.add_argument(
        "--resume",
        metavar="WORD",
        default="latest",
        help="go on from a step of this run, on a new branch; or begin a run that goes on from RUN@STEP, RUN@best or RUN@latest of another",
    )
    back = _takes_job(
        parsers, "rollback", "branch_commands:rollback", "begin a branch of a run at an older checkpoint, with another learning rate"
    )
    back.add_argument("--to", metavar="STEP", required=True, help="step of the checkpoint, or auto: the last good one before a divergence")
    back.add_argument("--lr-scale", metavar="FACTOR", type=float, default=1.0, help="factor of the learning rate (default: 1)")
    back.add_argument("--force", action="store_true", help="do so even if the run may still be running")
    owed = _takes_job(parsers, "owed", "commands:owed", "list the exports, samples and validations that a run owes, or do them")
    owed.add_argument("--pay", action="store_true", help="do them now, in this process, also those that were given up")
    owed.add_argument("--accept-code", action="store_true", help="with --pay: use today's code, although other code made the checkpoint")
    story = "show the runs of a bucket, and how they descend from each other; with --name NAME only that run and its relatives"
    runs = parsers.add_parser("runs", help=story, description=f"S{story[1:]}.", beside=parsers.choices)
    runs.add_argument("bucket", help="the bucket, or a job file (TOML) that names it")
    runs.set_defaults(perform="branch_commands:runs")
    status = _takes_job(parsers, "status", "commands:on_run", "show where a run stands, and follow it")
    status.add_argument("--once", action="store_true", help="print it once, and do not follow")
    _add_shown(_takes_job(parsers, "attach", "commands:on_run", "follow a run from its start to its end; Ctrl-C leaves it running"))
    _takes_job(parsers, "stop", "commands:on_run", "stop a run after a save; `elastic train` goes on from there")
    clean = _takes_job(
        parsers, "clean", "commands:on_run", "remove what a dead run has left on its cluster: actors, shared memory, logs on the nodes"
    )
    clean.add_argument("--force", action="store_true", help="end a run that lives, without a save")
    logs = _takes_job(parsers, "logs", "commands:on_run", "print the last lines of each worker, and how it ended", several="workers")
    logs.add_argument("workers", nargs="*", help="the workers (default: every one that has a log)")
    logs.add_argument("-f", "--follow", action="store_true", help="keep printing what living workers print, until the run is over")
    story = "tell what happened in a run and why, from its journal alone"
    replay = _takes_job(parsers, "replay", "commands:replay", story, file="a job file (TOML), or a file of a journal")
    replay.add_argument("--check", action="store_true", help="decide everything again, and show where this version decides otherwise")
    replay.add_argument("--layers", action="store_true", help="show the norms of the gradients of layers, too, where they are recorded")
    metrics = _takes_job(parsers, "metrics", "commands:metrics", "print the metrics of a run, one line of JSON for each step")
    metrics.add_argument("--csv", action="store_true", help="print them as CSV")
    report = _takes_job(parsers, "report", "commands:report", "write a page with plots of a run: loss, speed, incidents, checkpoints")
    report.add_argument("--to", type=Path, metavar="FILE.html", help="the page (default: <name>-report.html in this folder)")
    report.add_argument("--png", type=Path, metavar="FILE.png", help="a picture of the plots, too")


def _add_shown(parser: PlainParser) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors, and how the run ended")
    what = "also show what these workers print, one or several such as w3,w5; `first` is one that lives, `all` is every one"
    parser.add_argument("--prints", metavar="WORKERS", help=f"{what} (default: none)")


def _add_faults(parsers: Any) -> None:
    chaos = _takes_job(
        parsers, "chaos", "commands:chaos", "perform faults on a run that lives: real signals and real deaths, drawn from a seed"
    )
    chaos.add_argument("--seed", type=int, default=0, help="the seed of the faults, not of the job (default: 0)")
    chaos.add_argument("--faults", type=int, default=10, help="number of faults (default: 10)")
    chaos.add_argument("--span", type=float, metavar="SECONDS", default=60.0, help="time in which they happen (default: 60)")
    chaos.add_argument("--kinds", nargs="+", metavar="KIND", help="kinds of faults (default: all that can be performed, but bucket_damage)")
    chaos.add_argument("--script", type=Path, help="perform the faults of this JSON file instead of drawn ones")

    simulate = parsers.add_parser("simulate", help="run the control plane against simulated faults")
    simulate.add_argument("--seeds", default="1000", help="number of seeds, or FIRST..LAST without LAST (default: 1000)")
    simulate.add_argument("--jobs", type=int, default=1, help="number of processes (default: 1)")
    instead = simulate.add_mutually_exclusive_group()
    instead.add_argument("--script", type=Path, metavar="FILE", help="take the faults from this JSON file, not from the seeds")
    instead.add_argument("--trace", type=Path, metavar="FILE", help="take the machines from this spot trace (CSV: seconds,event,node)")
    simulate.add_argument("--pace", type=float, default=1.0, help="factor by which the trace runs faster than it was recorded (default: 1)")
    simulate.set_defaults(perform="commands:simulate")


def _add_data(parsers: Any) -> None:
    prepare = parsers.add_parser("prepare", help="make token shards from text, JSON lines and parquet")
    prepare.add_argument("source", nargs="+", help="folders, files or URLs")
    prepare.add_argument("destination", help="a new folder or URL")
    prepare.add_argument("--suffix", action="append", help="suffix of the files to read (default: .txt .md .rst .py .jsonl .parquet)")
    prepare.add_argument("--text-field", default="text", help="field of JSON lines and parquet that holds the text (default: text)")
    tokenizer = prepare.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer", metavar="PATH", help="a tokenizer.json of Hugging Face, or its folder (default: the bytes of the text)"
    )
    tokenizer.add_argument("--train-bpe", metavar="VOCABULARY", type=int, help="train a byte-level BPE with this many entries on the text")
    prepare.add_argument(
        "--end-of-document", metavar="TOKEN", help="token at the end of a document (default: the tokenizer's own, such as </s>)"
    )
    prepare.add_argument(
        "--held-out", metavar="PART", type=float, default=0.0, help="part of the documents for validation, such as 0.01, in held-out/"
    )
    prepare.add_argument("--unique", action="store_true", help="leave out documents whose text came before")
    prepare.set_defaults(perform="commands:prepare")
    show = parsers.add_parser("show", help="tell what a dataset is")
    show.add_argument("dataset", help="a folder or URL")
    show.set_defaults(perform="commands:show_data")


def _add_checkpoint(parsers: Any) -> None:
    _takes_job(parsers, "ls", "commands:checkpoint_ls", "list the checkpoints")
    rm = _takes_job(parsers, "rm", "commands:checkpoint_rm", "delete the checkpoint of a step, of a run that is not running")
    gc = _takes_job(parsers, "gc", "commands:checkpoint_gc", "delete what no rule of the job keeps, and what saves have left unfinished")
    rm.add_argument("--step", required=True, help="step of the checkpoint, or STEP.GENERATION of one that a rewind has left behind")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    for command in (rm, gc):
        command.add_argument("--force", action="store_true", help="do so even if the run may still be running")
    show = _takes_job(parsers, "show", "commands:checkpoint_show", "tell what a checkpoint is: files, tensors, layout, history")
    show.add_argument("--quarantine", action="store_true", help="list its samples in quarantine ([spikes]) instead")
    diff = _takes_job(parsers, "diff", "commands:checkpoint_diff", "tell how far each tensor has moved between two checkpoints")
    diff.add_argument("--between", nargs=2, metavar="STEP", required=True, help="steps of the two checkpoints")
    diff.add_argument("--all", action="store_true", help="compare moments and buffers, too")
    diff.add_argument("--top", type=int, default=20, help="number of tensors that are listed, those that moved most (default: 20; 0: all)")
    verify = _takes_job(parsers, "verify", "commands:checkpoint_verify", "check every digest of a checkpoint")
    export = _takes_job(parsers, "export", "commands:checkpoint_export", "write whole tensors as safetensors, for other programs")
    for command in (show, verify, export):
        best = ", or best" if command is export else ""
        which = f"step of the checkpoint, or STEP.GENERATION of one left behind{best} (default: the newest good one)"
        command.add_argument("--step", help=which)
    export.add_argument("--average", action="store_true", help="write the average of the weights (optim.average) in place of the weights")
    export.add_argument("--transformers", action="store_true", help="name tensors as from_pretrained of transformers wants them")
    export.add_argument("--accept-code", action="store_true", help="use today's code, although the step was made by other code")
    export.add_argument("--to", type=Path, required=True, help="folder to write to")
