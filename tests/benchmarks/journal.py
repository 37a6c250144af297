"""Measures how much of a journal is snapshots if each of its objects has one record: ``python -m
tests.benchmarks.journal``.

A run of 1,024 workers commits a step of 4,096 samples in each object, as when a step takes five seconds or
more.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from elastic.journal import codec
from elastic.plan.layout import LayoutRule
from elastic.protocol.events import StepDone
from storage.journal import Journal
from storage.objects import ObjectStore
from tests.control.play import stepping
from tests.control.test_journal_size import commit
from tests.support.journals import newest, records

WORKERS, SAMPLES, STEPS = 1024, 4096, 40


def main() -> None:
    play, store = (
        stepping(WORKERS, layout=LayoutRule(None, 1, 1, "all")),
        ObjectStore.open("memory://journal-benchmark"),
    )
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(store, "run", Path(folder), 0, codec.snapshot(play.run))
        for step in range(1, STEPS + 1):
            before = play.run
            play.tell(StepDone(play.plan.members[0], 1, commit(step, SAMPLES)))
            record = codec.record(
                journal.next, 0.0, StepDone(play.plan.members[0], 1, commit(step, SAMPLES)), before, play.last
            )
            journal.append(record, lambda known=play.run: codec.snapshot(known), durable=False)  # type: ignore[misc]
            assert journal.ship(60.0)
        journal.close()
    written = sum(len(store.get(key)) for key in store.list("run/journal/"))
    recorded = sum(len(json.dumps(each, separators=(",", ":"))) + 1 for each in records(store, "run"))
    segment = newest(store, "run")
    assert segment is not None and codec.fold(*segment) == play.run
    print(
        f"{STEPS} objects: {written / 1e6:.1f} MB, of which records {recorded / 1e6:.1f} MB; "
        f"{1 - recorded / written:.0%} are not records"
    )
    print(f"a snapshot has {len(json.dumps(codec.snapshot(play.run), separators=(',', ':'))) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
