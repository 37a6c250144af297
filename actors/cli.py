"""The command ``elastic``: train, and what is done with runs, journals, data and checkpoints."""

from __future__ import annotations

import argparse
import gzip
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import elastic
from actors.terminal import console, say, show, show_result
from elastic.errors import STOPPED, ElasticError, JobError, PlatformGaveUp
from elastic.job import Job
from storage.errors import StorageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 finished, 3 stopped and resumable, 1 the job's own error, 2 the platform gave up."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    known, options = parser.parse_known_args(arguments)
    if options and known.command in ("data", "simulate"):
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    try:
        code: int = known.perform(known, options)
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


class _Command(argparse.ArgumentParser):
    """Options are not abbreviated: what is not one of the command's own is a setting of the job."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic",
        description="Train large models on machines that come and go.",
        epilog="Every command that takes a job also takes its settings, as --section.option value, after the file.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Command)

    train = commands.add_parser("train", help="train a job, or go on with its run", add_help=False)
    train.add_argument("job", nargs="?", type=Path)
    train.add_argument("--local", action="store_true", help="one worker in this process, without Ray")
    train.add_argument("--address", help="the Ray cluster; default: the one submitted to, else a new one on this machine")
    train.add_argument("-h", "--help", action="store_true")
    train.set_defaults(perform=_train)

    _add_tending(commands)
    replay = commands.add_parser("replay", help="what happened in a run and why, from its journal alone")
    replay.add_argument("journal", type=Path, help="a job file, or a file of a journal")
    replay.add_argument("--check", action="store_true", help="decide everything again: where does this version decide otherwise?")
    replay.set_defaults(perform=_replay)

    _add_faults(commands)
    _add_data(commands.add_parser("data", help="prepare datasets and look at them").add_subparsers(dest="what", required=True))

    checkpoint = commands.add_parser("checkpoint", help="look at the checkpoints of a run").add_subparsers(dest="what", required=True)
    for name, perform, text in (
        ("ls", _checkpoint_ls, "list them"),
        ("verify", _checkpoint_verify, "check every digest"),
        ("export", _checkpoint_export, "write whole tensors as plain safetensors"),
    ):
        command = checkpoint.add_parser(name, help=text)
        command.add_argument("job", type=Path)
        if name != "ls":
            command.add_argument("--step", type=int, help="default: the newest good one")
        if name == "export":
            command.add_argument("--to", type=Path, required=True)
        command.set_defaults(perform=perform)
    return parser


def _add_tending(commands: Any) -> None:
    for name, text in (
        ("status", "where a run stands, live"),
        ("attach", "follow a run from its start to its end; Ctrl-C leaves it running"),
        ("stop", "stop a run after a save; elastic train goes on from there"),
        ("clean", "remove what a dead run has left on its cluster: actors, segments, logs on the nodes"),
        ("logs", "the last lines of a worker, and how it ended"),
    ):
        command = commands.add_parser(name, help=text)
        if name == "logs":  # one argument, for a worker's name must follow the job's: the value of an option is no worker
            command.usage = "elastic logs [-h] job [worker ...]"
            command.add_argument("job", nargs="+", help="a job file, and workers; default: every one that has a log")
        else:
            command.add_argument("job", type=Path)
        if name == "status":
            command.add_argument("--once", action="store_true", help="print once instead of following")
        if name == "clean":
            command.add_argument("--force", action="store_true", help="also a run that lives, without a save")
        command.set_defaults(perform=_tend)


def _add_faults(commands: Any) -> None:
    chaos = commands.add_parser("chaos", help="perform faults on a run that lives, drawn from a seed: real signals, real deaths")
    chaos.add_argument("job", type=Path)
    chaos.add_argument("--seed", type=int, default=0)
    chaos.add_argument("--faults", type=int, default=10)
    chaos.add_argument("--span", type=float, metavar="SECONDS", default=60.0, help="in which they happen (default: 60)")
    chaos.add_argument("--kinds", nargs="+", metavar="KIND", help="default: all but bucket_damage, of those that can be performed")
    chaos.add_argument("--script", type=Path, help="faults as JSON, instead of drawn ones")
    chaos.set_defaults(perform=_chaos)

    simulate = commands.add_parser("simulate", help="run the control plane against simulated faults")
    simulate.add_argument("--seeds", default="1000", help="how many, or FIRST..LAST (without LAST); default: 1000")
    simulate.add_argument("--jobs", type=int, default=1, help="processes; default: 1")
    instead = simulate.add_mutually_exclusive_group()
    instead.add_argument("--script", type=Path, metavar="FILE", help="these faults (JSON) instead of the seeds' own")
    instead.add_argument("--trace", type=Path, metavar="FILE", help="the machines of a spot trace (CSV: seconds,event,node)")
    simulate.add_argument("--pace", type=float, default=1.0, help="of a trace: so many times as fast as it was recorded")
    simulate.set_defaults(perform=_simulate)


def _add_data(commands: Any) -> None:
    prepare = commands.add_parser("prepare", help="token shards from text, JSON lines and parquet")
    prepare.add_argument("source", nargs="+", help="folders, files or URLs")
    prepare.add_argument("destination", help="a new folder or URL")
    prepare.add_argument("--suffix", action="append", help="which files of a folder; default: .txt .md .rst .py .jsonl .parquet")
    prepare.add_argument("--text-field", default="text", help="of JSON lines and parquet (default: text)")
    tokenizer = prepare.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json of Hugging Face; default: the bytes of the text")
    tokenizer.add_argument("--train-bpe", metavar="VOCABULARY", type=int, help="train a byte-level BPE of so many entries on the text")
    prepare.add_argument("--end-of-document", metavar="TOKEN", help="of the tokenizer; default: what it calls <|endoftext|>, </s> or so")
    prepare.set_defaults(perform=_prepare)
    show = commands.add_parser("show", help="what a dataset is")
    show.add_argument("dataset")
    show.set_defaults(perform=_show_data)


# ---- the commands


def _train(known: argparse.Namespace, options: list[str]) -> int:
    from actors import cluster
    from actors.launch import launch
    from elastic.config.settings import print_help

    if known.help or known.job is None:
        print("usage: elastic train JOB.toml [--local] [--address ADDRESS] [--section.option value ...]\n")
        print_help(Job, "elastic train JOB.toml")
        return 0 if known.help else 2
    sys.path.insert(0, str(Path.cwd()))
    cluster.check_file(known.job)
    job = Job.load(known.job, options)
    for warning in job.warnings():
        say(warning, "note: ", "yellow")
    return show_result(launch(job, address=known.address, local=known.local, show=show), job, _line(known, options))


def _line(known: argparse.Namespace, options: list[str]) -> str:
    """What another command has to be given for the same run."""
    return shlex.join([str(known.job), *options])


def _tend(known: argparse.Namespace, options: list[str]) -> int:
    from actors import run_commands

    if known.command == "logs":
        path, *workers = known.job
        return run_commands.logs(Job.load(path, options), workers)
    job = Job.load(known.job, options)
    match known.command:
        case "status":
            return run_commands.status(job, known.once)
        case "attach":
            return run_commands.attach(job, _line(known, options))
        case "stop":
            return run_commands.stop(job)
        case _:
            return run_commands.clean(job, known.force)


def _replay(known: argparse.Namespace, options: list[str]) -> int:
    from elastic.config.settings import COMMAND_LINE
    from elastic.report.replay import differences, tell
    from elastic.runs import Run
    from storage import journal

    rules = None
    if known.journal.suffix == ".toml":
        job = Job.load(known.journal, options)
        segments, rules = journal.read(Run.look(job).store, job.name), job.rules()
        if not segments:
            raise JobError(f"there is no journal of {job.name} in {job.bucket}: it has never run there, or only with --local")
    elif options:
        raise JobError(f"{COMMAND_LINE}: {shlex.join(options)}: {str(known.journal)!r} is a file of a journal, and has no settings")
    else:
        segments = journal.parse(_bytes_of(known.journal))
    if not known.check:
        for line in tell(segments):
            say(line)
        return 0
    found = list(differences(segments, elastic.__version__, rules))
    for each in found:
        say(str(each))
    decisions, other = sum(len(records) for _, records in segments), [each for each in found if each.what != "reason"]
    say(f"{decisions} decisions, {len(other)} otherwise, {len(found) - len(other)} in other words")
    return 1 if other else 0


def _bytes_of(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JobError(f"there is no journal {str(path)!r} ({error.strerror}): name a job file, or a file of a journal") from None
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


def _chaos(known: argparse.Namespace, options: list[str]) -> int:
    from actors.chaos import HARMLESS, Chaos
    from actors.run_commands import Absent, coordinator_of
    from elastic.sim.faults import Kind, draw, from_json

    job = Job.load(known.job, options)
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
    line = _line(known, options)
    say(f"{len(chaos.performed)} of {len(faults)} faults performed, written to {chaos.record}; `elastic replay {line}` tells the rest")
    return 0


def _simulate(known: argparse.Namespace, _: list[str]) -> int:
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


def _prepare(known: argparse.Namespace, _: list[str]) -> int:
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
    )
    say(str(summary))
    return 0


def _show_data(known: argparse.Namespace, _: list[str]) -> int:
    from elastic.data.show import show

    for name, text in show(known.dataset).items():
        say(text, f"{name:<12}", "dim")
    return 0


def _checkpoint_ls(known: argparse.Namespace, options: list[str]) -> int:
    from elastic.runs import Run

    run = Run.look(Job.load(known.job, options))
    newest = run.newest()
    table = Table("step", "generation", "files", "bytes", "layout", "state")
    for listed in run.checkpoints.versions():
        version, manifest = listed.version, listed.manifest
        state = "damaged" if listed.damaged else "incomplete" if manifest is None else "newest good" if version == newest else "good"
        files = manifest.files if manifest else ()
        layout = "×".join(str(n) for n in manifest.about["layout"].values()) if manifest else ""
        table.add_row(str(version.step), str(version.generation), str(len(files)), f"{sum(f.size for f in files):,}", layout, state)
    console.print(table)
    return 0


def _checkpoint_verify(known: argparse.Namespace, options: list[str]) -> int:
    from elastic.runs import Run

    run = Run.look(Job.load(known.job, options))
    report = run.checkpoints.verify(run.version_at(known.step))
    say(str(report))
    return 0 if report.good else 1


def _checkpoint_export(known: argparse.Namespace, options: list[str]) -> int:
    from elastic.runs import Run

    run = Run.look(Job.load(known.job, options))
    for path in run.checkpoints.export(run.version_at(known.step), known.to):
        say(str(path))
    return 0
