"""A world that a library refuses to form says so in the library's words, and is not tried six times."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import Command, user_job
from tests.support.commands import user_package as package

UNSET = """
import os, sys

class Unset(Walks):
    def fingerprint(self):
        if sys.argv[0].endswith("default_worker.py"):  # after the interface was chosen, and before a world forms
            os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
        return super().fingerprint()
"""


def test_an_interface_that_is_not_there_ends_the_run_by_its_name(tmp_path: Path) -> None:
    package(tmp_path, "unset")
    with open(tmp_path / "unset" / "code.py", "a") as code:
        code.write(UNSET)
    quick = {"grow_debounce_s": 0.1}
    user_job(tmp_path, "unset", data={"dataset": "unset.code:Unset"}, workers={"min": 1, "max": 1}, deadlines=quick)
    command = Command(tmp_path, "train", "job.toml", "--address", "local")
    assert command.wait() == 1, command.text
    words = "ifa != nullptr. Unable to find address for: eth77"
    assert f"w1 cannot go on (setup: {words}): stop generation 1 of 1 worker; w1 is replaced" in command.text, command.text
    *_, last = (line for line in command.text.splitlines() if line.startswith("Failed at step 0"))
    assert "no world forms with w2 on node " in last and words in last, command.text
    assert "generation 3" not in command.text
