"""A setting that would have no effect is refused, or told as a note if what it belongs to is only turned off."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.config.settings import leaves
from elastic.errors import JobError
from elastic.job import Job
from tests.support.toys import toy_job

OWN = "tests.engine.test_own_optimizer:MOMENTUM"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"optim": {"args": {"momentum": 0.9}}},
            (
                "optim.args = {'momentum': 0.9} has no effect with optim.kind = 'adamw', which takes its "
                "settings from [optim] itself, such as optim.betas; leave optim.args out, or name an "
                "optimizer of your own: optim.kind = 'pkg.module:RULE'"
            ),
        ),
        (
            {"optim": {"kind": "sgd", "args": {"nesterov": True}}},
            "optim.args = {'nesterov': True} has no .* as optim.momentum; ",
        ),
        (
            {"schedule": {"kind": "constant", "final": 0.2}},
            (
                "schedule.final = 0.2 has no effect with schedule.kind = 'constant', which has no final "
                "rate; leave schedule.final out, or set schedule.kind to 'cosine', 'linear' or 'wsd'"
            ),
        ),
        (
            {"schedule": {"kind": "rsqrt", "final": 0.0}},
            "schedule.final = 0 has no effect with schedule.kind = 'rsqrt', ",
        ),
    ],
)
def test_what_has_no_effect_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as refused:
        toy_job("/b", **settings)
    found, (begin, _, end) = str(refused.value), said.partition(".* ")
    assert found.startswith(f"Job: {begin}") and found.find(end) >= 0 and "\n" not in found


@pytest.mark.fast
@pytest.mark.parametrize(
    "settings",
    [
        {"optim": {"kind": OWN, "args": {"momentum": 0.9}}},
        {"optim": {"args": {}}},
        {"schedule": {"kind": "linear", "final": 0.2}},
        {"schedule": {"kind": "wsd", "final": 0.2, "decay_steps": 1}},
        {"schedule": {"kind": "constant", "final": 0.1}},
    ],
)
def test_what_has_an_effect_or_its_default_is_not(settings: dict[str, Any]) -> None:
    toy_job("/b", **settings)


OFF: list[tuple[dict[str, Any], list[str], str, dict[str, Any]]] = [
    (
        {"spikes": {"z": 4, "window": 64}},
        ["spikes.z", "spikes.window"],
        "spikes.action = 'none'",
        {"spikes": {"action": "warn"}},
    ),
    ({"watch": {"every": 0, "patience": 9}}, ["watch.patience"], "watch.every = 0", {"watch": {"every": 1}}),
    (
        {"copies": {"copy_every": 0, "link_share": 0.5}},
        ["copies.link_share"],
        "copies.copy_every = 0",
        {"copies": {"copy_every": 1}},
    ),
    (
        {"copies": {"buddy_every": 0, "cross_zone": True}},
        ["copies.cross_zone"],
        "copies.buddy_every = 0",
        {"copies": {"buddy_every": 1}},
    ),
    (
        {"validation": {"by": "spares"}, "workers": {"spares": 1, "max": 1}},
        ["validation.by"],
        "validation.every = 0",
        {"validation": {"every": 50}},
    ),
    (
        {"validation": {"every": 50, "min_delta": 0.1}},
        ["validation.min_delta"],
        "validation.patience = 0",
        {"validation": {"patience": 3}},
    ),
    (
        {"samples": {"every": 50, "prompts": ["a"], "seed": 3}},
        ["samples.seed"],
        "samples.temperature = 0",
        {"samples": {"temperature": 0.5}},
    ),
]


@pytest.mark.fast
@pytest.mark.parametrize(("settings", "names", "why", "on"), OFF, ids=[names[0] for _, names, _, _ in OFF])
def test_what_is_turned_off_is_told_as_a_note(
    settings: dict[str, Any], names: list[str], why: str, on: dict[str, Any]
) -> None:
    """The controls: the same settings with that turned on, and a job without any."""
    both = {"global_batch": 32, "microbatch": 2, "checkpoint": {"save_every": 50}}
    told = toy_job("/b", **both, **settings).warnings()
    assert [each.partition(" = ")[0] for each in told] == names and all(
        f"has no effect while {why}; " in each for each in told
    )
    assert (
        toy_job("/b", **both, **{name: each | on.get(name, {}) for name, each in settings.items()}).warnings()
        == []
    )
    assert toy_job("/b", **both).warnings() == [] and set(names) <= leaves(Job).keys()


@pytest.mark.fast
def test_it_is_told_of_which_weights_a_validation_is() -> None:
    """The controls have no average, or no validation."""
    both = {"global_batch": 32, "microbatch": 2, "checkpoint": {"save_every": 50}}
    average, every = {"optim": {"average": 0.99}}, {"validation": {"every": 50}}
    (said,) = toy_job("/b", **both, **average, **every).warnings()
    assert (
        "the run validates its weights, not their average" in said and "`elastic evaluate --average`" in said
    )
    assert toy_job("/b", **both, **average).warnings() == toy_job("/b", **both, **every).warnings() == []
