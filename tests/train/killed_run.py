"""Trains in one process after another, each killed (SIGKILL, for real) one write or deletion later than the
one before.

``python killed_run.py FOLDER FIRST STRIDE [torn]``: forks a child for each boundary FIRST, FIRST + STRIDE, …
into its own bucket ``FOLDER/<n>``, until one is not killed.  A boundary is a change that the child asks of
the operating system in its bucket: it creates, links, renames or removes a file or a folder.  Each child
trains all of :func:`job_of`, which saves each step and deletes all but the newest two checkpoints.  A second
child then goes on in the same bucket; every other one applies the rules before, and each applies them
afterwards.  Prints, for each boundary, a line of JSON with what was found.

With the word ``torn`` a deletion takes the shard first and the manifest last, and leaves no note.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from actors.cli.checkpoint_commands import gc
from elastic.job import Job
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from storage.checkpoints import Checkpoints
from storage.slices import Version
from tests.support.chaos import exported_hash
from tests.support.toys import toy_job

STEPS = 5
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = ("os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


@dataclass(frozen=True)
class Ended:
    """The findings after the boundary ``at``: how the child ended, and the bucket before and after the second
    one went on.
    """

    at: int
    signal: int
    event: str
    """The change that was not made."""
    manifests: list[int]
    """The steps whose manifests were there when the child had ended, and which of them were good when every
    byte was read.
    """
    whole: list[int]
    state: str
    hash: str
    good: list[int]
    left: list[str]
    """The files in the folders of checkpoints at the end, without their generations."""
    partial: list[str]
    """Files that were never renamed, anywhere in the bucket."""


def job_of(bucket: str) -> Job:
    return toy_job(
        bucket,
        steps=STEPS,
        global_batch=4,
        model_args={"vocab": 29, "dim": 8, "layers": 1, "heads": 2},
        checkpoint={"save_every": 1, "keep_last": 2},
    )


def killed(at: int, bucket: str) -> None:
    """Trains, and ends by SIGKILL instead of making its change number ``at``."""
    left = [at]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event in CHANGES or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        )
        if writes and str(arguments[0]).startswith(bucket):
            left[0] -= 1
            if not left[0]:
                Path(f"{bucket}.event").write_text(f"{event} {str(arguments[0]).removeprefix(bucket)}")
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    run_local(job_of(bucket), lambda line: None)


def goes_on(bucket: str, at: int, ended: int) -> None:
    """Goes on in the bucket, applies the rules, and writes what there is then beside it."""
    run = Run.open(job_of(bucket)) if Path(bucket, "toy", "job.json").exists() else None
    listed = run.checkpoints.versions() if run is not None else []
    manifests = [each.version.step for each in listed if each.manifest is not None and not each.deleted]
    whole = [
        each.version.step
        for each in listed
        if each.good and run is not None and run.checkpoints.verify(each.version).good
    ]
    with redirect_stdout(sys.stderr):
        if manifests and at % 2:
            gc(job_of(bucket), dry_run=False, force=False)
        state = run_local(job_of(bucket), lambda line: None)[0]
        gc(job_of(bucket), dry_run=False, force=False)
    run = Run.open(job_of(bucket))
    good = [
        each.version.step for each in run.checkpoints.versions() if run.checkpoints.verify(each.version).good
    ]
    steps = Path(bucket, "toy", "steps")
    left = sorted(
        "/".join(part for part in path.relative_to(steps).parts if part[0] != "g")
        for path in steps.rglob("*")
    )
    partial = [str(path.relative_to(bucket)) for path in Path(bucket).rglob(".partial-*")]
    event = Path(f"{bucket}.event").read_text() if ended else ""
    found = Ended(at, ended, event, manifests, whole, state, exported_hash(run.job), good, left, partial)
    Path(f"{bucket}.json").write_text(json.dumps(asdict(found)))


def forked(work: Callable[[], None]) -> int:
    """Returns the signal that ended a child that did ``work``, or 0.  Raises :class:`ChildProcessError` if it
    failed otherwise.
    """
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise ChildProcessError(f"a child ended with {os.WEXITSTATUS(status)}")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def torn(self: Checkpoints, version: Version, reason: str) -> None:
    for key in reversed(self.store.list(f"{self.folder(version)}/")):
        self.store.delete(key)


def main(folder: str, first: int, stride: int) -> None:
    for at in range(first, 2000, stride):
        bucket = f"{folder}/{at}"
        ended = forked(lambda bucket=bucket, at=at: killed(at, bucket))  # type: ignore[misc]
        forked(lambda bucket=bucket, at=at, ended=ended: goes_on(bucket, at, ended))  # type: ignore[misc]
        print(Path(f"{bucket}.json").read_text(), flush=True)
        if not ended:
            break


if __name__ == "__main__":
    if "torn" in sys.argv:
        Checkpoints.mark = torn  # type: ignore[method-assign]
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
