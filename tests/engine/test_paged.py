"""Paged initialisation gives the bits of plain torch, whatever the code does, and never holds more than the
tensors in use.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from elastic.engine.paged import PASSES, Pages, initialise
from elastic.errors import JobError, ModelError
from elastic.models.llama import build
from tests.support.initialised import Odd, Widest, plain
from tests.support.opcodes import opcodes
from tests.support.toys import Own

CPU = torch.device("cpu")
WHOLE = 2**28


def nothing(*arguments: Any) -> None:
    """Stands where a callback is expected."""


def paged(
    make: Callable[[], nn.Module], seed: int, resident: int, lay: Any = nothing
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Returns every tensor as it was kept last, the number of passes, and the largest number of bytes of
    pages at once.
    """
    found: dict[str, torch.Tensor] = {}
    passes, peak = initialise(
        make, CPU, seed, lambda name, whole: found.update({name: whole.clone()}), lay, nothing, resident
    )
    return found, passes, peak


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("make", "resident"), [(Odd, WHOLE), (Odd, 100_000), (Odd, 0), (Widest, 0), (Own, 0), (build, 0)]
)
def test_the_bits_are_those_of_plain_torch(make: Callable[[], nn.Module], resident: int) -> None:
    """N5: also where only one tensor at a time has memory."""
    found, passes, _ = paged(make, 7, resident)
    assert same(found, plain(make, 7))
    assert not same(found, plain(make, 8)), "negative control: a seed off by one"
    assert passes <= (1 if make in (Own, build) or resident == WHOLE else PASSES)


def test_a_page_that_comes_back_without_its_values_is_noticed() -> None:
    """Negative control: if nothing is laid aside although values are read again, the bits are others."""
    laid: list[str] = []

    class Forgetful(Pages):
        def _bring(self, pages: Any) -> None:
            for page in pages:
                page.aside = (
                    None if page.aside is None else torch.UntypedStorage(page.size, device="cpu").fill_(0)
                )
            super()._bring(pages)

    assert (
        same(paged(Odd, 7, 0, lambda name, size: laid.append(name))[0], plain(Odd, 7)) and "e.weight" in laid
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elastic.engine.paged.Pages", Forgetful)
        assert not same(paged(Odd, 7, 0)[0], plain(Odd, 7))


def test_randomness_outside_torch_is_seeded_and_left_alone() -> None:
    before, theirs = random.getstate(), numpy.random.get_state()[1].copy()  # type: ignore[index]
    assert torch.equal(paged(Odd, 7, WHOLE)[0]["drawn"], paged(Odd, 7, 0)[0]["drawn"])
    assert random.getstate() == before and (numpy.random.get_state()[1] == theirs).all()  # type: ignore[index]


class Deep(nn.Module):
    """Sixteen layers of 64 KiB, of which the constructor draws each, and ``init_weights`` draws each again."""

    def __init__(self, layers: int = 16, dim: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def init_weights(self) -> None:
        for layer in self.layers:
            nn.init.trunc_normal_(layer.weight)
            nn.init.zeros_(layer.bias)


def test_no_more_than_the_tensors_in_use_are_in_memory() -> None:
    """The bytes of all living storages, counted after each operation of the user's code; ``trunc_normal_``
    needs a few of its own.
    """
    most, kept = 0, 0

    def moved() -> None:
        nonlocal most
        living = {
            each.untyped_storage()._cdata: each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in TENSORS
        }
        most = max(most, sum(living.values()))

    def keep(name: str, whole: torch.Tensor) -> None:
        nonlocal kept
        kept += 1

    gc.collect()
    gc.freeze()  # what is here already is not looked at again
    try:
        passes, peak = initialise(Deep, CPU, 7, keep, nothing, moved, 0)
    finally:
        gc.unfreeze()
    largest, whole = 128 * 128 * 4, 16 * (128 * 128 + 128) * 4
    assert passes == 1 and kept >= 64
    assert 2 * largest <= peak <= 3 * largest
    assert 0 < most <= 6 * largest < whole / 2
    found, _, all_at_once = paged(Deep, 7, WHOLE)
    assert same(found, plain(Deep, 7)) and all_at_once == whole, (
        "control: with room for all of them, all stay"
    )


TENSORS = (torch.Tensor, nn.Parameter)

PEAK = """
import ctypes, re, sys
from pathlib import Path
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: with huge pages a process has memory that it has not touched
from tests.engine.test_paged import CPU, Deep, nothing
from tests.support.initialised import plain
from elastic.engine.paged import initialise
def highest():  # of this program alone: what getrusage says begins with the memory of the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = highest()
if sys.argv[1] == "paged":
    initialise(lambda: Deep(16, 3072), CPU, 7, nothing, nothing, nothing, 0)
else:
    plain(lambda: Deep(16, 3072), 7)
print((highest() - before) / 1024)
"""


@pytest.mark.full
def test_a_process_takes_no_more_memory_than_that() -> None:
    """Plain torch takes the memory of all 16 layers of 36 MiB; the paged initialisation that of three at
    most.  Both also take what ``trunc_normal_`` and the first use of torch take.

    Blocks below 32 MiB are no measure: glibc may keep what was freed.
    """
    mib = {
        how: float(
            subprocess.run(
                [sys.executable, "-c", PEAK, how], capture_output=True, text=True, check=True
            ).stdout.split()[-1]
        )
        for how in ("paged", "plain")
    }
    assert mib["plain"] - mib["paged"] > 13 * 36, mib


@pytest.mark.parametrize("resident", [WHOLE, 20_000, 0], ids=["all", "some", "one"])
def test_the_work_grows_as_the_number_of_tensors_does(resident: int) -> None:
    """A loop over the pages in memory in each operation would be 16 times the work for 4 times the tensors."""
    few, many = (opcodes(partial(paged, partial(Deep, layers, 8), 7, resident)) for layers in (100, 400))
    assert few < many < 4.5 * few


# ---- code that cannot be run page by page, or at all


def test_values_read_again_are_laid_aside_only_if_they_are_needed() -> None:
    class Twice(Deep):
        def init_weights(self) -> None:
            super().init_weights()
            with torch.no_grad():
                self.layers[3].weight.mul_(self.layers[5].weight)

    laid: list[tuple[str, int]] = []
    found, passes, _ = paged(Twice, 7, 0, lambda name, size: laid.append((name, size)))
    assert same(found, plain(Twice, 7))
    assert passes == 2 and laid == [("layers.3.weight", 2**16), ("layers.5.weight", 2**16)]


def test_memory_that_is_reached_without_an_operation_stays() -> None:
    class Reached(Deep):
        def init_weights(self) -> None:
            super().init_weights()
            first = self.layers[0].weight.detach().numpy()
            nn.init.ones_(self.layers[1].weight)
            nn.init.ones_(self.layers[2].weight)
            first[0] = 3.0
            self.layers[4].bias.data.fill_(sum(self.layers[4].weight[0].tolist()))

    found, passes, _ = paged(Reached, 7, 0)
    assert same(found, plain(Reached, 7)) and found["layers.0.weight"][0, 0] == 3.0 and passes <= PASSES


def test_no_room_for_values_that_are_read_again_ends_it() -> None:
    def full(name: str, size: int) -> None:
        raise JobError(f"no room for {name}")

    with pytest.raises(JobError, match=r"no room for layers\.\d+\.weight"):
        paged(Again, 7, 0, full)


class Again(Deep):
    """Reads all that it has written."""

    def init_weights(self) -> None:
        super().init_weights()
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.add_(1)


def test_an_error_of_the_users_code_is_theirs() -> None:
    class Wrong(Deep):
        def init_weights(self) -> None:
            super().init_weights()
            raise ZeroDivisionError("theirs")

    class Removes(Deep):
        def init_weights(self) -> None:
            super().init_weights()
            del self.layers[0].weight

    with pytest.raises(ZeroDivisionError, match="theirs"):
        paged(Wrong, 7, 0)
    with pytest.raises(ModelError, match=r"init_weights\(\) removed 'layers\.0\.weight' from the model"):
        paged(Removes, 7, 0)
