"""The command ``elastic owed``: lists what a run owes for its checkpoints, or does it in this process, also while the run lives."""

from __future__ import annotations

from rich.table import Column, Table

from actors.terminal import console, say
from elastic.errors import ElasticError
from elastic.job import Job
from elastic.protocol.commit_record import told_of
from elastic.runs import owed as debts_of
from elastic.runs.run import Run
from storage.errors import Damaged


def owed(job: Job, pay: bool) -> int:
    """Lists what the run owes by the settings of ``job``.  With ``pay`` it does that first, also what was given up.

    Returns 1 if something was given up.  Raises :class:`~elastic.errors.JobError` if there is no such run.
    """
    run = Run.begun(job)
    free = {name: getattr(job, name) for name in ("export", "samples", "checkpoint", "validation", "workers")}
    its = run.job.replace(**free)
    run = Run(its.with_objects({setting: each for setting, each in job.objects().items() if each in its.code()}), run.store)
    if pay:
        from elastic.train.errands import pay as do
        from elastic.train.revisit import evaluate_here

        for debt in debts_of.debts(run, its):
            if debt.kind == debts_of.VALIDATION:
                try:
                    found = evaluate_here(job, debt.version.step)[1]
                    debts_of.note_done(run, debt, debts_of.validated(found))
                    say(told_of(debt.version.step, found))
                except (ElasticError, Damaged) as error:  # its checkpoint is gone or damaged, or the code is another one; others may work
                    say(f"{debt} failed: {error}")
            elif said := do(run, run.job, debt)[0]:
                say(said)
    left = debts_of.debts(run, its)
    if not left:
        asked = debts_of.kinds(job)
        say(f"{job.name} owes nothing" if asked else f"{job.name} owes nothing: export.every and samples.every are 0")
        return 0
    table = Table("step", "generation", "what", "attempts that failed", Column("last failure", overflow="fold"), "state")
    for debt in left:
        why = debt.failures[-1].why if debt.failures else ""
        row = (str(debt.version.step), str(debt.version.generation), debt.kind, str(len(debt.failures)), why)
        table.add_row(*row, "given up" if debt.given_up else "owed")
    console.print(table)
    return int(any(debt.given_up for debt in left))
