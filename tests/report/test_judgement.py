"""A run under faults is judged by the undisturbed one: each assertion holds of a good run, and of no bad one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from elastic.protocol.commit_record import Outcome
from elastic.report.judgement import (
    Blow,
    Evidence,
    Finding,
    agrees,
    faults_struck,
    lived_on,
    nothing_left,
    rows_of,
    same_bits,
    same_end,
    same_losses,
    same_samples,
    sources_of,
    work_done,
)
from elastic.report.recoveries import Recovery
from elastic.report.timeline import WorldSpan

pytestmark = pytest.mark.fast


def outcome(step: int, generation: int = 1, loss: float = 1.0, sample: int = 0) -> Outcome:
    return Outcome(
        step, generation, loss, (loss, loss), (1, 1), ((2 * step,), (2 * step + 1 + sample,)), True
    )


STEPS = {step: outcome(step) for step in range(1, 11)}
CALM = Evidence("Finished at step 10", "a" * 64, STEPS, 20)
STRUCK = replace(CALM, steps={step: outcome(step, 1 + step // 6) for step in STEPS})
WORLDS = [
    WorldSpan(2, "2×1", "init", 0, 0, 0, first=True),
    WorldSpan(1, "1×1", "live", 6, 2, 0, first=False),
]
KILL = Blow(10.0, 5, "SIGKILL of w2", ("w2",))


def recovery(generation: int, known_at: float, reason: str, *, planned: bool = False) -> Recovery:
    return Recovery(generation, reason, planned, known_at, 0.1, 0.1, 0.1, 0.0, 0.0, 0.2, known_at + 0.5)


def of_a_good_run() -> list[Finding]:
    return [
        faults_struck(1, [KILL], {"w2": "killed by signal 9 (SIGKILL)"}, 10),
        same_end(CALM, STRUCK),
        same_bits(CALM, STRUCK, ""),
        same_samples(CALM, STRUCK),
        same_losses(CALM, STRUCK),
        work_done(CALM, STRUCK, WORLDS, 2, 1),
        lived_on([], [("w1", "w2"), ("w1",)], ["w1", "w2"]),
        sources_of({"live": 5, "host": 0, "bucket": 0}, WORLDS),
        nothing_left([]),
    ]


def test_a_good_run_agrees() -> None:
    assert [each.holds for each in of_a_good_run()] == [True] * 9
    assert agrees(of_a_good_run())


BAD: dict[str, Callable[[], Finding]] = {
    "no fault struck": lambda: faults_struck(1, [], {}, 10),
    "the fault came after the end": lambda: faults_struck(1, [replace(KILL, step=10)], {}, 10),
    "the victim lives": lambda: faults_struck(1, [KILL], {"w2": None}, 10),
    "it stopped": lambda: same_end(CALM, replace(STRUCK, end="Stopped at step 8")),
    "other bits": lambda: same_bits(CALM, replace(STRUCK, digest="b" * 64), "; 1 of 9 tensors differ"),
    "no checkpoint": lambda: same_bits(CALM, replace(STRUCK, digest=""), ""),
    "nothing at all": lambda: same_bits(replace(CALM, digest=""), replace(STRUCK, digest=""), ""),
    "another sample": lambda: same_samples(CALM, replace(STRUCK, steps={**STEPS, 4: outcome(4, sample=1)})),
    "a missing step": lambda: same_samples(
        CALM, replace(STRUCK, steps={step: each for step, each in STEPS.items() if step != 7})
    ),
    "a step too many": lambda: same_samples(CALM, replace(STRUCK, steps={**STEPS, 11: outcome(11)})),
    "no step": lambda: same_samples(replace(CALM, steps={}), replace(STRUCK, steps={})),
    "another loss": lambda: same_losses(CALM, replace(STRUCK, steps={**STEPS, 9: outcome(9, loss=1.5)})),
    "all done again": lambda: work_done(CALM, replace(STRUCK, microbatches_run=40), WORLDS, 2, 1),
    "a step less": lambda: work_done(CALM, replace(STRUCK, microbatches_run=18), WORLDS, 2, 1),
    "another process": lambda: lived_on(["w1"], [("w1", "w2"), ("w1",)], ["w1", "w2"]),
    "from the bucket": lambda: sources_of({"live": 0, "host": 0, "bucket": 7}, WORLDS),
    "from copies": lambda: sources_of({"live": 0, "host": 7, "bucket": 0}, WORLDS),
    "a segment": lambda: nothing_left(["segment elastic-toy-w1"]),
}


@pytest.mark.parametrize("name", BAD)
def test_each_assertion_fails_where_it_must(name: str) -> None:
    found = BAD[name]()
    assert found.holds is False, found
    assert found.said
    assert not agrees([*of_a_good_run(), found])


def test_what_nobody_saw_is_neither_good_nor_bad() -> None:
    unseen = [
        work_done(CALM, replace(STRUCK, microbatches_run=None), WORLDS, 2, 1),
        lived_on([], [("w1", "w9")], ["w1"]),
        sources_of(None, WORLDS),
    ]
    assert [each.holds for each in unseen] == [None] * 3
    assert agrees(unseen)


def test_a_loss_that_is_no_number_equals_itself() -> None:
    nan = {step: outcome(step, loss=float("nan")) for step in STEPS}
    assert same_losses(replace(CALM, steps=nan), replace(STRUCK, steps=nan)).holds


def test_each_change_of_worlds_has_its_faults() -> None:
    """The slow one changed no world, and the newcomer had no fault; the second kill struck while the first one
    was dealt with.
    """
    blows = [
        Blow(5.0, 3, "slow of w1", ("w1",)),
        KILL,
        Blow(10.3, 5, "SIGKILL of w3", ("w3",)),
        Blow(30.0, 8, "node_notice of node 12345678", ("12345678",)),
    ]
    worlds = {
        1: WORLDS[0],
        2: replace(WORLDS[1], again=1),
        3: WorldSpan(2, "2×1", "live", 7, 1, 0, first=False),
        4: WorldSpan(1, "1×1", "host", 9, 2, 0, first=False),
    }
    changes = [
        recovery(1, 1.0, "form", planned=True),
        recovery(2, 10.1, "w2 is lost (its process died)"),
        recovery(3, 20.0, "w4 joined", planned=True),
        recovery(4, 31.0, "node 12345678 will be taken", planned=True),
    ]
    rows = rows_of(blows, changes, worlds)
    assert [(each.fault, each.tier, each.redone) for each in rows] == [
        ("slow of w1", "", None),
        ("SIGKILL of w2 and SIGKILL of w3", "live", 1),
        ("(no fault)", "live", 0),
        ("node_notice of node 12345678", "host", 0),
    ]
    assert [None if each.seconds is None else round(each.seconds, 6) for each in rows] == [
        None,
        0.6,
        0.5,
        0.5,
    ], "what was stepped after a notice is no pause"


def test_two_notices_at_once_have_one_pause() -> None:
    """The reason of the pause names the first node only.  A machine that is taken later is no other fault."""
    blows = [
        Blow(30.9, 8, "node 12345678 was taken with notice", ("12345678",)),
        Blow(31.01, 8, "node 87654321 was taken with notice", ("87654321",)),
        Blow(20.0, 6, "slow of w1", ("w1",)),
    ]
    worlds = {2: WorldSpan(1, "1×1", "live", 8, 0, 0, first=False)}
    rows = rows_of(blows, [recovery(2, 31.0, "node 12345678 will be taken", planned=True)], worlds)
    assert [each.fault for each in rows] == ["slow of w1", f"{blows[0].said} and {blows[1].said}"]
