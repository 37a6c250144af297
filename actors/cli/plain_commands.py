"""The commands that take no job: data, simulate, dtypes, settings.  Each imports its modules when it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.cli.parser import command
from actors.terminal import say, show_table
from elastic.errors import JobError


@command("data prepare")
def prepare(
    source: Sequence[str],
    destination: str,
    /,
    suffix: list[str] | None = None,
    text_field: str = "text",
    tokenizer: str | None = None,
    train_bpe: int | None = None,
    end_of_document: str | None = None,
    held_out: float = 0.0,
    unique: bool = False,
) -> None:
    """Makes token shards from text, JSON lines and parquet.

    source: folders, files or URLs
    destination: a new folder or URL
    suffix: suffix of the files to read, once for each (default: .txt .md .rst .py .jsonl .parquet)
    text_field: field of JSON lines and parquet that holds the text (default: text)
    tokenizer PATH: a tokenizer.json of Hugging Face, or its folder (default: the bytes of the text)
    train_bpe VOCABULARY: train a byte-level BPE with this many entries on the text, in place of --tokenizer
    end_of_document TOKEN: token at the end of a document (default: the tokenizer's own, such as </s>)
    held_out PART: part of the documents for validation, such as 0.01, in held-out/
    unique: leave out documents whose text came before
    """
    from elastic.data import prepare as shards
    from elastic.data.text_sources import SUFFIXES

    if tokenizer and train_bpe:
        raise JobError(
            "--tokenizer and --train-bpe both say what makes tokens of the text; leave one of them out"
        )
    summary = shards.prepare(
        source,
        destination,
        suffix or SUFFIXES,
        text_field,
        tokenizer=tokenizer,
        bpe=train_bpe,
        end_of_document=end_of_document,
        held_out=held_out,
        unique=unique,
    )
    say(str(summary))


@command("data show")
def show(dataset: str, /) -> None:
    """Tells what a dataset is.

    dataset: a folder or URL
    """
    from elastic.data.show import show as described

    for name, text in described(dataset).items():
        say(text, f"{name:<12}", "dim")


@command("simulate")
def simulate(
    seeds: str | None = None,
    jobs: int | None = None,
    script: Path | None = None,
    trace: Path | None = None,
    costs: Path | None = None,
    lead: float | None = None,
    days: float | None = None,
    mtbf: float | None = None,
    nodes: int | None = None,
    back: float | None = None,
    seed: int | None = None,
    microbatches: int | None = None,
    json: bool = False,
) -> int:
    """Runs the control plane against simulated faults, or replays a spot trace at measured costs.

    seeds: number of seeds, or FIRST..LAST without LAST (default: 1000)
    jobs: number of processes (default: 1)
    script FILE: take the faults from this JSON file, not from the seeds
    costs FILE.json: replay a trace at the costs of a recorded run (`elastic report --costs`), and print a page
    trace FILE: the spot trace (CSV: seconds,event,node); without it, one is drawn
    lead: seconds by which each removal is announced; 0 means that none is (default: 0)
    days: repeat the trace until it is so long; the length of a trace that is drawn
    mtbf: hours after which a node is lost on average, in a trace that is drawn
    nodes: number of nodes in a trace that is drawn
    back: seconds after which a new node comes in place of a lost one, in a trace that is drawn (default: 600)
    seed: seed of a trace that is drawn (default: 0)
    microbatches: microbatches of a step, in place of those in --costs
    json: print the page as JSON
    """
    from elastic.sim import command as simulator

    of_faults = {"--seeds": seeds, "--jobs": jobs, "--script": script}
    of_drawn = {"--mtbf": mtbf, "--nodes": nodes, "--back": back, "--seed": seed}
    of_page = {"--lead": lead, "--days": days, "--microbatches": microbatches, "--json": json or None}
    if costs is None and (useless := _given({"--trace": trace, **of_drawn, **of_page})):
        raise JobError(
            f"{useless} needs --costs FILE.json, the costs of a recorded run: `elastic report job.toml --costs "
            "FILE.json` writes them"
        )
    if costs is not None and (useless := _given(of_faults)):
        raise JobError(
            f"{useless} is of simulated faults, and --costs replays a trace; leave one of them out"
        )
    if trace is not None and (useless := _given(of_drawn)):
        raise JobError(f"{useless} is of a trace that is drawn, and --trace gives one; leave one of them out")
    if costs is not None and trace is None and (missing := _lacking({"--days": days, **of_drawn})):
        raise JobError(f"without --trace a trace is drawn, and {missing} is missing")
    try:
        if costs is not None:
            drawn = None
            if mtbf is not None and nodes is not None:
                drawn = simulator.Drawn(nodes, mtbf, 600.0 if back is None else back, seed or 0)
            return simulator.replay_trace(
                trace, costs, lead or 0.0, print, days, drawn, microbatches=microbatches, as_json=json
            )
        chosen = simulator.seeds_of("1000" if seeds is None else seeds)
        if script is not None:
            return simulator.simulate_script(script, chosen, print)
        return simulator.simulate_seeds(chosen, 1 if jobs is None else jobs, print)
    except OSError as error:
        raise JobError(f"{error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise JobError(str(error)) from None


def _given(options: Mapping[str, object]) -> str:
    """Returns the first option that is given, or nothing."""
    return next((name for name, value in options.items() if value is not None), "")


def _lacking(options: Mapping[str, object]) -> str:
    """Returns the first option of a trace to be drawn that has no default and is not given, or nothing."""
    return next((name for name in ("--days", "--mtbf", "--nodes") if options[name] is None), "")


@command("dtypes")
def dtypes() -> None:
    """Prints the number formats: their bits, their range and their precision."""
    from elastic.engine.dtypes import FORMATS, format_of

    rows = []
    for name, dtype in FORMATS.items():
        found = format_of(dtype)
        numbers = (found.smallest_normal, found.smallest_subnormal, found.eps)
        bits, largest = f"{found.exponent} / {found.mantissa}", f"±{found.largest:.6g}"
        rows.append((name, bits, largest, *(f"{number:.3g}" for number in numbers)))
    show_table("format", "exponent / mantissa", "largest", "smallest normal", "smallest", "eps", rows=rows)


@command("settings")
def settings() -> None:
    """Prints every setting of a job as a table, in markdown."""
    from elastic.config.describe import settings_page
    from elastic.job import Job
    from elastic.runs.branches import change_of

    print(settings_page(Job, change_of), end="")
