"""The job file that the line of a command names, and the settings that the line gives over it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic.code.imports import check_packages
from storage.errors import StorageError, Unavailable

if TYPE_CHECKING:
    from elastic.config.command_line import Options
    from elastic.errors import ElasticError
    from elastic.job import Job


@dataclass(frozen=True)
class JobFile:
    """A job file as it is typed, and the settings that the line gives over it."""

    file: str
    options: Options

    @property
    def path(self) -> Path:
        return Path(self.file)

    @property
    def is_toml(self) -> bool:
        """True for a job file; some commands also take a bucket, or a file of a journal."""
        return self.file.endswith(".toml")

    @property
    def typed(self) -> str:
        """The words that name the same job on the line of another command.

        An option whose value may be a secret is shown without it: the pasted command then says that the value
        is missing.
        """
        return shlex.join([self.file, *self.options.to_show()])

    def load(self) -> Job:
        """Returns the job.  Raises :class:`JobError` for whatever is wrong in it."""
        from elastic.job import Job

        return Job.load(self.path, self.options.settings)

    def of_run(self, *reads: str) -> Job:
        """Returns the job of a command that finds a run and does not train it.

        The file may have mistakes in settings other than the name, the bucket and those that the command
        ``reads``: they are told as notes.
        """
        from elastic.runs.named import job_of_run

        job, problems = job_of_run(self.path, self.options.settings, reads)
        for each in problems:
            print(f"note: {each}", file=sys.stderr)
        if problems:
            more = "this command uses the settings that the run has stored"
            print(f"note: `elastic train` would refuse {self.path.name}; {more}", file=sys.stderr)
        return job

    def told(self, error: ElasticError | StorageError) -> str:
        """Returns the message of ``error``, with the source of the settings with which its lines begin: the
        file, or options of the line.

        The message about a bucket that does not answer gets the setting ``bucket`` as its beginning.
        """
        from elastic.config.settings import located, read_toml, source_of
        from elastic.job import Job

        text, settings = str(error), self.options.settings
        if not self.is_toml:
            return text
        if isinstance(error, Unavailable) and not text.startswith("bucket = "):
            bucket = str(settings.get("bucket", read_toml(self.path).get("bucket", "")))
            scheme, _, rest = bucket.partition("://")
            if error.object == "s3://…" and scheme == "s3":  # it may have a secret in it
                text = f"bucket = {error.object!r}: {text}"
            elif rest and error.object.startswith(bucket.rstrip("/")):
                text = f"bucket = {bucket!r}: {text}"
        return located(text, Job, source_of(self.path.name, settings))


def import_from_here() -> None:
    """Lets the code of this folder be imported, as Python does for a script.  Raises as
    :func:`check_packages`.
    """
    sys.path.insert(0, str(Path.cwd()))
    check_packages()
