"""N1, N2, N3: what the coordinator writes and sends grows with the number of workers and not with its square.
Bytes and calls are counted.

``python -m tests.benchmarks.scale control`` measures seconds at up to 10,240 workers.
"""

from __future__ import annotations

import pytest

from elastic.plan.placement import classes_of
from elastic.protocol import member
from elastic.protocol.authority import WITNESSES
from tests.benchmarks.scale.control import CUT_CLASSES, DIVIDED, measure

SIZES = SMALL, LARGE = 64, 256
PHASES = ("join", "form", "fence", "form_again")


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, float], dict[str, float]]:
    return measure(SMALL), measure(LARGE)


def journal_of_a_worker(found: dict[str, float], size: int) -> float:
    return sum(found[f"{phase}_journal_bytes"] for phase in PHASES) / size


def test_n3_a_worker_costs_about_the_same_journal_in_a_larger_world(
    found: tuple[dict[str, float], dict[str, float]],
) -> None:
    """Snapshots come in between, so it is not exactly the same; the square would be four times as much."""
    small, large = map(journal_of_a_worker, found, SIZES)
    assert large < 2 * small and large < 10_000


def test_n3_a_worker_of_stages_costs_no_more_journal() -> None:
    """Each block of a Llama of 70 B has classes of its own if any number of stages may cut the model, 483 in
    all.  A worker tells those of the two stages that its run has.
    """
    assert classes_of(CUT_CLASSES) == CUT_CLASSES and len(CUT_CLASSES) == 483
    assert len(classes_of(CUT_CLASSES, DIVIDED.degrees)) == 15
    small, large = (journal_of_a_worker(measure(size, CUT_CLASSES, DIVIDED), size) for size in SIZES)
    assert large < 2 * small and large < 10_000


def test_n1_nobody_healthy_is_expelled_and_a_worker_costs_at_most_10_kb(
    found: tuple[dict[str, float], dict[str, float]],
) -> None:
    for each, size in zip(found, SIZES, strict=True):
        assert each["given_up_workers"] == 0 and each["fence_journal_bytes"] < 10_000 * size


def test_n1_the_answers_bring_each_commit_a_bounded_number_of_times(
    found: tuple[dict[str, float], dict[str, float]],
) -> None:
    small, large = (each["answers_bytes"] for each in found)
    assert large < 1.5 * LARGE / SMALL * small


def test_n1_the_control_lets_every_member_bring_the_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same count grows with the square."""
    monkeypatch.setattr(member, "SPEAKERS", 10**6)
    assert measure(LARGE)["answers_bytes"] > 2 * LARGE / SMALL * measure(SMALL)["answers_bytes"]


def test_n2_a_step_takes_at_most_30_bytes_for_each_microbatch(
    found: tuple[dict[str, float], dict[str, float]],
) -> None:
    assert all(each["journal_bytes_per_microbatch"] < 30 for each in found)


def test_n2_records_go_to_a_bounded_number_of_keepers(
    found: tuple[dict[str, float], dict[str, float]],
) -> None:
    assert all(each["copies_of_a_send"] <= WITNESSES for each in found)


def test_n3_a_plan_is_pickled_once_in_a_large_world(found: tuple[dict[str, float], dict[str, float]]) -> None:
    small, large = (each["order_bytes"] for each in found)
    assert large < 1.5 * LARGE / SMALL * small
