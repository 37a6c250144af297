"""Tries an optimizer of the user's on small tensors before the run begins: on whole ones, and on the same
ones cut in two.

A rule that takes a slice for the whole tensor trains on two workers, too, but to other weights than on one,
and nobody would notice.  The cut tensors show it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.code.imports import failure
from elastic.engine.optim.base import Optimizer, Rule
from elastic.errors import CodeError
from elastic.job import Job
from elastic.protocol.commit_record import Outcome
from storage.slices import Slice

STEPS = 3
"""Number of updates: the second is the first one with moments that are not zero."""
SHAPES = {"matrix": (6, 5), "block": (5, 4), "vector": (7,)}
"""Shapes of the tensors; "block" is a matrix inside a block."""
CUT = 2
"""The row at which they are cut."""


def check_rule(job: Job, rule: Rule) -> None:
    """Raises :class:`CodeError` if an optimizer of the user's cannot train in every layout.

    A rule that exchanges whole matrices (:attr:`Rule.prepare`) is not tried, and neither is any rule if the
    job needs GPUs and this machine has none.
    """
    gpu = job.workers.gpus > 0
    if ":" not in job.optim.kind or rule.prepare is not None or (gpu and not torch.cuda.is_available()):
        return
    named, device = f"optim.kind = {job.optim.kind!r}", torch.device("cuda" if gpu else "cpu")
    whole, parts = (
        _Tried(job, rule, device),
        [_Tried(job, rule, device, 0, CUT), _Tried(job, rule, device, CUT)],
    )
    try:
        for step in range(1, STEPS + 1):
            for tried in (whole, *parts):
                tried.update(step)
    except Exception as error:  # the user's code may raise anything
        raise CodeError(
            f"{named} failed with {failure(error)} on parameters of shapes {[*SHAPES.values()]}; "
            "correct its update()"
        ) from error
    if wrong := next((wrong for each in (whole, *parts) if (wrong := each.wrong)), ""):
        raise CodeError(
            f"{named} {wrong}; update() must change the values, moments and scalars that it gets, in place"
        )
    for name, value in whole.values.items():
        if not torch.isfinite(value).all():
            kind, _, of = name.partition(" of ")
            raise CodeError(
                f"{named} makes {kind} of a {of} that are not finite, from finite gradients; correct "
                "its update()"
            )
        halves = [each.values[name] for each in parts]
        cut = torch.cat(halves) if value.dim() else halves[0]
        if not torch.equal(value, cut):
            apart = float((value.double() - cut.double()).abs().max())
            raise CodeError(
                f"{named} gives {name} other bits if the tensor is cut in two (they differ by "
                f"{apart:.2g}): make the rule elementwise, or use part.boxes; a rule that needs whole "
                "matrices exchanges them in Rule.prepare"
            )


class _Tried:
    """An optimizer with the rows from ``first`` to ``last`` of each tensor."""

    def __init__(
        self, job: Job, rule: Rule, device: torch.device, first: int = 0, last: int | None = None
    ) -> None:
        self.device, self.rows, self.steps = device, slice(first, last), job.steps
        values = self._drawn(0)
        boxes = {
            name: (
                Slice(name, "parameter", (first, *(0 for _ in shape[1:])), (last or shape[0], *shape[1:])),
            )
            for name, shape in SHAPES.items()
        }
        self.optimizer = Optimizer(
            job, rule, values, boxes, frozenset({"matrix", "block"}), SHAPES, frozenset({"block"})
        )
        self._before = self._tensors()

    def _drawn(self, seed: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=draw)[self.rows].clone().to(self.device)
            for name, shape in SHAPES.items()
        }

    def update(self, step: int) -> None:
        outcome = Outcome(min(step, self.steps), 1, 1.0, (1.0,), (1,), ((0,),), finite=True)
        self.optimizer.apply(self._drawn(step), outcome)

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"values of {name}": part.values for name, part in self.optimizer.parts.items()}
        for name, part in self.optimizer.parts.items():
            found |= {f"{moment!r} of {name}": value for moment, value in part.moments.items()}
        return found | {f"the scalar {name!r}": value for name, value in self.optimizer.scalars.items()}

    @property
    def wrong(self) -> str:
        """The end of a sentence about a tensor that was replaced or has another shape; "" if there is
        none.
        """
        now = self._tensors()
        for name, value in self._before.items():
            if (there := now.get(name)) is not value:
                return f"puts another tensor in the place of {name}" if there is not None else f"loses {name}"
        return f"adds {min(more)}" if (more := now.keys() - self._before.keys()) else ""

    @property
    def values(self) -> dict[str, Tensor]:
        return self._tensors()
