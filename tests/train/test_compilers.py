"""The key of compiled code changes with all that the code depends on; a place that the user has chosen stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from elastic.train.machine import compilers
from elastic.train.machine.compilers import INDUCTOR_DIR, TRITON_DIR, compiled_key, place
from tests.support.toys import toy_job

KIND, CODE = "cpu, torch 2, 1 threads", "mine 012345678901"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)

    monkeypatch.setattr(compilers, "CPU", tmp_path / "cpuinfo")
    write("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 2000\n\nprocessor\t: 1\n")
    return write


def test_the_key_tells_apart_what_cannot_share_code(
    tmp_path: Path, cpu: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the run's name, its length, its workers nor the clock of the CPU make another key."""
    job = toy_job(tmp_path, compile=True)
    same = [
        compiled_key(other, CODE, KIND)
        for other in (job, job.replace(name="other", steps=77, workers={"max": 3}, seed=5))
    ]
    cpu("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2 avx512f\ncpu MHz\t\t: 3000\n\nprocessor\t: 1\n")
    same.append(compiled_key(job, CODE, KIND))
    assert len(set(same)) == 1 and len(same[0]) == 32
    changes = (
        {"precision": "bf16"},
        {"microbatch": 4},
        {"model_args": {"vocab": 29, "dim": 64}},
        {"recompute": "block"},
        {"numerics": 4},
    )
    others = [compiled_key(job.replace(**change), CODE, KIND) for change in changes]
    others += [
        compiled_key(job, "mine 999999999999", KIND),
        compiled_key(job, CODE, "NVIDIA H200, torch 2, 1 threads"),
    ]
    for text in ("model name\t: B\nflags\t\t: avx2 avx512f\n", "model name\t: A\nflags\t\t: avx2\n"):
        cpu(text)
        others.append(compiled_key(job, CODE, KIND))
    cpu("processor\t: 0\nmodel name\t: A\nflags\t\t: avx2 avx512f\n")
    for owner, name in ((torch, "__version__"), (torch.version, "git_version"), (compilers.sys, "version")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, "another")
            others.append(compiled_key(job, CODE, KIND))
    with monkeypatch.context() as patch:
        patch.setattr(compilers, "version", lambda package: f"another {package}")
        others.append(compiled_key(job, CODE, KIND))
    assert len({*same, *others}) == 1 + len(others)


def test_a_place_that_the_user_has_chosen_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: a process that has imported torch's compiler, which sets the variable by itself, and a
    job that compiles nothing.
    """
    for before in (INDUCTOR_DIR, TRITON_DIR):
        monkeypatch.delenv(before, raising=False)
    job = toy_job(tmp_path, compile=True)
    monkeypatch.setenv(INDUCTOR_DIR, str(tmp_path / "mine"))
    assert (
        place(job, CODE, KIND, tmp_path) is None
        and os.environ[INDUCTOR_DIR] == str(tmp_path / "mine")
        and TRITON_DIR not in os.environ
    )
    monkeypatch.setenv(INDUCTOR_DIR, default_cache_dir())
    assert (
        place(job.replace(compile=False), CODE, KIND, tmp_path) is None
        and os.environ[INDUCTOR_DIR] == default_cache_dir()
    )
    found = place(job, CODE, KIND, tmp_path)
    assert found is not None and os.environ[INDUCTOR_DIR] == str(found.folder) == str(
        tmp_path / compiled_key(job, CODE, KIND)
    )
    assert os.environ[TRITON_DIR] == f"{found.folder}/triton"
