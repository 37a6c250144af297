"""The warnings about gradients and the loss are a function of the records: the same after a takeover, a
change of worlds and a replay.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.control.health import WINDOW, Health, judge
from elastic.control.rules import WatchRule
from elastic.control.run import RunState
from elastic.ids import Version, WorkerId
from elastic.journal import codec
from elastic.journal.packed import pack_layers, unpack_layers
from elastic.protocol.commit_record import Outcome
from elastic.protocol.events import Fenced, StepDone
from elastic.report.replay import differences, tell
from tests.control.play import Play, outcome, stepping
from tests.control.test_takeover import take_over

pytestmark = pytest.mark.fast

RULE = WatchRule(patience=3)
LAYERS = ("embedding", "layers.0", "layers.1", "output")


def record(step: int, generation: int = 1, finite: bool = True, loss: float = 1.0, **norms: float) -> Outcome:
    """Returns a commit of 4 tokens that tells a norm of 1 for each layer but those in ``norms`` (``layers_1``
    for ``layers.1``).
    """
    told = dict.fromkeys(LAYERS, 1.0) | {name.replace("_", "."): norm for name, norm in norms.items()}
    layers = tuple(
        (name, (4 * norm) ** 2) for name, norm in told.items() if finite or not math.isfinite(norm)
    )
    return replace(outcome(step, generation), layers=layers, finite=finite, losses=(4 * loss,))


def said(records: Iterable[Outcome], rule: WatchRule = RULE) -> list[tuple[int, str]]:
    """Returns what is said after which step."""
    health, found = Health(), list[tuple[int, str]]()
    for each in records:
        health, warnings = judge(health, each, rule)
        found += [(each.step, warning) for warning in warnings]
    return found


# ---- gradients


def test_a13_a_zero_is_said_after_so_many_records_in_a_row_and_once() -> None:
    """A13: five rows of two zeros are not three in a row."""
    (found,) = said(record(step, layers_1=0.0) for step in range(10, 100, 10))
    assert found[0] == 30 and found[1].startswith(
        "the gradient of layers.1 (0) is zero in 3 records in a row, the last of step 30: "
    )
    assert said(record(step, layers_1=float(step % 3 == 0)) for step in range(1, 16)) == []
    two = said(record(step, layers_1=0.0, output=0.0 if step > 5 else 1.0) for step in range(1, 10))
    assert [(step, text.split(" is ")[0]) for step, text in two] == [
        (3, "the gradient of layers.1 (0)"),
        (8, "the gradient of output (0)"),
    ]


def test_a13_a_gradient_far_below_the_largest_vanishes() -> None:
    (found,) = said(record(step, layers_0=0.9e-6) for step in range(1, 9))
    assert (
        found == (3, found[1])
        and ("layers.0 (9e-07) is less than watch.vanishing = 1e-06 of that of embedding, 1, in 3 records")
        in found[1]
    )
    assert said(record(step, layers_0=1.1e-6) for step in range(1, 9)) == []
    assert said((record(step, layers_0=1e-9) for step in range(1, 9)), replace(RULE, vanishing=0.0)) == []


def test_a13_a_gradient_far_above_its_usual_norm_explodes() -> None:
    """A norm that grows slowly does not, however far; nor does one in the first records."""
    bursts = [record(step, layers_0=300.0 if step in (7, 9) else 1.0) for step in range(1, 12)]
    (found,) = said(bursts)
    assert (
        found[0] == 7
        and (
            "layers.0 (300) is more than watch.exploding = 100 times its usual one at step 7: lower optim.lr"
        )
        in found[1]
    )
    assert said(bursts, replace(RULE, exploding=0.0)) == []
    assert (
        said(
            record(step, layers_0=1.3**step, layers_1=1.3**step, embedding=1.3**step, output=1.3**step)
            for step in range(1, 60)
        )
        == []
    )
    assert said([record(1), record(2, layers_0=300.0)]) == []


def test_a_wild_step_does_not_move_what_is_usual() -> None:
    """Every third step is a thousand times as large, and is said at the first; the usual norm stays, so one
    of 150 is wild as well.
    """
    health = Health()
    for step in range(1, 31):
        health, _ = judge(
            health, record(step, layers_0=1000.0 if step % 3 == 0 else 1.0), replace(RULE, exploding=1e9)
        )
    assert health.usual["layers.0"] in (0, 1, 2) and health.usual["layers.1"] == 0
    assert len(judge(health, record(31, layers_0=1000.0), RULE)[1]) == 1


def test_a13_what_is_not_finite_is_named() -> None:
    (found,) = said([record(1), *(record(step, finite=False, layers_1=math.inf) for step in (2, 3))])
    assert found[0] == 2 and found[1].startswith(
        "the gradient of layers.1 is the first one in the backward pass of step 2 that is not finite"
    )
    (found,) = said(record(step, finite=False, loss=math.nan, output=math.nan) for step in (2, 3))
    assert found[0] == 2 and found[1].startswith("look at these samples, and in the forward pass")


def test_commits_without_layers_tell_nothing() -> None:
    """Journals of older versions, and most steps."""
    health = Health()
    assert all(judge(health, outcome(step, 1), RULE) == (health, []) for step in range(1, 9))


@given(st.lists(st.lists(st.floats(0.03, 10.0), min_size=4, max_size=4), max_size=60))
def test_norms_that_vary_as_they_do_in_a_healthy_run_are_not_wild(told: list[list[float]]) -> None:
    """No factor between any two is as much as the limits of exploding and vanishing.  (Usual norms are known
    to a factor of two.)
    """
    rule = replace(RULE, exploding=1000.0)
    records = (
        record(step, **dict(zip(("embedding", "layers_0", "layers_1", "output"), each, strict=True)))
        for step, each in enumerate(told, 1)
    )
    assert said(records, rule) == []


# ---- the loss


def losses(of: Callable[[int], float], steps: int, noise: float = 0.05) -> list[Outcome]:
    draw = random.Random(3)
    return [record(step, loss=of(step) + draw.gauss(0.0, noise)) for step in range(1, steps + 1)]


def test_a13_a_loss_that_stands_still_is_said_once() -> None:
    """A13: it falls for 100 records, and then stays; that is said once 200 records show it.  The controls
    fall on, in 200 records by no more than twice the noise of a single loss.
    """
    (found,) = said(losses(lambda step: max(3.0 - step / 50, 1.0), 2000))
    assert 300 <= found[0] <= 100 + 200 + 8 * WINDOW and found[1].startswith(
        "the loss has not become lower in 200 records, the last of step"
    )
    assert said(losses(lambda step: 3.0 - step / 2000, 2000)) == []
    assert said(losses(lambda step: 2.0 + step**-0.5, 400, noise=0.02)) == []
    assert said(losses(lambda step: 2.0, 1000), replace(RULE, stationary=0)) == []


def test_a_loss_that_is_not_finite_does_not_count_if_its_gradient_is() -> None:
    """Plus and minus infinity have no sum."""
    odd = [record(step, loss=(math.inf, -math.inf, math.nan)[step % 3]) for step in range(1, 100)]
    assert said(odd) == []
    mixed = [replace(each, step=2 * each.step) for each in losses(lambda step: 2.0 + step / 100, 400)]
    assert (
        len(
            said(
                sorted(
                    [*mixed, *(replace(each, step=2 * each.step + 1) for each in odd)],
                    key=lambda each: each.step,
                )
            )
        )
        == 1
    )


def test_a_step_without_terms_is_said_once() -> None:
    """A masking that leaves nothing trains on nothing, and its loss is 0.  The controls: a few terms, and a
    step that is skipped.
    """
    empty = [replace(record(step), counts=(0,), losses=(0.0,)) for step in range(1, 9)]
    (found,) = said([record(1), *empty[1:]])
    assert found[0] == 2 and found[1].startswith(
        "step 2 has nothing to learn from: the loss counted 0 terms in each of its 1 microbatches, so "
        "nothing but weight decay and the optimizer's moments of earlier steps changes weights; "
    )
    assert said([replace(empty[0], layers=())])[0][0] == 1, "also where no layers are recorded"
    assert said([replace(empty[0], counts=(1,))]) == said([replace(empty[0], finite=False, layers=())]) == []


def test_a_loss_that_rises_is_said() -> None:
    assert [text.split(" in ")[0] for _, text in said(losses(lambda step: 2.0 + step / 100, 400))] == [
        "the loss has not become lower"
    ]


# ---- the same ones, whatever happens


def reported(play: Play, each: Outcome) -> str:
    return play.tell(StepDone(play.plan.members[0], play.generation, each))


def test_a13_a_coordinator_that_takes_over_says_the_same() -> None:
    """A13: after each record, the next coordinator reads the journal and goes on; the control forgets what
    was known.
    """
    records = [record(step, layers_1=0.0) for step in range(1, 8)]
    rules = {"watch": RULE}
    undisturbed = stepping(2, **rules)
    expected = [reported(undisturbed, each) for each in records]
    assert [number for number, reason in enumerate(expected, 1) if "layers.1" in reason] == [3]
    for forgets in (False, True):
        for died in range(1, 7):
            play, found = stepping(2, **rules), list[str]()
            for each in records:
                found.append(reported(play, each))
                if each.step == died:
                    play = take_over(play)
                    play.run = replace(play.run, health=Health()) if forgets else play.run
            assert (found == expected) is not forgets or (forgets and died >= 5)
            assert forgets or play.run.health == undisturbed.run.health


def test_a13_a_step_that_is_computed_again_is_not_judged_again() -> None:
    """The members fall back to step 1; steps 2 and 3 then come again, in another generation."""
    health, warnings = Health(), list[str]()
    for step, generation in ((1, 1), (2, 1), (2, 2), (2, 3)):
        health, new = judge(health, record(step, generation, layers_1=0.0), RULE)
        warnings += new
    assert not warnings and health.dead == {"layers.1": 2}
    assert len(judge(health, record(3, 3, layers_1=0.0), RULE)[1]) == 1


def test_a13_what_a_fenced_member_remembers_counts() -> None:
    """World rank 0 dies before it has told the third record; another member brings it."""
    play = stepping(2, watch=RULE)
    for step in (1, 2):
        reported(play, record(step, layers_1=0.0))
    first, second = play.plan.members
    play.lose(first)
    held = (play.shard(second, Version(3, 1)),)
    said_now = play.tell(Fenced(WorkerId(second), 1, held, None, (record(3, layers_1=0.0),)))
    assert "the gradient of layers.1 (0) is zero in 3 records in a row, the last of step 3" in said_now


def journaled(play: Play, records: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Returns the journal's records of these commits, as text brings them back."""
    found = list[dict[str, Any]]()
    for each in records:
        before, event = play.run, StepDone(play.plan.members[0], play.generation, each)
        play.tell(event)
        found.append(
            json.loads(json.dumps(codec.record(each.step, float(each.step), event, before, play.last)))
        )
    return found


def test_a13_a_replay_tells_the_warnings_and_decides_the_same() -> None:
    """A13.  The control: another patience decides otherwise."""
    play = stepping(2, watch=RULE)
    begun = codec.snapshot(play.run, "this", play.rules)
    records = journaled(
        play, [record(1, layers_1=0.0), outcome(2, 1), *(record(step, layers_1=0.0) for step in (3, 4, 5, 6))]
    )
    text = [line for line in tell([(begun, records)])]
    assert [
        ("commits of steps" in line, "layers.1 (0) is zero in 3 records in a row, the last of step 4" in line)
        for line in text
    ] == [
        (True, False),
        (False, True),
        (True, False),
    ]
    assert (
        len(
            [
                line
                for line in tell([(begun, records)], layers=True)
                if "norms of step" in line and "layers.1 0," in line
            ]
        )
        == 5
    )
    assert list(differences([(begun, records)], "this")) == []
    impatient = codec.encode(replace(play.rules, watch=replace(RULE, patience=2)))
    assert [each.what for each in differences([({**begun, "rules": impatient}, records)], "this")] == [
        "reason",
        "reason",
    ]
    assert codec.fold(begun, records).health == play.run.health


# ---- the journal


NAMES = st.lists(
    st.sampled_from(
        ["embedding", "norm", "layers.0", "layers.1", "layers.2", "layers.02", "a.9", "a.10", "7", ""]
    ),
    max_size=8,
)


@given(NAMES, st.randoms())
def test_what_is_packed_comes_back(names: list[str], draw: random.Random) -> None:
    layers = tuple((name, draw.random()) for name in names)
    assert unpack_layers(json.loads(json.dumps(pack_layers(layers)))) == layers


def test_what_is_not_finite_comes_back() -> None:
    ((_, inf), (_, nan)) = unpack_layers(pack_layers((("a", math.inf), ("b", math.nan))))
    assert inf == math.inf and math.isnan(nan)


def test_a13_the_record_of_eighty_layers_takes_little_of_the_journal() -> None:
    """Once norms have settled, a record of 83 layers adds less than 1,300 bytes to the journal, and a step
    that tells none adds none.

    The control: the norms as a plain list would take more than twice as much.
    """
    draw = random.Random(1)
    names = ("embedding", *(f"layers.{number}" for number in range(80)), "norm", "output")

    def of(step: int, told: bool) -> Outcome:
        layers = tuple((name, draw.uniform(10.0, 20.0)) for name in names)
        return replace(outcome(step, 1), layers=layers if told else ())

    play, plain = stepping(2), stepping(2)
    sizes = [
        len(json.dumps(each, separators=(",", ":")))
        for each in journaled(play, [of(step, step % 2 == 0) for step in range(1, 19)])
    ]
    without = [
        len(json.dumps(each, separators=(",", ":")))
        for each in journaled(plain, [of(step, False) for step in range(1, 19)])
    ]
    assert sizes[4::2] == without[4::2]
    assert max(more - less for more, less in zip(sizes[5::2], without[5::2], strict=True)) < 1300
    assert len(json.dumps(codec.encode(of(1, True).layers))) > 2 * 1300


def test_the_run_of_an_older_journal_knows_nothing_yet() -> None:
    old = codec.encode(RunState.begin(1, 0.0))
    del old["health"]
    assert codec.decode_run(old).health == Health()
