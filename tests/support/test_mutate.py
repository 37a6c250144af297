"""The script that breaks the product: it draws the same again, notices stale patches, never writes to the checkout, and tells the truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.mutate import (
    EXCUSED,
    LIMIT_S,
    Mutant,
    copy_of_the_tree,
    covered,
    draw,
    environment,
    every,
    mutants,
    named,
    patch,
    survivors,
    verdict,
)
from tests.support.patience import PATIENCE_S

SEED, DRAWN = 17, 30

SOURCE = b'''
LIMIT = 3


def capped(values: list[int], most: int = 5) -> int:
    """Returns the sum, at most ``most``: \xc3\xa4."""
    total = 0
    for value in values:
        total += value
    if total > most and not values == []:
        return most
    return total
'''


def test_the_named_mutants_still_stand_where_they_were_thought_about() -> None:
    assert len(named()) >= 8
    assert all(mutant.applied((ROOT / mutant.file).read_bytes()) for mutant in named())


def test_a_patch_that_is_stale_is_an_error() -> None:
    with pytest.raises(LookupError, match="is 0 times in"):
        patch("stale", "elastic/engine/norm.py", "return no such text", "", "tests/engine/test_norm.py")
    with pytest.raises(LookupError, match="times in"):
        patch("ambiguous", "elastic/engine/norm.py", "return ", "", "tests/engine/test_norm.py")
    with pytest.raises(LookupError, match="is not at byte 1"):
        Mutant("moved", "x.py", 1, "total", "", ()).applied(SOURCE)


def test_an_excuse_is_of_a_mutant_that_the_source_has() -> None:
    assert set(EXCUSED) - {mutant.name for mutant in every()} == set(), "the code is another one now: think about the excuse again"


def test_the_same_seed_draws_the_same_mutants_and_another_one_others() -> None:
    drawn = draw(SEED, DRAWN)
    assert drawn == draw(SEED, DRAWN) != draw(SEED + 1, DRAWN)
    assert len(drawn) == DRAWN and len({mutant.file for mutant in drawn}) > 10
    parts = {part for part in ("actors", "elastic/state", "elastic/train", "storage") for file in covered() if file.startswith(part)}
    assert len(parts) == 4


def test_each_kind_of_change_is_made_once_and_nothing_but_code_is_changed() -> None:
    made = {(mutant.old, mutant.new) for mutant in mutants("elastic/state/wire.py", SOURCE)}
    assert {
        *{("total > most", "total <= most"), ("total > most", "total >= most"), ("not values == []", "values == []")},
        *{("values == []", "values != []"), ("total = 0", "pass"), ("0", "1"), ("total += value", "pass")},
        *{("return most", "return None"), ("total > most and not values == []", "total > most or not values == []")},
    } <= made
    assert not any("Returns" in old or old in ("3", "5", "list[int]") for old, _ in made), "no docstring, constant, default, annotation"


TOY = """
def test_it() -> None:
    from toy import larger
    assert larger(1, 2) == 2
"""


def test_a_broken_product_is_noticed_and_a_survivor_told(tmp_path: Path) -> None:
    """The tests of a toy pass with a change that they cannot see; the control is a change that they can."""
    (tmp_path / "test_toy.py").write_text(TOY)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    for body, noticed in (("b if b >= a else a", False), ("b if b <= a else a", True)):
        (tmp_path / "toy.py").write_text(f"def larger(a: int, b: int) -> int:\n    return {body}\n")
        assert ("test_it" in verdict(["test_toy.py"], tmp_path, LIMIT_S)) == noticed


def test_mutants_are_made_in_a_copy() -> None:
    """The copy is the tree whose code the tests of a mutant import."""
    mutant = named()[0]
    before = (ROOT / mutant.file).read_bytes()
    with copy_of_the_tree() as copy:
        (copy / mutant.file).write_bytes(mutant.applied(before))
        where = [sys.executable, "-c", f"import {mutant.file.removesuffix('.py').replace('/', '.')} as module; print(module.__file__)"]
        ran = subprocess.run(where, cwd=copy, env=environment(copy), capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        assert Path(ran.stdout.strip()) == copy / mutant.file
        assert (copy / mutant.file).read_bytes() != before == (ROOT / mutant.file).read_bytes()


@pytest.mark.full
@pytest.mark.timeout(4 * 3600)
def test_no_mutant_survives() -> None:
    """The mutants that passed all tests once, and thirty that are drawn.  ``EXCUSED`` says why a change of some is none."""
    assert survivors([*named(), *draw(SEED, DRAWN)]) == []
