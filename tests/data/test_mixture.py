"""A dataset of several datasets gives the samples of its parts, and a job weighs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic.data.mixture import Mixture
from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.errors import DataError, JobError
from elastic.job import Job
from elastic.train.gauges.counters import Counters
from elastic.train.session import make_session
from tests.support.toys import Sums, toy_job

SUMS = "tests.support.toys:Sums"
ROWS = "tests.data.test_mixture:Rows"


class Rows:
    """A dataset that is nothing but rows of its number."""

    def __init__(self, samples: int, number: int, width: int = 3, lengths: bool = True) -> None:
        self.samples, self.number, self.width, self.documents = samples, number, width, False
        if not lengths:
            self.lengths = None  # type: ignore[assignment]

    def __len__(self) -> int:
        return self.samples

    def read(self, ids: tuple[int, ...]) -> dict[str, Tensor]:
        assert all(0 <= sample < self.samples for sample in ids)
        return {"tokens": torch.tensor([[self.number, sample, *[0] * (self.width - 2)] for sample in ids])}

    def lengths(self, ids: tuple[int, ...]) -> list[int]:
        return [10 * self.number + sample for sample in ids]

    def fingerprint(self) -> str:
        return f"rows-{self.samples}-{self.number}"


def part(samples: int, number: int, **more: Any) -> dict[str, Any]:
    return {"dataset": ROWS, "args": {"samples": samples, "number": number, **more}}


@pytest.mark.fast
def test_samples_come_from_their_parts_in_the_order_asked() -> None:
    mixture = Mixture([part(3, 0), part(2, 1), part(4, 2)])
    assert len(mixture) == 9 and mixture.sizes == [3, 2, 4]
    every = [(number, sample) for number, size in enumerate((3, 2, 4)) for sample in range(size)]
    for ids in ((0,), (8, 0, 3, 4, 2, 5, 0), tuple(range(9)), (4, 4)):
        assert [tuple(row[:2]) for row in mixture.read(ids)["tokens"].tolist()] == [
            every[sample] for sample in ids
        ]
        assert mixture.lengths(ids) == [10 * every[sample][0] + every[sample][1] for sample in ids]
    for sample in (-1, 9):
        with pytest.raises(IndexError, match=f"there is no sample {sample} in a mixture of 9 samples"):
            mixture.read((sample,))


@pytest.mark.fast
def test_the_fingerprint_is_of_all_parts_in_order() -> None:
    told = {
        Mixture(parts).fingerprint()
        for parts in ([part(3, 0), part(2, 1)], [part(2, 1), part(3, 0)], [part(3, 0)], [part(3, 0)] * 2)
    }
    assert len(told) == 4
    assert (
        Mixture([part(3, 0), part(2, 1)]).fingerprint()
        == Mixture([part(3, 0, width=9), part(2, 1)]).fingerprint()
    ), "the control"


def test_prepared_tokens_are_mixed_with_their_documents(tmp_path: Path) -> None:
    for name, text in (("a", "ab" * 40), ("b", "xyz" * 30)):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare(tmp_path / f"{name}.txt", str(tmp_path / name))
    args = [{"path": str(tmp_path / name), "seq_len": 8, "documents": True} for name in ("a", "b")]
    mixture, (first, second) = (
        Mixture([{"args": each} for each in args]),
        [TokenDataset(**each) for each in args],
    )
    assert (mixture.vocabulary, mixture.documents) == (257, True)
    batch = mixture.read((len(first), 0))
    for row, (dataset, sample) in enumerate(((second, 0), (first, 0))):
        assert all(torch.equal(batch[name][row], value[0]) for name, value in dataset.read((sample,)).items())


@pytest.mark.fast
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "data.args.parts is empty"),
        (
            [{"dataset": SUMS}, {"weight": 2}],
            (
                r"parts\[1\] has 'weight'; a part is a table with dataset and args; the weights belong "
                r"in data.weights"
            ),
        ),
        (["x"], r"data.args.parts\[0\] is 'x'; a part is a table with dataset and args"),
        ([part(3, 0), part(0, 1)], r"data.args.parts\[1\] has no samples"),
        (
            [{"args": {"path": "/nothing", "seq_len": 8}}],
            (
                r"data.args.parts\[0\]: data.args.path = "
                r"'/nothing' holds no dataset"
            ),
        ),
        (
            [{"dataset": "builtins:object"}],
            (
                r"data.args.parts\[0\].dataset = 'builtins:object' has no "
                r"__len__\(\)"
            ),
        ),
    ],
    ids=str,
)
def test_parts_that_are_none_are_named(parts: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        Mixture(parts)


@pytest.mark.fast
def test_parts_that_do_not_fit_are_named() -> None:
    with pytest.raises(
        DataError,
        match=(
            r"a sample of one part has "
            r"{'tokens': \(\[3\], .*another part has {'tokens': \(\[5\].*give all parts the same shapes"
        ),
    ):
        Mixture([part(3, 0), part(3, 1, width=5)]).read((0, 4))
    with pytest.raises(DataError, match=r"data.args.parts\[1\] has no lengths\(\)"):
        Mixture([part(3, 0), part(3, 1, lengths=False)]).lengths((0,))


# ---- in a job


def mixed(folder: Path, weights: list[float], **changes: Any) -> Job:
    parts = [{"dataset": SUMS, "args": {"samples": samples}} for samples in (48, 32, 80)]
    return toy_job(
        folder,
        data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}, "weights": weights},
        **changes,
    )


@pytest.mark.fast
@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (
            [0, 0, 0],
            (
                r"data.weights = \[0.0, 0.0, 0.0\]: at least one part of a mixture must have a weight "
                r"above 0"
            ),
        ),
        ([-1, 2, 3], "data.weights"),
        (
            [0.123456, 0.2, 0.3],
            (
                r"in whole numbers, whose sum is \d+ and may be at most 10000; round the weights to at "
                r"most four digits"
            ),
        ),
    ],
    ids=str,
)
def test_weights_by_which_nothing_can_be_drawn_are_refused(
    tmp_path: Path, weights: list[float], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        mixed(tmp_path, weights)


def test_the_code_of_a_job_is_that_of_its_parts_too(tmp_path: Path) -> None:
    assert mixed(tmp_path, []).code().count(SUMS) == 3
    assert len(Sums(samples=3)) == 3


@pytest.mark.fast
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"dataset": SUMS, "weights": [1, 2]},
            f"data.weights has 2 numbers, and data.dataset = '{SUMS}' has no parts; give each part one",
        ),
        (
            {"dataset": "elastic.data.mixture:Mixture", "args": {"parts": [part(64, 0)]}, "weights": [1, 2]},
            "has 1 part; give each",
        ),
    ],
    ids=str,
)
def test_weights_that_do_not_fit_the_parts_are_refused(
    tmp_path: Path, data: dict[str, Any], says: str
) -> None:
    """The control: without weights a mixture is one dataset, each sample once an epoch."""
    with pytest.raises(DataError, match=says):
        make_session(toy_job(tmp_path, data=data), Counters(tmp_path / "counters", create=True), prefetch=0)
    pool = mixed(tmp_path, [])
    session = make_session(pool, Counters(tmp_path / "more", create=True), prefetch=0)
    assert sorted(sample for step in range(1, 11) for sample in session.cursor.ids(step)) == list(range(160))
    session.close()
