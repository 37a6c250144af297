"""Each error that the user's model raises about its arguments becomes a sentence that names setting, value
and place.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.engine.optim.adamw import ADAMW
from elastic.engine.optim.base import rule_of
from elastic.engine.parallelize import parallelize
from elastic.engine.world import World
from elastic.errors import CodeError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.plan.layout import Layout
from elastic.train.gauges.counters import Counters
from elastic.train.model import State, build_model, builder_of
from elastic.train.session import make_session
from storage.errors import Unavailable
from tests.support.toy_axes import registered
from tests.support.toys import toy_job

pytestmark = pytest.mark.fast

LLAMA = "elastic.models.llama:build"
HERE = "tests.train.test_model_args"


def narrow(dim: int) -> nn.Module:
    if dim > 8:
        raise KeyError("too wide")
    return nn.Linear("8", dim)  # type: ignore[arg-type]


def from_bucket() -> nn.Module:
    raise Unavailable("s3://bucket/table", "it does not answer")


def built(model: str, args: dict[str, Any]) -> nn.Module:
    job = toy_job("/bucket", model=model, model_args=args)
    return build_model(job, builder_of(job))


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (LLAMA, {"dim": "32"}, r"TypeError: .*'str' and 'int' \(in \S+llama.py, line \d+\)"),
        (
            LLAMA,
            {"dim": 10, "heads": 3},
            (
                r"ValueError: dim = 10 must be a multiple of 2 × heads = 6: "
                r".*llama.py"
            ),
        ),
        (LLAMA, {"dim": 9, "heads": 3}, r"dim = 9 must be a multiple of 2 × heads = 6"),
        (LLAMA, {"dim": 32, "heads": 4, "kv_heads": 3}, r"heads = 4 must be a multiple of kv_heads = 3"),
        ("json:dumps", {}, r"TypeError: dumps\(\) missing 1 required positional argument: 'obj'"),
        ("os:sep", {}, r"TypeError: 'str' object is not callable"),
        (f"{HERE}:narrow", {"dim": 9}, r"KeyError: 'too wide' \(in \S+test_model_args.py, line \d+\)"),
        (f"{HERE}:narrow", {"dim": 4}, r"TypeError: .* \(in \S+test_model_args.py, line \d+\)"),
    ],
)
def test_arguments_that_the_model_does_not_take(model: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError) as caught:
        built(model, args)
    text = str(caught.value)
    assert text.startswith(f"model_args = {args}: model = '{model}' failed with "), text
    assert (
        re.search(said, text) and text.endswith("; correct the arguments, or the model") and "\n" not in text
    ), text


TAKES = (
    "it takes preset, vocab, dim, layers, heads, kv_heads, hidden, dropout, tied, rope_base, rope_scaling, "
    "head_dim, qk_norm, norm_eps"
)


def wide(width: int, *, depth: int = 1) -> nn.Module:
    return nn.Linear(width, wdith=depth)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("model", "args", "said"),
    [
        (LLAMA, {"dims": 256}, f"has no argument 'dims'; {TAKES}; did you mean 'dim'?"),
        (LLAMA, {"preset": "qwen3-8b", "xyzzy": 1}, f"has no argument 'xyzzy'; {TAKES}"),
        (
            f"{HERE}:wide",
            {"width": 3, "Depht": 2},
            "has no argument 'Depht'; it takes width, depth; did you mean 'depth'?",
        ),
        (f"{HERE}:from_bucket", {"x": 1}, "has no argument 'x'; it takes none"),
    ],
)
def test_an_argument_that_there_is_not_is_named_with_the_nearest_one(
    model: str, args: dict[str, Any], said: str
) -> None:
    """A builder may hand it on to a class."""
    with pytest.raises(ModelError) as caught:
        built(model, args)
    name, value = [*args.items()][-1]
    assert str(caught.value) == f"model_args.{name} = {value!r}: model = '{model}' {said}"


def test_an_argument_that_the_builder_itself_has_wrong_is_its_own_error() -> None:
    """The control: nobody has given it."""
    with pytest.raises(
        ModelError,
        match=(
            r"failed with TypeError: .*'wdith' \(in \S+test_model_args.py, "
            r"line \d+\); correct the arguments"
        ),
    ):
        built(f"{HERE}:wide", {"width": 3})


def test_arguments_that_it_takes() -> None:
    """The control; and a bucket that does not answer is nobody's error."""
    built(LLAMA, {"dim": 32, "heads": 4, "kv_heads": 2})
    with pytest.raises(Unavailable):
        built(f"{HERE}:from_bucket", {})


def test_code_that_is_not_there_is_named_with_its_setting() -> None:
    with pytest.raises(
        CodeError,
        match=(
            r"^model = 'elastic.models.llama:nothing': the module "
            r"elastic.models.llama .* has no 'nothing'"
        ),
    ):
        builder_of(toy_job("/bucket", model="elastic.models.llama:nothing"))


def test_a_new_world_loads_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery builds from the code that was there when the process began, even if its files are gone by
    now.
    """
    (tmp_path / "vanishing.py").write_text(
        "from dataclasses import replace\n"
        "from elastic.engine.optim.adamw import ADAMW\n"
        "from tests.support.toys import own\n"
        "RULE = replace(ADAMW)\n"
        "def build(): return own()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    job = toy_job(
        tmp_path / "bucket", model="vanishing:build", model_args={}, optim={"kind": "vanishing:RULE"}
    )
    session = make_session(job, Counters(tmp_path / "counters", create=True), prefetch=0)
    (tmp_path / "vanishing.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    monkeypatch.delitem(sys.modules, "vanishing")
    importlib.invalidate_caches()
    world = World.imagined(Layout(1, 1), torch.device("cpu"))
    try:
        state = State(job, session.builder, session.rule, world, Version(0, 0))
    finally:
        world.close()
        session.close()
    assert (
        type(state.model.get_submodule("")).__name__.endswith("Own")
        and state.optimizer.rule is session.rule is not ADAMW
    )
    with pytest.raises(CodeError, match="vanishing"):  # the control: whoever loads it now fails
        builder_of(job)


def state_in(layout: Layout, folder: Path) -> State:
    """Returns the state of world rank 0 of ``layout``."""
    job = toy_job(folder / "bucket", model="tests.support.toys:own", model_args={})
    world = World.imagined(layout, torch.device("cpu"))
    try:
        return State(job, builder_of(job), rule_of(job), world, Version(0, 0))
    finally:
        world.close()


@pytest.mark.parametrize("rows", [2, 40])
def test_a_model_that_is_cut_as_its_layout_says_is_accepted(rows: int, tmp_path: Path) -> None:
    """The control of the two tests below.  With 40 members some parameters have fewer rows than there are
    members.
    """
    assert state_in(Layout(1, rows), tmp_path).shard.values


def test_a_model_that_is_not_cut_as_its_layout_says_is_refused(tmp_path: Path) -> None:
    """A toy axis cuts the moments, and nothing cuts the optimizer along it."""
    with (
        registered(),
        pytest.raises(
            AssertionError,
            match=(
                r"has memory of shape \(.+, and placement says "
                r"\(.+; the axes of"
            ),
        ),
    ):
        state_in(Layout(1, 1, (("opt", 2),)), tmp_path)


def test_a_model_without_one_of_its_parameters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An axis module that leaves a parameter out of the wrapped model, as a pipeline would, is not possible
    yet.
    """

    def without_mix(blueprint: nn.Module, world: World, job: Job) -> Any:
        del blueprint.mix
        return parallelize(blueprint, world, job)

    monkeypatch.setattr("elastic.train.model.parallelize", without_mix)
    with pytest.raises(
        AssertionError,
        match=(
            r"parameter 'mix.weight': the wrapped model of the member in "
            r"cell '' does not have it"
        ),
    ):
        state_in(Layout(1, 1), tmp_path)
