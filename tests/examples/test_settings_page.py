"""The page of settings says what ``Job`` says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from elastic.config.settings import leaves
from elastic.job import Job
from tests.examples.blocks import ROOT
from tests.examples.settings_page import docstrings, page

pytestmark = pytest.mark.fast
PAGE = ROOT / "examples" / "guide" / "settings.md"
ROW = re.compile(r"^\| `([\w.\[\]]+)` \| ([^|]+) \| ([^|]+) \| (free|new run) \| ([^|]*) \|$", re.MULTILINE)
ROWS = {setting: change for setting, _, _, change, _ in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_the_page_is_made_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.examples.settings_page > examples/guide/settings.md"


def test_the_page_has_every_setting() -> None:
    assert set(ROWS) == set(leaves(Job)) and len(ROW.findall(page())) == len(ROWS)


def test_the_meaning_is_the_docstring_below_a_setting() -> None:
    assert docstrings(Job)["global_batch"] == "Samples of one step, whatever the number of workers."
    assert "seed" not in docstrings(Job), "the control: one without a docstring"


def test_the_limits_are_those_of_the_code() -> None:
    said = {setting: value for setting, value, *_ in ROW.findall(page())}
    assert said["steps"] == "whole number ≥ 1" and said["optim.betas"] == "2 × number ≥ 0 and < 1"
    assert said["workers.gpus"] == "whole number ≥ 0 and ≤ 1" and said["copies.copy_every"] == 'whole number ≥ 0 or `"auto"`'
    assert said["seed"] == "whole number", "the control: one without limits"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("seed", 1),
        ("steps", 7),
        ("global_batch", 32),
        ("precision", "bf16"),
        ("optim.lr", 1.0),
        ("optim.kind", "my.module:RULE"),
        ("schedule.final", 0.5),
        ("data.sampling", "with_replacement"),
        ("workers.max", 5),
        ("copies.copy_every", 3),
        ("checkpoint.save_every", 3),
        ("deadlines.stall_s", 3),
        ("data.prefetch", 3),
        ("data.args", {"path": "elsewhere"}),
        ("on_driver_exit", "detach"),
    ],
)
def test_what_may_change_is_what_the_digest_leaves_out(setting: str, value: Any) -> None:
    before = Job(name="n", bucket="/b")
    section, _, name = setting.rpartition(".")
    after = Job(name="n", bucket="/b", **({section: {name: value}} if section else {name: value}))
    assert (before.digest == after.digest) == (ROWS[setting] == "free")
