"""Wait, shrink or use a spare: the choice that is expected to cost the fewest accelerator-seconds.

A world that has ended can form again at once of the workers that are left (*shrink*), take in workers that are
there and were not members (*spare*), or stand still until workers that are starting have joined (*wait*).  A
world that steps has the first two of these choices.  Each choice costs pauses, in which all accelerators stand
still, and steps that take longer as long as workers are missing:

    shrink   a pause without newcomers, then slower steps: until the workers that start are taken in, or for ever
    spare    a pause with newcomers, another one when they are gone, and the step that breaks then
    wait     standing still, and then the same

The cost is an expectation over measured times (Unicron, 2401.00134, section 5, has the same sum for many jobs).
Whoever waits does so no longer than until waiting has cost what the next best choice would have cost: so the
choice costs at most twice what somebody would pay who knows the future (the ski-rental problem), and it is made
once for each world that ends, so it never flaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

SHRINK, SPARE, WAIT = "shrink", "spare", "wait"
TELLING = 2
"""Number of microbatches for each worker from which on the rounds of a step tell how long it takes."""


@dataclass(frozen=True)
class Times:
    """The measured times of a run in seconds."""

    reform_s: float
    """Pause in which a world forms without newcomers."""
    join_s: float
    """Pause in which a world forms with newcomers."""
    step_s: float
    """Time of a step."""
    microbatches: int = 0
    """Number of microbatches of a step, times the workers that compute one together; 0 if that is not known."""

    def tells(self, workers: int) -> bool:
        """Returns whether the rounds of a step of so many workers tell how long it takes."""
        return self.microbatches >= TELLING * workers

    @property
    def leave_s(self) -> float:
        """The cost of newcomers when they are gone: a pause, and the step that breaks."""
        return self.reform_s + self.step_s


@dataclass(frozen=True)
class Choice:
    """The choice, the reason, and the seconds for which the run waits at most."""

    what: str
    why: str
    wait_s: float = 0.0


def slower(few: int, many: int, microbatches: int) -> float:
    """Returns the share of the time that ``few`` workers lose, compared with ``many``.

    A step has as many rounds as the busiest worker has microbatches.  With few microbatches a worker more brings
    its share of the work.
    """
    if microbatches < TELLING * many:
        return 1 - few / many
    return 1 - ceil(microbatches / many) / ceil(microbatches / few)


def pays(times: Times, here: int, spares: int, hosts: int, stay_s: float) -> bool:
    """Returns whether a world that steps does better with ``spares`` than without: what :func:`choose` would say."""
    joins_s = times.join_s + hosts * times.leave_s
    return not here or joins_s <= stay_s * slower(here, here + spares, times.microbatches)


def choose(
    times: Times,
    here: int,
    *,
    spares: int = 0,
    hosts: int = 1,
    stay_s: float,
    coming: int = 0,
    coming_s: float = 0.0,
    ended: bool = False,
) -> Choice:
    """Returns the choice that costs least; of equal ones, the one that waits least.

    ``here`` workers are members, or can be.  ``spares`` more are there, on ``hosts`` that leave one by one, and
    ``coming`` more join in ``coming_s`` seconds; all stay ``stay_s``.  ``ended`` says that the world has ended, so
    that a pause is due anyway.
    """
    full = here + spares + coming

    def missed(workers: int) -> float:
        """Returns the seconds lost to slower steps of so few workers, and to the pause that ends that."""
        rate = slower(workers, full, times.microbatches)
        until_they_join_s = rate * coming_s + times.join_s + times.leave_s
        return min(rate * stay_s, until_they_join_s) if coming else rate * stay_s

    costs_s = {SHRINK: (times.reform_s if ended else 0.0) + missed(here)} if here else {}
    if spares:
        costs_s[SPARE] = times.join_s + hosts * times.leave_s + missed(here + spares)
    if coming and ended:
        costs_s[WAIT] = coming_s + times.join_s + times.leave_s
    order = (SPARE, SHRINK, WAIT)
    best, *others = sorted(costs_s, key=lambda what: (costs_s[what], order.index(what)))
    wait_s = coming_s + (costs_s[others[0]] - costs_s[WAIT] if others else 0.0) if best == WAIT else 0.0
    numbers = ", ".join(f"{costs_s[what] * full:.0f} if the run {_DOES[what]}" for what in (best, *others))
    return Choice(best, f"expected cost in accelerator-seconds: {numbers}", wait_s)


_DOES = {
    SHRINK: "goes on without newcomers",
    SPARE: "takes in the newcomers that are there",
    WAIT: "waits for workers that are starting",
}
