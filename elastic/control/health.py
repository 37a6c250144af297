"""Judges the training itself, from what commits tell: layers whose gradient is dead, vanishes or explodes,
and a loss that stands still.

Only commits that tell the norms of layers count: one in ``watch.every`` steps, and each step whose gradient
is not finite.  What is known so far is a value, :class:`Health`, and each commit replaces it.  So a
coordinator that takes over, and a run that is resumed, go on where the last one was.  A step that is computed
again after a loss is not judged again.  Each warning is said once in a run for each condition and layer.

The usual norm of a layer is kept as the exponent of a power of two, which moves by at most one in each
commit.  So one wild step hardly moves it (as in the streaming median of Ma, Muthukrishnan and Sandler 2013),
and in most commits the journal has no change to record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elastic.control.rules import WatchRule
from elastic.control.skips import Skips, note
from elastic.protocol.commit_record import Outcome

WINDOW = 20
"""Number of recorded losses of which one mean is kept."""
SHOWN = 12
"""Largest number of layers that a sentence names one by one."""
EMPTY = "no terms"
"""The condition of a step without terms, as it stands in :attr:`Health.said`."""
ADVICE: dict[str, str] = {
    "dead": (
        "the loss does not depend on this layer: look for a product with zero, a detach() or an "
        "activation that is zero everywhere; if this is intended, freeze the layer with requires_grad "
        "= False"
    ),
    "vanishing": (
        "this layer hardly learns: put norms before the parts of a block (pre-norm), add residual "
        "connections, or change the initialisation"
    ),
    "exploding": (
        "lower optim.lr, or raise schedule.warmup_steps; an earlier checkpoint may be better to go on from"
    ),
}
"""The meaning of each condition, and what can be done."""


@dataclass(frozen=True)
class Health:
    """The knowledge of the training so far."""

    step: int = 0
    """The newest step that was judged."""
    records: int = 0
    """Number of commits that told all layers."""
    usual: dict[str, int] = field(default_factory=dict)
    """The usual norm of each layer's gradient, as the exponent of a power of two."""
    dead: dict[str, int] = field(default_factory=dict)
    """The layers whose gradient is zero, and for how many commits in a row."""
    vanishing: dict[str, int] = field(default_factory=dict)
    """The layers whose gradient is far smaller than the largest, and for how many commits in a row."""
    losses: tuple[float, ...] = ()
    """The losses of the present window."""
    means: tuple[float, ...] = ()
    """The mean losses of the newest complete windows."""
    said: tuple[str, ...] = ()
    """The warnings that were said, as "condition layer"."""


def judge(health: Health, outcome: Outcome, rule: WatchRule) -> tuple[Health, list[str]]:
    """Returns what is known after ``outcome``, and the new warnings."""
    if outcome.applies and not any(outcome.counts) and EMPTY not in health.said:
        samples = ", ".join(map(str, outcome.samples[0][:SHOWN]))
        sentence = (
            f"step {outcome.step} has nothing to learn from: the loss counted 0 terms in each of its "
            f"{len(outcome.counts)} microbatches, so nothing but weight decay and the optimizer's moments "
            f"of earlier steps changes weights; look whether all targets are masked (samples {samples})"
        )
        health, more = judge(replace(health, said=(*health.said, EMPTY)), outcome, rule)
        return health, [sentence, *more]
    if not outcome.layers or outcome.step <= health.step:
        return health, []
    norms = outcome.layer_norms
    if not outcome.finite:
        return _with_strange(replace(health, step=outcome.step), outcome)
    largest = max(norms, key=norms.__getitem__)
    dead = _counted(health.dead, (name for name, norm in norms.items() if norm == 0))
    faint = _counted(
        health.vanishing, (name for name, norm in norms.items() if 0 < norm < rule.vanishing * norms[largest])
    )
    usual = {
        name: _moved(health.usual.get(name), norm)
        for name, norm in norms.items()
        if norm or name in health.usual
    }
    after = replace(
        health,
        step=outcome.step,
        records=health.records + 1,
        dead=dead,
        vanishing=faint,
        usual=_same(health.usual, usual),
    )
    lasts, found = (
        f"in {rule.patience} records in a row, the last of step {outcome.step}",
        dict[str, tuple[list[str], str]](),
    )
    found["dead"] = [name for name, times in dead.items() if times >= rule.patience], f"is zero {lasts}"
    found["vanishing"] = (
        [name for name, times in faint.items() if times >= rule.patience],
        (
            f"is less than watch.vanishing = {rule.vanishing:g} of that of {largest}, {norms[largest]:.3g}, "
            f"{lasts}"
        ),
    )
    found["exploding"] = (
        [
            name
            for name, norm in norms.items()
            if health.records >= rule.patience and _explodes(health.usual.get(name), norm, rule)
        ],
        f"is more than watch.exploding = {rule.exploding:g} times its usual one at step {outcome.step}",
    )
    warnings = list[str]()
    for condition, (layers, words) in found.items():
        new = [name for name in layers if f"{condition} {name}" not in after.said]
        if new:
            after = replace(after, said=(*after.said, *(f"{condition} {name}" for name in new)))
            warnings.append(f"the gradient of {_names(new, norms)} {words}: {ADVICE[condition]}")
    return _with_loss(after, outcome, rule, warnings)


def watch(
    skips: Skips, health: Health, outcome: Outcome, rule: WatchRule, *, ends: bool
) -> tuple[Skips, Health, list[str]]:
    """Returns what is known of skipped steps and of layers after ``outcome``, and the sentences about it.

    The advice about a gradient that is not finite is part of the sentence about its step.  With ``ends`` no
    step follows.
    """
    skips, said = note(skips, outcome, rule, ends=ends)
    health, warnings = judge(health, outcome, rule)
    sentences = [*filter(None, (said, *warnings))]
    return skips, health, sentences if outcome.finite else ["; ".join(sentences)] * bool(sentences)


def _with_strange(health: Health, outcome: Outcome) -> tuple[Health, list[str]]:
    """Returns the advice for a gradient that is not finite.  The sentence of ``skips.py`` just before tells
    that the step is skipped, and names its samples.
    """
    ((layer, norm),) = outcome.layer_norms.items()
    if math.isfinite(outcome.loss):
        key = f"not finite {layer}"
        sentence = (
            f"the gradient of {layer} is the first one in the backward pass of step {outcome.step} that is "
            f"not finite ({norm}): look there for a division, a logarithm or an overflow"
        )
    else:
        key = "not finite loss"
        sentence = "look at these samples, and in the forward pass for a division, a logarithm or an overflow"
    return (health, []) if key in health.said else (replace(health, said=(*health.said, key)), [sentence])


def _with_loss(
    health: Health, outcome: Outcome, rule: WatchRule, warnings: list[str]
) -> tuple[Health, list[str]]:
    """Adds the loss, and the warning if the losses of the last ``rule.stationary`` records do not fall.

    The losses fall if the least-squares line through the means of the windows falls, so that one lucky or
    wild window counts for little.
    """
    losses = (*health.losses, outcome.loss)
    # the user's code may return any loss, even if the gradient is finite
    if not math.isfinite(outcome.loss):
        return health, warnings
    if len(losses) < WINDOW:
        return replace(health, losses=losses), warnings
    wanted = max(rule.stationary // WINDOW, 2)
    means = (*health.means, math.fsum(losses) / WINDOW)[-wanted:]
    health = replace(health, losses=(), means=means)
    rise = math.fsum((place - (wanted - 1) / 2) * mean for place, mean in enumerate(means))
    if not rule.stationary or len(means) < wanted or rise < 0 or "stationary" in health.said:
        return health, warnings
    half = wanted // 2
    before, now = (math.fsum(some) / half for some in (means[:half], means[-half:]))
    sentence = (
        f"the loss has not become lower in {wanted * WINDOW} records, the last of step {outcome.step}: "
        f"its mean was {before:.4g} in the first half of them and is {now:.4g} in the second; lower "
        "optim.lr, or end the run here; it may be enough that the schedule lowers the rate later"
    )
    return replace(health, said=(*health.said, "stationary")), [*warnings, sentence]


def _counted(before: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    return {name: before.get(name, 0) + 1 for name in names}


def _moved(exponent: int | None, norm: float) -> int:
    """Returns the exponent of the usual norm after ``norm``.  It stays while the norm is within a factor of
    two.
    """
    if not norm:
        assert exponent is not None
        return exponent
    if exponent is None:
        return round(math.log2(norm))
    distance = math.log2(norm) - exponent
    return exponent + (distance > 1) - (distance < -1)


def _same(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return before if before == after else after


def _explodes(exponent: int | None, norm: float, rule: WatchRule) -> bool:
    return bool(rule.exploding) and exponent is not None and norm > rule.exploding * 2.0**exponent


def _names(layers: list[str], norms: Mapping[str, float]) -> str:
    """Returns ``layers.0 (1.2e-9) and layers.1 (3.4e-9)``; of many layers, the first few and the number of
    the others.
    """
    shown = [f"{name} ({norms[name]:.3g})" for name in layers[:SHOWN]]
    if len(layers) > SHOWN:
        return f"{', '.join(shown)} and {len(layers) - SHOWN} other layers"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
