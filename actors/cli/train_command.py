"""The command ``elastic train``.  It imports Ray and PyTorch when the job is known to be in order."""

from __future__ import annotations

import sys

from actors.cli.job_file import JobFile, import_from_here
from actors.cli.parser import command
from actors.submitted import check_file
from actors.terminal import say
from elastic.code.imports import failure, less_memory, users_traceback
from elastic.errors import ElasticError, JobError
from storage.errors import StorageError
from storage.journal import latest_claim


@command("train")
def train(
    file: JobFile,
    /,
    local: bool = False,
    address: str | None = None,
    branch: bool = False,
    quiet: bool = False,
    prints: str | None = None,
    accept_code: bool = False,
    again: bool = False,
    resume: str = "latest",
) -> int:
    """Trains a job, or goes on with its run.

    local: train with one worker in this process, without Ray
    address: address of the Ray cluster (default: the cluster to which this command was submitted, or the
        cluster on which the run lives, or a new one on this machine)
    branch: go on from the newest checkpoint of a run although its settings were different
    quiet -q: print only errors, and how the run ended
    prints WORKERS: also show what these workers print, one or several such as w3,w5; `first` is one living
        worker, `all` is every worker (default: none)
    accept_code: go on from the newest checkpoint of a run although its code was different
    again: start a run although too many restarts in a row have saved no new step (watch.max_restarts)
    resume WORD: go on from a step of this run, on a new branch; or begin a new run that goes on from another
        run: RUN@STEP, RUN@best or RUN@latest
    """
    import_from_here()
    check_file(file.path)
    job = file.load()
    for warning in job.warnings() if not quiet else ():
        say(warning, "note: ", "yellow")
    from elastic.train.checks.bucket import open_bucket
    from elastic.train.checks.early import check_early

    # a run with a claim may live, and then it needs no code of this machine
    if not address and not latest_claim(open_bucket(job), job.name):
        check_early(job)
    if not quiet:  # off a terminal, too: on a busy machine the imports alone take ten seconds
        print(
            "checking the job: loading PyTorch, building the model, trying the data and the bucket",
            file=sys.stderr,
            flush=True,
        )
    from actors.cli.prints import Prints
    from actors.launch import launch
    from actors.screen import screen_for, show_result

    screen, words = (
        Prints(screen_for(job, quiet=quiet), prints),
        {"branch": branch, "accept_code": accept_code, "again": again},
    )
    try:
        result = launch(
            job, address=address, local=local, resume=resume, show=screen.show, look=screen.look, **words
        )
    except Exception as error:
        _tell_of_code(error, local)
        raise
    return show_result(result, job, local)


def _tell_of_code(error: Exception, local: bool) -> None:
    """Raises :class:`JobError` if an error is the user's: with --local the code of the job runs in this
    process.
    """
    if local and not isinstance(error, ElasticError | StorageError):
        print(users_traceback(error), end="", file=sys.stderr)
        less = less_memory(error)
        why = f"{failure(error)}; {less}" if less else failure(error)
        raise JobError(f"the job failed in this process: {why}; the traceback is above") from error
