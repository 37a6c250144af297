"""The hash is the same for the same state, however its tensors are spread over files, and another one for any
other state.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support import state_hash as module
from tests.support.patience import PATIENCE_S
from tests.support.state_hash import state_hash

pytestmark = pytest.mark.fast

STATE = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.array([1, 2], dtype=np.int64),
    "exp_avg/b": np.zeros((2, 3), dtype=np.float32),
    "updates": np.array(3.0, dtype=np.float32),
}


def saved(path: Path, state: dict[str, np.ndarray]) -> Path:
    save_file(
        {name: np.ascontiguousarray(value) if value.ndim else value for name, value in state.items()}, path
    )
    return path


def test_it_is_what_the_docstring_says(tmp_path: Path) -> None:
    digest = hashlib.sha256()
    for name, dtype in (("a", "I64"), ("b", "F32"), ("exp_avg/b", "F32"), ("updates", "F32")):
        for part in (json.dumps([name, dtype, list(STATE[name].shape)]).encode(), STATE[name].tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    assert state_hash([saved(tmp_path / "s", STATE)]) == digest.hexdigest()


def test_the_spread_over_files_does_not_enter(tmp_path: Path) -> None:
    whole = state_hash([saved(tmp_path / "whole", STATE)])
    parts = [saved(tmp_path / f"part{i}", {name: STATE[name]}) for i, name in enumerate(STATE)]
    assert state_hash(parts) == state_hash(parts[::-1]) == whole


@pytest.mark.parametrize(
    "other",
    [
        {"b": STATE["b"] + np.float32(1e-6)},
        {"b": STATE["b"].reshape(3, 2)},
        {"b": STATE["b"].view(np.int32)},
        {"a": STATE["a"][::-1].copy()},
        {"exp_avg/b": -STATE["exp_avg/b"]},
        {"c": STATE["a"]},
    ],
)
def test_any_other_state_has_another_hash(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    """Negative controls: one value, the shape, the dtype, the order, the sign of zero, a name."""
    first = saved(tmp_path / "first", STATE)
    assert state_hash([first]) != state_hash([saved(tmp_path / "second", {**STATE, **other})])


def test_twice_the_same_name_or_nothing_is_an_error(tmp_path: Path) -> None:
    file = saved(tmp_path / "s", STATE)
    with pytest.raises(ValueError, match="twice the same"):
        state_hash([file, file])
    with pytest.raises(ValueError, match="no tensors"):
        state_hash([])


def test_it_stands_alone(tmp_path: Path) -> None:
    """Run as a program, isolated from our path, it prints the same and imports nothing of ours."""
    file = saved(tmp_path / "s", STATE)
    script = str(module.__file__)
    done = subprocess.run(
        [sys.executable, "-I", script, str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout.strip() == state_hash([file])
    assert "elastic" not in Path(script).read_text(encoding="utf-8")
