"""The command ``elastic owed``: lists the debts of a run for its checkpoints, or pays them in this process,
also while the run lives.
"""

from __future__ import annotations

from actors.cli.compute_commands import DEVICE
from actors.cli.job_file import import_from_here
from actors.cli.parser import command
from actors.terminal import say, show_table
from elastic.errors import ElasticError, JobError
from elastic.job import Job
from elastic.protocol.commit_record import told_of
from elastic.runs import asked as recorded
from elastic.runs import code
from elastic.runs import owed as debts_of
from elastic.runs.owed import Debt
from elastic.runs.run import Run
from storage.errors import Damaged


@command("owed", DEVICE)
def owed(job: Job, /, pay: bool = False, accept_code: bool = False) -> int:
    """Lists the exports, samples and validations that a run owes, or does them.

    pay: do them now, in this process, also those that were given up
    accept_code: with --pay: use today's code, although other code made the checkpoint

    The debts and their settings are those that the run has recorded.  ``job`` says where the run is and how
    this process computes, and has the code that is given as objects.  Returns 1 if a debt was given up, or
    could not be paid now.  Raises :class:`JobError` if there is no such run.
    """
    import_from_here()
    if accept_code and not pay:
        raise JobError("--accept-code has no effect without --pay; add --pay, or leave --accept-code out")
    run, paid = Run.begun(job), True
    if pay:
        for debt in debts_of.debts(run):
            said, done = _pay(run, job, debt, accept_code)
            paid = paid and done
            if said:
                say(said)
    left = debts_of.debts(run)
    if not left:
        never = (
            ""
            if recorded.of(run).kinds
            else (": it was never asked for exports, samples or validations by spares")
        )
        say(f"{job.name} owes nothing{never}")
        return 0
    rows = []
    for debt in left:
        why, state = debt.failures[-1].why if debt.failures else "", "given up" if debt.given_up else "owed"
        rows.append((debt.version.step, debt.version.generation, debt.kind, len(debt.failures), why, state))
    show_table("step", "generation", "what", "attempts that failed", "last failure", "state", rows=rows)
    given_up = any(debt.given_up for debt in left)
    if given_up:
        say(
            "--pay tries again what was given up, as long as its checkpoint exists; the checkpoint is "
            "no longer kept for it"
        )
    return int(given_up or not paid)


def _pay(run: Run, job: Job, debt: Debt, accept_code: bool) -> tuple[str, bool]:
    """Pays ``debt`` in this process.  Returns the sentence about it, "" if somebody else was first, and
    whether it is done.
    """
    from elastic.train.alone.revisit import validate_here
    from elastic.train.errands import pay

    try:
        if debt.kind == debts_of.VALIDATION:
            _, found, held_out = validate_here(
                recorded.of(run).job(job, debt.version), debt.version.step, accept_code=accept_code
            )
            debts_of.note_done(run, debt, debts_of.validated(found, held_out))
            return told_of(debt.version.step, found), True
        if debt.kind == debts_of.SAMPLES:
            code.check_look(run, debt.version, run.job_at(debt.version), job, accept=accept_code)
    # its checkpoint is damaged or made by other code; other debts may be paid
    except (ElasticError, Damaged) as error:
        return f"{debt} failed: {error}", False
    return pay(run, code.with_objects(run.job.replace(workers=job.workers), job), debt)
