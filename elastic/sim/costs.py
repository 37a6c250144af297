"""The measured costs of a run, from which spot traces are replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil, isfinite
from typing import Any

from elastic.plan.layout import LayoutRule


@dataclass(frozen=True)
class Costs:
    """The times of a run in seconds, and what a step is.  ``elastic report RUN --costs costs.json`` writes
    them from the journal of a recorded run.
    """

    microbatches: int
    """Number of microbatches of a step, whatever the number of workers."""
    round_s: float
    """Time of a round, in which each worker computes at most one microbatch."""
    reform_s: float
    """Time from a plan until its members step, if each of them has its part of the state."""
    heal_s: float
    """Time that the same takes longer if parts of the state move to other members, or come from copies."""
    join_s: float
    """Time from a plan until its members step, if newcomers are among them."""
    bucket_s: float
    """Time from a plan until its members step, if the state comes from the bucket."""
    detect_s: float
    """Time from the loss of a machine until the coordinator knows of it."""
    decide_s: float
    """Time until all members of a lost world have answered the fence."""
    start_s: float
    """Usual time from a machine's coming until its worker could step."""
    ahead_s: float = 0.0
    """Part of ``reform_s`` and ``join_s`` in which the members connect, and which a world that has connected ahead
    saves; 0 if those two were measured in worlds that had connected ahead.
    """
    copy_s: float = 0.0
    """Time from a commit until the copies of its state are complete in host memory, at buddies too."""
    save_s: float = 60.0
    """Time from a commit until its state is in the bucket."""
    save_every: int = 100
    """Number of steps from one save to the next."""
    layout: LayoutRule = field(default_factory=LayoutRule)
    """The layouts that are allowed."""
    starts_s: Sequence[float] = ()
    """This time of each machine that came, in order; after the last one it begins anew.  If there are none, each
    machine takes ``start_s``.
    """
    about: str = ""
    """The run that was recorded."""

    def step_s(self, workers: int) -> float:
        """Returns the time of a step of so many workers."""
        return ceil(self.microbatches / workers) * self.round_s

    def start_of(self, number: int) -> float:
        """Returns the time that the machine which came after ``number`` others takes to start."""
        return self.starts_s[number % len(self.starts_s)] if self.starts_s else self.start_s

    def times(self, factor: float) -> Costs:
        """Returns the costs with all pauses ``factor`` times as long."""
        pauses = ("reform_s", "heal_s", "join_s", "bucket_s", "detect_s", "decide_s", "ahead_s")
        return replace(self, **{name: factor * getattr(self, name) for name in pauses})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Costs:
        """Returns the costs that ``text`` has as JSON.  Raises ValueError, with the name of the field, for one
        that is unknown, missing, or no number that makes sense.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ValueError(f"costs are JSON, and this is none: {error}") from None
        return Costs.of(value)

    @staticmethod
    def of(value: Any) -> Costs:
        """Returns the costs with these fields.  Raises ValueError as :meth:`from_json` does."""
        if not isinstance(value, Mapping):
            raise ValueError("costs are a JSON object with a field for each cost")
        known = {each.name: each for each in fields(Costs)}
        if wrong := sorted(value.keys() - known.keys()):
            raise ValueError(f"{wrong[0]}: there is no such cost; there are {', '.join(known)}")
        needed = [name for name in known if name not in _OPTIONAL]
        if missing := [name for name in needed if value.get(name) is None]:
            raise ValueError(f"{missing[0]}: this cost is missing; measure it, or write it into the file")
        numbers = {name: each for name, each in value.items() if name not in ("about", "layout", "starts_s")}
        starts_s = value.get("starts_s", ())
        if not isinstance(starts_s, Sequence) or isinstance(starts_s, str):
            raise ValueError(f"starts_s = {starts_s!r} must be a list of numbers of seconds")
        for name, number in [*numbers.items(), *(("starts_s", each) for each in starts_s)]:
            whole, least = name in _WHOLE, 1 if name in _WHOLE else 0
            if (
                isinstance(number, bool)
                or not isinstance(number, int if whole else (int, float))
                or not isfinite(number)
                or number < least
            ):
                kind = "a whole number" if whole else "a number of seconds"
                raise ValueError(f"{name} = {number!r} must be {kind} of at least {least}")
        costs = Costs(
            **numbers,
            layout=_layout_of(value.get("layout", {})),
            starts_s=tuple(starts_s),
            about=str(value.get("about", "")),
        )
        if not costs.round_s:
            raise ValueError("round_s = 0 must be greater than 0")
        return costs


def _layout_of(value: Any) -> LayoutRule:
    """Returns the rule with these fields; a replay has no axes that divide the model."""
    try:
        rule = LayoutRule(**{**value, "model": tuple(value.get("model", ()))})
    except (AttributeError, TypeError):
        raise ValueError(f"layout = {value!r} must be an object with fields of [parallel]") from None
    if rule.model:
        raise ValueError("layout.model: a replay has one worker a machine, which computes the whole model")
    return rule


_OPTIONAL = ("ahead_s", "copy_s", "save_s", "save_every", "layout", "starts_s", "about")
_WHOLE = ("microbatches", "save_every")
