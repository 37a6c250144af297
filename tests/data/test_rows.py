"""Datasets of rows, torch's map-style ones and those of Hugging Face, train as with torch's DataLoader, in Elastic's order."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from elastic.data.loader import batch_of
from elastic.data.rows import SAMPLED, Rows, dataset_of
from elastic.errors import DataError
from elastic.job import Job
from elastic.runs.data import OF_ROWS
from elastic.train.local import run_local
from elastic.train.preflight import preflight
from tests.support.chaos import exported_hash
from tests.support.commands import ROOT
from tests.support.plain_models import STEPS, TWO, WORDS, Net, job_of
from tests.support.ranks import Ranks
from tests.support.segments import train, train_here

HERE = "tests.data.test_rows"


class Classes(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset whose rows have a tensor, a numpy array and a number."""

    def __init__(self, count: int = 48) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        t = torch.tensor([(i * 3 + k * (1 + i % 5)) % WORDS for k in range(6)])
        return {"t": t, "y": ((t * t + t) % 3).numpy(), "i": i}


class Drawing(Classes):
    """Its rows have noise from torch's default generator, as augmentations do."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return super().__getitem__(i) | {"noise": torch.randn(6)}


class Padded(Classes):
    """Rows of many lengths, which its own function pads to the longest of a batch."""

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"t": torch.arange(1 + i % 5)}

    @staticmethod
    def collate_fn(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {"t": nn.utils.rnn.pad_sequence([row["t"] for row in rows], batch_first=True, padding_value=-1)}


class Columns:
    """The documented interface of ``datasets.Dataset`` with the format "torch".  That library is not needed here."""

    def __init__(self, count: int = 48) -> None:
        rows = [Classes()[i] for i in range(count)]
        self.columns = {"t": torch.stack([row["t"] for row in rows]), "y": torch.stack([torch.as_tensor(row["y"]) for row in rows])}
        self._fingerprint = "5c1f0d4a8f6b2e97"

    def __len__(self) -> int:
        return len(self.columns["t"])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return {name: column[key] for name, column in self.columns.items()}


class Batched(Columns):
    """Newer versions of that library also read several rows at once for a DataLoader."""

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        batch = self[keys]
        return [{name: column[place] for name, column in batch.items()} for place in range(len(keys))]


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (Classes()[i] for i in range(48))


class Texts(Classes):
    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"text": f"line {i}"}


def listed() -> list[dict[str, Any]]:
    return list(Stream())


def pairs() -> TensorDataset:
    rows = default_collate(listed())
    return TensorDataset(rows["t"], rows["y"])


here = Classes()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    t, y = (batch["t"], batch["y"]) if "t" in batch else batch.values()
    out = model(t) + 0.1 * batch.get("noise", torch.zeros(6))[..., None]
    return nn.functional.cross_entropy(out.flatten(0, 1).float(), y.flatten(), reduction="sum"), y.numel()


def rows_job(folder: Path, dataset: str, **changes: Any) -> Job:
    return job_of(folder, Net, loss=f"{HERE}:loss", data={"dataset": f"{HERE}:{dataset}"}, **changes)


@pytest.mark.fast
@pytest.mark.parametrize("kind", [Classes, Padded, Columns, Batched, pairs, listed, lambda: Subset(Classes(), range(3, 20))])
def test_a_batch_is_that_of_torchs_dataloader(kind: Any) -> None:
    dataset = kind()
    rows: Any = dataset_of(kind, {}, "data.dataset = 'mine'")
    expected = [*DataLoader(dataset, batch_size=5, shuffle=False, collate_fn=getattr(dataset, "collate_fn", None))]
    assert len(rows) == len(dataset) and len(expected) > 3
    for number, batch in enumerate(expected):
        wanted = batch if isinstance(batch, dict) else {str(place): each for place, each in enumerate(batch)}
        got = batch_of(rows, tuple(range(len(dataset)))[5 * number :][:5], "")
        assert [*got] == [*wanted]
        for name, value in wanted.items():
            assert got[name].dtype == value.dtype and torch.equal(got[name], value)
    other = batch_of(rows, (4, 3, 2, 1, 0), "")
    assert not all(torch.equal(one, each) for one, each in zip(other.values(), got.values(), strict=True)), "the control"


@pytest.mark.fast
def test_a_dataset_is_known_again_by_its_own_fingerprint_or_by_rows() -> None:
    class Named(Classes):
        def fingerprint(self) -> str:
            return f"named-{self.count}"

    def known(dataset: Any) -> tuple[str, str]:
        rows = Rows(dataset, "data.dataset = 'mine'")
        return rows.fingerprint(), rows.note

    assert known(Named()) == (
        "named-48",
        "data.dataset = 'mine': samples are its rows, made a batch by default_collate, and the run knows them again by its fingerprint()",
    )
    assert known(Columns())[0] == "5c1f0d4a8f6b2e97" and known(Columns())[1].endswith("by its _fingerprint 5c1f0d4a8f6b2e97")
    assert "its rows, made a batch by its collate_fn, and" in known(Padded())[1] and known(Classes())[1].endswith("by a digest of 48 rows")
    assert f"by a digest of {SAMPLED} rows of its 1000: give it a fingerprint()" in known(Classes(1000))[1]
    before = torch.get_rng_state()
    assert known(Drawing()) == known(Drawing()), "rows that draw are the same in each process"
    assert torch.equal(before, torch.get_rng_state())
    changed = listed()
    assert known(changed)[0].startswith(OF_ROWS)
    assert known(changed)[0] == known(listed())[0] == known(Classes())[0]
    changed[47] = {**changed[47], "t": changed[46]["t"]}
    assert len({known(each)[0] for each in (listed(), changed, listed()[:-1], Drawing(), Padded())}) == 5


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (
            "Stream",
            ": the samples of Stream come one after the other, .* prepare text with `elastic data prepare`",
        ),
        ("stream", r": the samples of generator come .* list\(...\) .* datasets.Dataset.from_generator"),
        ("loader", "gives a DataLoader; give its dataset"),
        ("splits", r"gives a dict of \['train', 'test'\]; give one dataset of it, as by split='train'"),
        ("Texts", r"default_collate of its rows returned a list as 'text' for the 1 ids \[0\]; .*: let each row hold tensors"),
        ("broken", r"samples \[0\] cannot be read: ZeroDivisionError"),
        ("numbered", r"has no __len__\(\); a dataset has len\(\), read\(ids\), fingerprint\(\) .*, or len\(\) and rows by index"),
    ],
)
def test_what_gives_no_samples_by_number_is_refused_before_a_worker_starts(tmp_path: Path, dataset: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.dataset = '{HERE}:{dataset}'.*{said}"):
        preflight(rows_job(tmp_path, dataset), local=True)


def stream() -> Iterator[dict[str, Any]]:
    yield from listed()


def loader() -> DataLoader[dict[str, Any]]:
    return DataLoader(Classes())


def splits() -> dict[str, Any]:
    return {"train": Classes(), "test": Classes(8)}


def broken() -> Any:
    class Broken(Classes):
        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"t": 1 // i}

    return Broken()


def numbered() -> Any:
    class Numbered(torch.utils.data.Dataset[int]):
        def __getitem__(self, i: int) -> int:
            return i

    return Numbered()


@pytest.mark.parametrize("dataset", ["Classes", "here", "listed", "Columns", "pairs"])
def test_the_first_lines_say_how_samples_are_known_and_the_bits_are_one(tmp_path: Path, dataset: str) -> None:
    """The dataset is named as a class, an object, or a function that gives one.  The reference is one with ``read``."""
    job = rows_job(tmp_path / "rows", dataset)
    assert preflight(job, local=True).notes[0].startswith(f"data.dataset = '{HERE}:{dataset}': samples are its rows, made")
    assert train_here(job, STEPS).hash == train_here(job_of(tmp_path / "read", Net), STEPS).hash


def test_an_object_takes_no_arguments_and_may_be_of_a_script(tmp_path: Path) -> None:
    job = rows_job(tmp_path, "here")
    with pytest.raises(DataError, match=r"here' is a Classes already, and takes no arguments: leave \['count'\] out of args"):
        preflight(job.replace(data={"dataset": f"{HERE}:here", "args": {"count": 8}}), local=True)
    given = job.replace(name="given", data={"dataset": Classes(), "prefetch": 1})
    assert run_local(given, lambda line: None)[0] == "Finished" == run_local(job, lambda line: None)[0]
    assert exported_hash(given) == exported_hash(job)


def test_a_part_of_a_mixture_may_be_of_rows(tmp_path: Path) -> None:
    parts = [{"dataset": f"{HERE}:Classes", "args": {"count": 24}}, {"dataset": f"{HERE}:Columns"}]
    job = rows_job(tmp_path, "Classes").replace(data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}})
    with pytest.raises(DataError, match="a sample of one part has"):
        train_here(job, 1)
    parts[1]["dataset"] = f"{HERE}:Classes"
    job = job.replace(data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}})
    assert [note.partition(":")[0] for note in preflight(job, local=True).notes[:2]] == [
        f"data.args.parts[{number}].dataset = 'tests.data.test_rows" for number in (0, 1)
    ]
    parts[1]["dataset"] = f"{HERE}:Stream"
    with pytest.raises(DataError, match=r"^data.args.parts\[1\].dataset = .*Stream': the samples of Stream come"):
        preflight(job.replace(data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}}), local=True)


def test_u1_rows_that_draw_have_the_same_bits_on_one_worker_on_two_and_after_a_kill(ranks: Ranks, tmp_path: Path) -> None:
    """The process gets SIGKILL in its third step, and another one goes on.  The control has no noise."""
    alone = train_here(rows_job(tmp_path / "one", "Drawing"), STEPS).hash
    assert train(ranks, rows_job(tmp_path / "two", "Drawing"), TWO, STEPS).hash == alone
    job = rows_job(tmp_path / "killed", "Drawing", checkpoint={"save_every": 1})
    fault = {"point": "backward", "step": 3, "world_rank": 0, "kind": "SIGKILL"}
    dying = "import sys; from tests.data.test_rows import *; run_local(Job.model_validate_json(sys.argv[1]), print)"
    killed = subprocess.run([sys.executable, "-c", dying, job.replace(faults=[fault]).model_dump_json()], cwd=ROOT, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    lines: list[str] = []
    assert run_local(job, lambda line: lines.append(str(line)))[0] == "Finished"
    assert any("from step 2" in line for line in lines) and exported_hash(job) == alone
    assert train_here(rows_job(tmp_path / "plain", "Classes"), STEPS).hash != alone
