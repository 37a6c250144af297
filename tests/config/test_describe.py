"""Every setting says what it means and what may change; what depends on that follows from the declarations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from elastic.config.describe import meaning_of, settings_page
from elastic.config.optimizers import OPTIMIZERS
from elastic.config.sections import Section
from elastic.config.settings import leaves
from elastic.config.values import Change, Free, Positive, change_at, change_of, free_settings
from elastic.data.cursor import SAMPLINGS
from elastic.engine.precision import PRECISIONS, WIRES
from elastic.job import Job
from elastic.plan.layout import USES
from elastic.runs import branches
from elastic.runs.branches import flat

pytestmark = pytest.mark.fast


class Sizes(Section):
    """Sizes."""

    width: Free[Positive] = 1
    """Width."""
    forgotten: Positive = 1


def problems(model: type[Section]) -> list[str]:
    """The settings that lack a change class or a meaning."""
    return [
        name
        for name, field in leaves(model).items()
        if change_of(field) is None or not re.match(r"`?\w.*\.$", meaning_of(field))
    ]


def test_every_setting_has_a_meaning_and_a_change_class() -> None:
    assert problems(Job) == []
    assert problems(Sizes) == ["forgotten"], "the control"


def test_the_trajectory_is_what_is_not_free() -> None:
    """The name is an exception: it says which run it is.  A run's folder may be moved, so its bucket is free."""
    optim = {
        "kind": "a.b:c",
        "args": {"x": 1},
        "momentum": 0.5,
        "decay": "l2",
        "moments": "bf16",
        "groups": [{"names": ["a"]}],
        "average": 0.5,
    }
    schedule = {"kind": "wsd", "decay_steps": 1}
    job = Job(
        name="run",
        bucket="/b",
        model_args={"dim": 1},
        init="other@best",
        loop="a.b:c",
        recompute="block",
        activations="int8",
        attention="flash-4",
        workers={"gpus": 1},
        precision="fp16",
        loss_scale=2.0,
        optim=optim,
        schedule=schedule,
        batch_ramp={"start": 4, "increment": 4, "samples": 9},
        reduction={"block": 2, "wire": "bf16"},
        spikes={"action": "skip", "z": 5, "window": 9, "microbatch_z": 7},
        data={"weights": [0.5, 0.5], "group_by_length": True},
    )
    fixed = {
        name for name, field in leaves(Job).items() if change_of(field) is not Change.FREE and "[" not in name
    }
    tables = {
        "model_args": "model_args.dim",
        "optim.args": "optim.args.x",
        "schedule.args": "schedule.args.x",
    }
    scheduled = Job(name="run", bucket="/b", schedule={"kind": "a.b:c", "args": {"x": 1}})
    assert {*flat(job.trajectory()), *flat(scheduled.trajectory())} == {
        tables.get(name, name) for name in fixed
    } - {"name"}
    assert {name for name, field in leaves(Job).items() if change_of(field) is Change.REFUSED} == {
        "name",
        "model",
        "model_args",
        "init",
        "optim.kind",
        "optim.moments",
        "numerics",
    }


def test_the_class_of_a_setting_is_found_by_its_name() -> None:
    assert {name: change_at(Job, name) for name in leaves(Job) if "[" not in name} == {
        name: change_of(field) for name, field in leaves(Job).items() if "[" not in name
    }
    assert (change_at(Job, "model_args.dim"), change_at(Job, "optim.args.x")) == (
        Change.REFUSED,
        Change.BRANCH,
    )


def test_a_section_is_wholly_free_only_if_each_of_its_settings_is() -> None:
    class Outer(Section):
        """Outer."""

        sizes: Sizes = Sizes()

    assert free_settings(Sizes) == {"width": True}
    assert free_settings(Outer) == {"sizes": {"width": True}}
    assert free_settings(Job)["workers"] is True


def test_the_page_has_a_row_for_each_setting() -> None:
    page = settings_page(Job, branches.change_of)
    rows = re.findall(r"^\| `([\w.\[\]]+)` \| .+ \| .+ \| .+ \| (free|branch|refused) \|$", page, re.M)
    assert sorted(rows) == sorted((name, str(branches.change_of(name))) for name in leaves(Job))
    assert page.count("\n## ") == len({name.rpartition(".")[0] for name in leaves(Job)})
    for row in (
        "| `bucket` | text | required | Folder or fsspec URL",
        '| `parallel.dp_shard` | integer ≥ 1 or `auto` | `"auto"` | ',
        "| `optim.betas` | list of 2 × number ≥ 0 and < 1 | `[0.9, 0.95]` | ",
        "| `data.weights` | list of number ≥ 0 | `[]` | ",
        "| `faults` | list of tables | `[]` | ",
        "| `faults[].point` | text | required | ",
        "| `model_args` | table | `{}` | ",
        "| `optim.groups` | list of tables | `[]` | ",
        "| `optim.groups[].names` | list of text | required | ",
    ):
        assert f"\n{row}" in page, row


def test_the_guide_has_the_page_that_the_command_prints() -> None:
    kept = (Path(__file__).parents[2] / "examples" / "guide" / "settings.md").read_text(encoding="utf-8")
    assert kept == settings_page(Job, branches.change_of), "elastic settings > examples/guide/settings.md"


def choices(setting: str) -> set[Any]:
    """Returns the words that a setting accepts by name."""
    annotation = leaves(Job)[setting].annotation
    return {
        word
        for each in (annotation, *get_args(annotation))
        if str(each).startswith("typing.Literal")
        for word in get_args(each)
    }


def test_the_choices_of_a_setting_are_the_rows_of_its_table() -> None:
    """A new row of a table needs its word among the choices of the setting; this test fails if it is missing."""
    assert choices("optim.kind") == set(OPTIMIZERS)
    assert choices("precision") == set(PRECISIONS)
    assert choices("reduction.wire") == set(WIRES)
    assert choices("parallel.use") == set(USES)
    assert choices("data.sampling") == set(SAMPLINGS)
    assert set(get_args(Literal["a", "b"])) == {"a", "b"} != choices("precision"), "the control"
