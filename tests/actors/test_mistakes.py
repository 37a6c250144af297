"""L9: a user's mistake ends a run on a cluster as it ends a local one (``tests/train/test_mistakes.py``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from actors.cli import main
from tests.support.commands import assert_no_actor_left
from tests.train.test_mistakes import MISTAKES, written

TRIED = (
    "loss is detached",
    "loss asks for another name",
    "read returns a list",
    "read returns floats",
    "read raises",
    "model raises",
)


AT_ONCE = ("loss is detached", "read returns a list", "read raises")
"""Mistakes that fail with any weights and samples: each worker finds them before it joins."""
PLAIN = {
    "read returns floats": r"RuntimeError: .*torch\.FloatTensor",
    "model raises": "ValueError: a mistake of my own",
}
"""Errors that are told as they are, with the traceback below: a step has not tried whether the batch is at
fault.
"""


@pytest.mark.full  # the short run has the mean in test_errors.py
@pytest.mark.parametrize("mistake", TRIED)
def test_l9_a_mistake_ends_a_run_on_a_cluster_before_a_step_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """L9: an error that may be the samples' or a node's is tried by two workers in the first step.  Then the
    place is named, too.
    """
    monkeypatch.chdir(tmp_path)
    parts, said = MISTAKES[mistake]
    assert main(["train", written(tmp_path, parts)]) == 1
    shown = capsys.readouterr().out
    last = [line for line in shown.splitlines() if line.startswith("Failed at step 0 of 4: ")]
    assert len(last) == 1 and re.search(PLAIN.get(mistake, said), shown), shown
    assert not re.search(r"step +\d+/4  loss", shown), "no step was done"
    if mistake in AT_ONCE:
        assert re.search(said, last[0]) and "Traceback" not in shown and "form generation" not in shown, shown
    else:
        assert re.search(r"job error: \w+ at \S+\.py:\d+ in \w+ at step 1, again on w\d and w\d", last[0]), (
            shown
        )
    assert_no_actor_left("wrong")
