"""The command ``elastic replay``: tells what happened in a run, or whether this version decides otherwise,
from the journal.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import elastic
from actors.cli.job_file import JobFile
from actors.cli.parser import command
from actors.terminal import say
from elastic.control.rules import Rules
from elastic.errors import JobError
from elastic.report.replay import differences, tell
from elastic.runs.run import Run
from storage import journal
from storage.errors import Damaged
from storage.journal import Segment


@command("replay")
def replay(file: JobFile, /, check: bool = False, layers: bool = False) -> int:
    """Tells what happened in a run and why, from its journal alone.

    file job: a job file (TOML), or a file of a journal
    check: decide everything again, and show where this version decides otherwise
    layers: show the norms of the gradients of layers, too, where they are recorded

    Raises :class:`JobError` if there is no such journal.
    """
    segments, rules = _journal_of(file)
    if not check:
        for line in tell(segments, layers=layers):
            say(line)
        return 0
    found = list(differences(segments, elastic.__version__, rules))
    for each in found:
        say(str(each))
    decisions, other = (
        sum(len(records) for _, records in segments),
        {each.n for each in found if each.what != "reason"},
    )
    worded = {each.n for each in found} - other
    say(
        f"{decisions} decisions: this version decides {len(other)} otherwise and words {len(worded)} "
        "differently"
    )
    return 1 if other else 0


def _journal_of(file: JobFile) -> tuple[list[Segment], Rules | None]:
    """Returns the journal of a run and the rules of its job, or the journal in a file and no rules.  Raises
    :class:`JobError` if there is none.
    """
    if file.is_toml:
        job = file.of_run()
        if segments := journal.read(Run.begun(job).store, job.name):
            return segments, job.rules()
        raise JobError(
            f"{job.name} has no journal in {job.bucket}: it has only run with --local, which writes no "
            "journal"
        )
    if file.options.settings:
        words = shlex.join(file.options.to_show())
        raise JobError(
            f"command line: {words}: {file.file!r} is a journal file, which takes no settings; leave them out"
        )
    return _in_file(file.path), None


def _in_file(path: Path) -> list[Segment]:
    """Returns the segments in a file of a journal.  Raises :class:`JobError` for another file, and one that
    begins without a snapshot.
    """
    advice, named = "name a job file, or a journal file that begins with a snapshot", repr(str(path))
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
        raise JobError(f"{named} is not a journal file; {advice}")
    if (base := segments[0][0].get("continues")) is not None:
        where = f"its snapshot begins the file {base:012d}.jsonl"
        raise JobError(
            f"{named} continues an earlier journal file: {where}; {advice} (a job file replays the "
            "whole journal)"
        )
    return segments
