"""A node of the tests that never joins is named, with what it printed, long before the test itself would be
given up.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import nodes
from tests.support.nodes import NeverJoined
from tests.support.patience import PATIENCE_S


@pytest.mark.parametrize(
    ("command", "why"), [("exit 7", "ended with code 7"), ("sleep 600", "did not join within 0.1 s")]
)
def test_a_node_that_never_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, why: str
) -> None:
    monkeypatch.setattr(nodes, "_alive", dict)
    monkeypatch.setattr(nodes, "JOIN_S", PATIENCE_S if "exit" in command else 0.1)
    (tmp_path / "node-first.log").write_text("no port was free")
    with subprocess.Popen(["sh", "-c", f"exec {command}" if "sleep" in command else command]) as process:
        with pytest.raises(NeverJoined, match=f"(?s)node 'first' {why}.*no port was free"):
            nodes._await("first", process, tmp_path)
        process.kill()
