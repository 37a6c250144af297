"""Every error pickles, has an exit code, and stands in the tree of its module's docstring."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from elastic import errors
from elastic.errors import ElasticError, FencedOff, JobError, NoProgress, Refused

pytestmark = pytest.mark.fast


def tree(base: type[ElasticError]) -> Iterator[type[ElasticError]]:
    yield base
    for below in base.__subclasses__():
        yield from tree(below)


OURS = [kind for kind in tree(ElasticError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_pickles(kind: type[ElasticError]) -> None:
    error = kind("what happened; what to do")
    error.add_note("on node a")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == "what happened; what to do"
    assert again.__dict__ == error.__dict__


def test_attributes_travel() -> None:
    assert pickle.loads(pickle.dumps(FencedOff("late", lease=True))).lease
    assert not FencedOff("late").lease


def test_the_tree_is_drawn_in_the_docstring() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in OURS if f"{kind.__name__} " not in drawn] == []


def test_exit_codes() -> None:
    assert {kind.exit_code for kind in tree(JobError)} == {1}
    assert {kind.exit_code for kind in OURS if not issubclass(kind, JobError | NoProgress | Refused)} == {2}
    assert (Refused.exit_code, NoProgress.exit_code) == (1, 4)
    assert (errors.FINISHED, errors.STOPPED, errors.DIFFERS) == (0, 3, 5)
