"""G4: how far the tensors of two checkpoints are apart, against numpy over the whole tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from elastic.state.difference import Moved, compare
from storage.checkpoints import Checkpoints, Reader
from storage.errors import Damaged
from storage.objects import ObjectStore
from storage.slices import Tensor, Version
from tests.storage.states import State, save

MATRIX, VECTOR = (
    Tensor("layers.0.weight", "parameter", "F32", (7, 3)),
    Tensor("half", "parameter", "BF16", (5,)),
)
MOMENT, COUNT = (
    Tensor("layers.0.weight", "moment.exp_avg", "F32", (7, 3)),
    Tensor("updates", "scalar", "F32", ()),
)
_numbers = itertools.count()


def stored(*states: tuple[State, int]) -> list[Reader]:
    """Returns readers of checkpoints of these states, each written by so many members."""
    checkpoints = Checkpoints(ObjectStore.open(f"memory://difference-{next(_numbers)}"), "run")
    for step, (state, shards) in enumerate(states, 1):
        save(checkpoints, Version(step, 1), state, shards)
    return [checkpoints.open(Version(step, 1)) for step in range(1, len(states) + 1)]


def drawn(seed: int) -> tuple[State, np.ndarray, np.ndarray]:
    """Returns a state, its matrix, and its vector of bfloat16 as what these stand for."""
    draw = np.random.default_rng(seed)
    matrix = draw.standard_normal((7, 3)).astype("<f4")
    # bfloat16 is the upper half of float32
    vector = draw.standard_normal(5).astype("<f4").view("<u4") & 0xFFFF0000
    raw = (vector >> 16).astype("<u2").tobytes()
    state = {
        MATRIX: matrix.tobytes(),
        VECTOR: raw,
        MOMENT: (2 * matrix).tobytes(),
        COUNT: np.float32(seed).tobytes(),
    }
    return state, matrix.astype(float), vector.view("<f4").astype(float)


@pytest.mark.parametrize("shards", [(1, 1), (3, 2), (2, 5)])
def test_g4_norms_are_those_of_the_whole_tensors(shards: tuple[int, int]) -> None:
    """G4: in whatever layouts they were written.  The control: the same numbers are not those of other
    tensors.
    """
    (one, *first), (other, *second) = drawn(1), drawn(2)
    found = compare(*stored((one, shards[0]), (other, shards[1])), ("parameter",))
    assert (
        [each.tensor for each in found.moved] == [VECTOR, MATRIX]
        and not found.only_first
        and not found.only_second
    )
    for each, a, b in zip(found.moved, reversed(first), reversed(second), strict=True):
        expected = (np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(b - a))
        assert each.norms == pytest.approx(expected, rel=1e-12) and each.norms != pytest.approx(
            expected[::-1], rel=1e-3
        )
        assert each.largest == np.abs(b - a).max() and each.part == pytest.approx(expected[2] / expected[0])
        assert not each.equal and each.strange == (0, 0)


def test_g4_what_has_not_moved_and_what_is_not_finite() -> None:
    one, matrix, _ = drawn(1)
    broken = matrix.astype("<f4")
    broken[2, 1], broken[4] = np.nan, np.inf
    vector, weights = compare(*stored((one, 2), (one | {MATRIX: broken.tobytes()}, 2)), ("parameter",)).moved
    assert vector.equal and vector.part == 0.0 and vector.strange == (0, 0)
    assert not weights.equal and weights.strange == (0, 4) and weights.norms[2] == 0.0, (
        "of what is finite in both, nothing has moved"
    )
    assert weights.norms[1] == pytest.approx(
        np.linalg.norm(broken[np.isfinite(broken)].astype(float)), rel=1e-12
    )
    zero = Moved(MATRIX, first_square=0.0, moved_square=4.0)
    assert zero.part == np.inf and Moved(MATRIX).part == 0.0


def test_g4_kinds_and_tensors_of_one_side() -> None:
    (one, *_), (other, *_) = drawn(1), drawn(2)
    longer = Tensor("half", "parameter", "BF16", (6,))
    changed = {tensor: raw for tensor, raw in other.items() if tensor != VECTOR} | {longer: bytes(12)}
    pair = stored((one, 1), (changed, 1))
    found = compare(*pair, ("",))
    assert (
        {each.tensor for each in found.moved} == {MATRIX, MOMENT, COUNT}
        and found.only_first == (VECTOR,)
        and found.only_second == (longer,)
    )
    assert {each.tensor for each in compare(*pair, ("moment",)).moved} == {MOMENT}


def test_g4_bytes_that_changed_are_noticed() -> None:
    (one, *_), (other, *_) = drawn(1), drawn(2)
    first, second = stored((one, 1), (other, 1))
    file = f"{second.folder}/{second.manifest.files[0].name}"
    raw = bytearray(second.store.get(file))
    raw[-1] ^= 1
    second.store.delete(file)
    second.store.put_if_absent(file, bytes(raw))
    with pytest.raises(Damaged):
        compare(first, second, ("",))
