"""Runs one script in two processes, with a GPU each; the second process leaves the first one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from elastic.train.session import NCCL
from tests.support.commands import ROOT
from tests.support.processes import free_ports

LIMIT_S = 150


def first_of_two(script: str, *arguments: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns what rank 0 wrote to stdout and to stderr.  ``script`` gets its rank, a port to meet at, and
    ``arguments``; rank 0 must end well, and rank 1 is then killed if it still lives."""
    port = str(*free_ports(1))
    members = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), port, *arguments],
            cwd=ROOT,
            env=os.environ | NCCL | environment | {"CUDA_VISIBLE_DEVICES": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, errors = members[0].communicate(timeout=LIMIT_S)
    finally:
        for member in members:
            member.kill()
            member.communicate()
    assert members[0].returncode == 0, errors[-3000:]
    return out, errors
