"""A run records what its job asks to be made of checkpoints, and each checkpoint owes what was asked when it
was saved.
"""

from __future__ import annotations

import json

import pytest

from elastic.ids import Version
from elastic.protocol.lineage import Lineage
from elastic.runs import asked, branches, owed
from elastic.runs.run import Run
from elastic.train.errands import WORK, pay
from tests.runs.test_owed import listed, paid, run_of, save, started
from tests.support.toys import Sums


def test_a_checkpoint_owes_what_was_asked_under_which_it_was_saved() -> None:
    """The judge are the rules in words: an old checkpoint owes nothing, and the first multiple counts that
    comes after the change.

    The control is a run that asks for the same again, which changes nothing and writes nothing.
    """
    run = run_of(export={})
    for step in (8, 10, 14):
        save(run, step)
    assert listed(run) == []
    on = started(run, claim=1, generation=1, export={"every": 10})
    assert listed(on) == [], "10 was saved before"
    line: Lineage = ((1, 14), (2, 22))
    for step in (16, 20, 22):
        save(on, step, 2, (line[0], (2, step)))
    assert listed(on) == ["export 20"]
    often = started(on, claim=2, generation=2, export={"every": 4})
    line = (*line, (3, 26))
    for step in (24, 26):
        save(often, step, 3, (*line[:2], (3, step)))
    assert listed(often) == ["export 20", "export 24"]
    assert asked.of(often) == asked.of(started(often, claim=3, generation=3, export={"every": 4})), (
        "the control"
    )
    off = started(often, claim=4, generation=3, export={})
    for step in (28, 40):
        save(off, step, 4, (*line, (4, step)))
    assert listed(off) == ["export 20", "export 24"], "also of the last step nothing is asked any more"
    assert len(off.store.list("toy/asked/")) == 3


def test_a_run_that_is_started_again_with_the_same_settings_owes_no_period_twice() -> None:
    """The export of 10 is made before the restart, and 12 is saved after it.  The control: 20, of the next
    period.
    """
    run = run_of()
    save(run, 10)
    paid(run, 10)
    again = started(run, claim=1, generation=1, samples={"every": 10, "prompts": ["a"]})
    for step in (12, 20):
        save(again, step, 2, ((1, 10), (2, step)))
    assert listed(again) == ["export 20", "samples 20"]


def test_a_text_is_made_with_the_settings_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose job says something else makes it so, too, with code that it gives as an object."""
    run = run_of(export={}, samples={"every": 10, "prompts": ["then"]})
    save(run, 10)
    now = started(run, claim=1, generation=1, samples={"every": 10, "prompts": ["now"]})
    save(now, 20, 2, ((1, 10), (2, 20)))
    known = asked.of(now)
    prompts = [known.job(now.job, debt.version).samples.prompts for debt in owed.debts(now)]
    assert prompts == [("then",), ("now",)]
    given = now.job.replace(validation={"every": 10, "dataset": Sums})
    assert (
        isinstance(given.validation.dataset, str)
        and known.job(given, Version(10, 1)).validation == given.validation
    )
    seen = []
    monkeypatch.setitem(
        WORK, "samples", lambda run, job, version, progressed: (seen.append(job.samples.prompts) or {}, "")
    )
    for debt in owed.debts(now):
        assert pay(now, now.job, debt)[1]
    assert seen == prompts


def test_branches_record_what_they_ask_and_an_older_claim_does_not_overrule_a_newer_one() -> None:
    run = run_of(export={})
    save(run, 10)
    job = run.job.replace(steps=50, export={"every": 4})
    branches.begin(run.branches, job, run.job, Version(10, 1), 0.0, until=1, claim=1)
    branch = Run(job, run.store)
    save(branch, 12, 2, ((1, 10), (2, 12)))
    assert listed(branch) == ["export 12"]
    newer = started(branch, claim=3, generation=2, export={"every": 6})
    asked.begin(Run(run.job, run.store), 2, 2)  # of a coordinator that was replaced before it could write
    save(newer, 18, 3, ((1, 10), (2, 12), (3, 18)))
    assert listed(newer) == ["export 12", "export 18"]


def older(run: Run) -> Run:
    """Makes the run one that an older release has begun, which never recorded that its exports were changed."""
    key = f"{run.job.name}/job.json"
    begun = json.loads(run.store.get(key))
    assert begun.pop("asked") is True
    run.store.put(key, json.dumps(begun).encode())
    return run


@pytest.mark.parametrize(
    ("first", "now", "owes"),
    [
        ({"every": 10}, {}, []),
        ({}, {"every": 10}, [10, 20]),
        ({"every": 10}, {"every": 20}, [20]),
        ({"every": 10}, {"every": 10}, [10, 20]),
    ],
    ids=("turned off", "turned on", "less often", "as it was"),
)
def test_a_run_of_an_older_release_owes_by_the_job_that_starts_it_first(
    first: dict[str, int], now: dict[str, int], owes: list[int]
) -> None:
    """The older release did the same: it looked at all checkpoints by the job that it was started with last.

    A later change counts from then on.  The control: a run of this release owes for its checkpoints by what
    was asked before them.
    """
    for begun, expected in ((older, owes), (lambda run: run, [10, 20] if first else [])):
        run = begun(run_of(export=first))
        for step in (10, 14, 20, 22):
            save(run, step)
        again = started(run, claim=1, generation=1, export=now)
        assert listed(again) == [f"export {step}" for step in expected]
        more = started(again, claim=2, generation=2, export={"every": 4})
        save(more, 28, 3, ((1, 22), (3, 28)))
        assert listed(more) == [f"export {step}" for step in (*expected, 28)]


def test_a_branch_of_an_older_release_owes_from_its_own_beginning_by_the_job_that_starts_it_first() -> None:
    """Checkpoints before the branch owe as their documents say.  The control: the same run of this release."""
    for begun, expected in ((older, [10, 18]), (lambda run: run, [10, 16])):
        run = begun(run_of(export={"every": 10}))
        save(run, 10)
        job = run.job.replace(steps=50, export={"every": 8})
        branches.begin(run.branches, job, run.job, Version(10, 1), 0.0, until=1, claim=1)
        branch = Run(job, run.store)
        for step in (16, 18):
            save(branch, step, 2, ((1, 10), (2, step)))
        assert listed(branch) == ["export 10", "export 16"]
        assert listed(started(branch, claim=2, generation=2, export={"every": 18})) == [
            f"export {step}" for step in expected
        ]
