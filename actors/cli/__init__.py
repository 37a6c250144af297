"""The command ``elastic``: runs the command of a line, and returns its exit code.

Only the command that a line names is imported: help takes a tenth of a second, and a mistake in a job file
half of one.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence

from actors.cli.parser import read
from actors.terminal import console, forget, lasting, say
from elastic.errors import STOPPED, ElasticError, JobError
from storage.errors import StorageError, Unavailable

UNREAD = 141
"""Exit code of a command of ``TELLERS`` that has lost its reader: that of a program that SIGPIPE ends."""
TELLERS = ("status", "attach", "logs", "replay", "metrics")
"""The commands that end with their reader.  All others go on without one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code.

    The exit code is 0 if the run has finished, 1 for an error of the job or of the line, 2 if the platform
    gave up, and a repeat may help, 3 if the run was stopped and can be resumed, 4 if it was restarted in vain
    too often, and 5 if a run under faults was not as the undisturbed one.
    """
    words = sys.argv[1:] if arguments is None else arguments
    with contextlib.nullcontext() if words and words[0] in TELLERS else lasting():
        try:
            return _main(words)
        except BrokenPipeError:
            forget(sys.stdout)
            return UNREAD


def _main(words: Sequence[str]) -> int:
    file = None
    # for messages about a line that cannot be read
    console.job = next((shlex.quote(word) for word in words if word.endswith(".toml")), "")
    try:
        file, run = read(words)
        console.job = file.typed if file and file.is_toml else ""
        return run()
    except (ElasticError, StorageError) as error:
        say(file.told(error) if file else str(error), "elastic: ", "red")
        if isinstance(error, ElasticError):
            return error.exit_code
        # a repeat meets any other error of storage again
        return ElasticError.exit_code if isinstance(error, Unavailable) else JobError.exit_code
    except KeyboardInterrupt:
        say("interrupted; give the same command again to go on")
        return STOPPED
    finally:
        console.job = ""
