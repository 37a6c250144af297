"""A world that a library refuses to form says so in the library's words, and is not tried six times."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.report.story import Sentence
from tests.support.chaos import assert_nothing_left, trial
from tests.support.commands import user_job
from tests.support.commands import user_package as package

UNSET = """
import os, sys

class Unset(Walks):
    def fingerprint(self):
        if sys.argv[0].endswith("default_worker.py"):  # after the interface was chosen, and before a world forms
            os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
        return super().fingerprint()
"""


@pytest.mark.full
def test_an_interface_that_is_not_there_ends_the_run_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "unset")
    with open(tmp_path / "unset" / "code.py", "a") as code:
        code.write(UNSET)
    monkeypatch.syspath_prepend(tmp_path)
    quick = {"grow_debounce_s": 0.1}
    job = user_job(
        tmp_path, "unset", data={"dataset": "unset.code:Unset"}, workers={"min": 1, "max": 1}, deadlines=quick
    )
    run = trial(job, hash_it=False)
    assert (run.result.state, run.result.step, run.result.exit_code) == ("Failed", 0, 1), run.result
    words, said = (
        "ifa != nullptr. Unable to find address for: eth77",
        [line.text for line in run.lines if isinstance(line, Sentence)],
    )
    assert any(
        f"w1 cannot go on (setup: {words}): stop generation 1 of 1 worker; w1 is replaced" in text
        for text in said
    ), said
    assert "no world forms with w2 on node " in run.result.reason and words in run.result.reason, run.result
    assert not any("generation 3" in text for text in said)
    assert_nothing_left(run)
