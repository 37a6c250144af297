"""L7: these stories show which checkpoints a run gives up after a save, and that it never goes on from one
that it gave up.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.control.run import RunState
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.plan.retention import Keep
from elastic.protocol import events as ev
from elastic.protocol.actions import Retain
from elastic.protocol.commit_record import Validated
from tests.control.play import Play, reformed, rules, stepping

pytestmark = pytest.mark.fast


def saving(play: Play, last: int) -> Play:
    """Steps to ``last``, and every save arrives before the next step."""
    for step in range(play.run.step + 1, last + 1):
        play.step(step)
        if step % play.rules.save_every == 0:
            play.save(Version(step, play.generation), *play.plan.members)
    return play


def test_l7_after_a_save_the_run_counts_only_on_what_the_rules_keep() -> None:
    play = saving(stepping(2, save_every=5, keep=Keep(last=2, every=20)), 45)
    kept = tuple(Version(step, 1) for step in (20, 40, 45))
    assert play.run.history.saved == kept
    assert play.did(Retain) == [Retain(kept, ((1, 45),), None, (Version(0, 0),))]
    assert play.last.durable, "the next coordinator must not count on what this one has deleted"
    control = saving(stepping(2, save_every=5), 45)
    assert len(control.run.history.saved) == 9 and not control.did(Retain), (
        "the control: without a rule nothing is deleted"
    )


def test_l7_what_is_young_still_counts_and_no_longer_when_it_is_old() -> None:
    """A step takes a minute, a save comes every five minutes, and half an hour is young; the journal says
    when each was written.
    """
    play = stepping(2, save_every=5, keep=Keep(last=2, younger_s=1800.0))
    start = play.now
    for step in range(1, 61):
        play.now = start + 60.0 * step
        play.step(step)
        if step % 5 == 0:
            play.save(Version(step, play.generation), *play.plan.members)
    assert [each.step for each in play.run.history.saved] == [35, 40, 45, 50, 55, 60]
    assert play.run.history.written == tuple(
        (each, start + 60.0 * each.step) for each in play.run.history.saved
    )
    assert codec.decode_run(codec.encode(play.run)).history == play.run.history, (
        "so the next coordinator knows it, too"
    )
    play.now += 86400.0
    saving(play, 65)
    assert [each.step for each in play.run.history.saved] == [60, 65]
    control = saving(stepping(2, save_every=5, keep=Keep(last=2)), 60)
    assert [each.step for each in control.run.history.saved] == [
        55,
        60,
    ] and not control.run.history.written, "the control"


def test_l7_if_the_newest_is_damaged_the_one_before_is_there() -> None:
    """A checkpoint that is due to be deleted stays as long as there is a world that has begun from it."""
    saved = (Version(5, 1), Version(10, 1))
    play = Play(
        rules(max_workers=2, save_every=5, keep=Keep(last=2)), RunState.begin(2, 0.0, saved, ((1, 12),), 1)
    )
    play.tell(ev.Capacity(2))
    play.join("w1", "w2")
    play.here("w1", "w2")
    play.tell(
        ev.Broken(WorkerId("w1"), 2, 10, "damaged", "digest of shard-0 differs", version=Version(10, 1))
    )
    play.answer("w1", None)
    assert "at step 5 (bucket)" in play.answer("w2", None)
    saving(reformed(play), 15)
    (asked,) = play.did(Retain)
    assert asked.saved == play.run.history.saved == (Version(5, 1), Version(10, 3), Version(15, 3))
    assert asked.spared == (Version(5, 1),)


def test_l7_the_best_one_stays_and_nothing_goes_before_one_is_known() -> None:
    play = saving(stepping(2, save_every=5, keep=Keep(last=2, best=True)), 15)
    assert len(play.run.history.saved) == 3
    told(play, 16, 0.5)
    saving(play, 20)
    assert [each.step for each in play.run.history.saved] == [15, 20]
    saving(play, 35)
    assert [each.step for each in play.run.history.saved] == [15, 30, 35]
    told(play, 36, 0.25)
    saving(play, 40)
    assert [each.step for each in play.run.history.saved] == [35, 40]


def told(play: Play, step: int, loss: float) -> None:
    """The commit of ``step`` brings what the version before it loses on held-out samples."""
    commit = replace(play.commit(step), validated=Validated(loss, 1))
    play.tell(ev.StepDone(play.plan.members[0], play.generation, commit))
