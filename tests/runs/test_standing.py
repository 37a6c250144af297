"""L4: a command judges a run by facts that it reads once, and another command that begins meanwhile is still
noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.ids import Version
from elastic.runs import restarts
from elastic.runs.begin import finished
from elastic.runs.run import Run
from elastic.runs.standing import Standing
from storage.errors import Exists
from storage.objects import ObjectStore
from tests.runs.test_begin import living, saved
from tests.runs.test_meanwhile import Counting

pytestmark = pytest.mark.fast


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the keys that are read, and the folders that are listed, in all buckets."""
    asked, opened = list[str](), ObjectStore.open

    def opens(url: str) -> ObjectStore:
        store = Counting(opened(url))
        store.asked = asked
        return store

    monkeypatch.setattr(ObjectStore, "open", opens)
    return asked


@pytest.mark.parametrize("kind", [Standing, Run], ids=("once", "the control: again and again"))
def test_l4_a_standing_reads_the_journal_and_the_claims_once(
    tmp_path: Path, counting: list[str], kind: type[Run]
) -> None:
    """L4: whichever checks a command makes, and in which order."""
    run, _ = living(tmp_path)

    def asked_by(call: Callable[[Run], object]) -> int:
        counting.clear()
        call(standing)
        return sum(
            any(folder in key for folder in ("/journal/", "/owner/", "/branches/")) for key in counting
        )

    standing = kind.look(run.job)
    checks: list[Callable[[Run], object]] = [
        finished,
        Run.end,
        Run.newest,
        lambda run: restarts.check(run, again=False),
    ]
    assert [asked_by(check) > 0 for check in (finished, checks[-1])] == [True, True]
    again = [asked_by(check) for check in checks]
    assert (not any(again)) == (kind is Standing), again


def test_l4_a_standing_stays_as_it_was_read_and_a_claim_after_it_is_refused(tmp_path: Path) -> None:
    """L4: the other command has begun the run, and saved, since.  The control: a new look."""
    run, _ = living(tmp_path)
    standing = Standing.look(run.job)
    assert standing.newest() == Version(5, 1)
    run.claim("elsewhere", "another life")
    saved(run, Version(10, 2), ((1, 5), (2, 10)))
    assert (standing.latest_claim(), standing.newest()) == (1, Version(5, 1))
    with pytest.raises(Exists):
        run.follows(standing.latest_claim())
    anew = Standing.look(run.job)
    assert (anew.latest_claim(), anew.newest()) == (2, Version(10, 2)) and run.follows(2) == 2


def test_l4_a_standing_that_takes_another_job_reads_its_state_for_that_job(tmp_path: Path) -> None:
    """L4: when a checkpoint was written is part of the state only if a rule of the job asks for it."""
    run, _ = living(tmp_path)
    standing = Standing.look(run.job)
    assert standing.state().history.written == ()
    changed = run.job.replace(checkpoint={"keep_last": 2, "keep_younger": "1h"})
    assert [version for version, _ in standing.agree(changed).state().history.written] == [Version(5, 1)]
