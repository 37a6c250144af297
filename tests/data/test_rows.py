"""Datasets of rows, torch's map-style ones and those of Hugging Face, train as with torch's DataLoader, in
Elastic's order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from elastic.code.imports import users_traceback
from elastic.data.cursor import Cursor
from elastic.data.loader import Loader, batch_of
from elastic.data.readers import Readers
from elastic.data.rows import SAMPLED, SelectedRows, dataset_of
from elastic.errors import DataError, JobError
from elastic.job import Job
from elastic.runs.data import OF_ROWS
from elastic.train.alone.local import run_local
from elastic.train.checks.preflight import preflight
from tests.support import row_datasets
from tests.support.chaos import exported_hash
from tests.support.commands import ROOT
from tests.support.plain_models import STEPS, TWO, Net, job_of
from tests.support.ranks import Ranks
from tests.support.row_datasets import Batched, Classes, Columns, Drawing, Padded, listed, pairs
from tests.support.segments import train, train_here

HERE = row_datasets.__name__
TRAINS = """
import sys
from elastic.job import Job
from elastic.train.alone.local import run_local
run_local(Job.model_validate_json(sys.argv[1]), print)
"""
"""Program that trains a job in its own process; it imports no more than that needs."""


def rows_job(folder: Path, dataset: str, **changes: Any) -> Job:
    return job_of(folder, Net, loss=f"{HERE}:loss", data={"dataset": f"{HERE}:{dataset}"}, **changes)


@pytest.mark.fast
@pytest.mark.parametrize(
    "kind", [Classes, Padded, Columns, Batched, pairs, listed, lambda: Subset(Classes(), range(3, 20))]
)
def test_a_batch_is_that_of_torchs_dataloader(kind: Any) -> None:
    dataset = kind()
    rows: Any = dataset_of(kind, {}, "data.dataset = 'mine'")
    expected = [
        *DataLoader(dataset, batch_size=5, shuffle=False, collate_fn=getattr(dataset, "collate_fn", None))
    ]
    assert len(rows) == len(dataset) and len(expected) > 3
    for number, batch in enumerate(expected):
        wanted = batch if isinstance(batch, dict) else {str(place): each for place, each in enumerate(batch)}
        got = batch_of(rows, tuple(range(len(dataset)))[5 * number :][:5], "")
        assert [*got] == [*wanted]
        for name, value in wanted.items():
            assert got[name].dtype == value.dtype and torch.equal(got[name], value)
    other = batch_of(rows, (4, 3, 2, 1, 0), "")
    assert not all(torch.equal(one, each) for one, each in zip(other.values(), got.values(), strict=True)), (
        "the control"
    )


@pytest.mark.fast
def test_a_dataset_is_known_again_by_its_own_fingerprint_or_by_rows() -> None:
    class Named(Classes):
        def fingerprint(self) -> str:
            return f"named-{self.count}"

    def known(dataset: Any) -> tuple[str, str]:
        rows = SelectedRows(dataset, "data.dataset = 'mine'")
        return rows.fingerprint(), rows.note

    assert known(Named()) == (
        "named-48",
        (
            "data.dataset = 'mine': each sample is a row of this dataset; default_collate makes "
            "batches of them, and a later start recognises the samples by its fingerprint()"
        ),
    )
    assert known(Columns())[0] == "5c1f0d4a8f6b2e97" and known(Columns())[1].endswith(
        "by its _fingerprint 5c1f0d4a8f6b2e97"
    )
    assert "a row of this dataset; its collate_fn makes batches of them, and" in known(Padded())[1] and known(
        Classes()
    )[1].endswith("by a digest of 48 rows")
    assert (
        f"by a digest of {SAMPLED} rows of 1000: a change of other rows is not noticed, unless the "
        "dataset has a fingerprint()"
    ) in known(Classes(1000))[1]
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
            (
                ": Stream gives its samples only one after the other, .* prepare text with `elastic "
                "data prepare`"
            ),
        ),
        ("stream", r": generator gives its samples .* list\(...\) .* datasets.Dataset.from_generator"),
        ("loader", "gives a DataLoader; give its dataset"),
        ("splits", r"gives a dict of \['train', 'test'\]; give one dataset of it, as by split='train'"),
        (
            "Texts",
            (
                r"default_collate of its rows returned a list as 'text' for the 1 ids \[0\]; .*: let each "
                r"row hold tensors"
            ),
        ),
        ("broken", r"samples \[0\] cannot be read: ZeroDivisionError"),
        (
            "numbered",
            (
                r"has no __len__\(\); a dataset has len\(\), read\(ids\), fingerprint\(\) .*, or "
                r"len\(\) and rows by index"
            ),
        ),
    ],
)
def test_what_gives_no_samples_by_number_is_refused_before_a_worker_starts(
    tmp_path: Path, dataset: str, said: str
) -> None:
    with pytest.raises(DataError, match=rf"^data\.dataset = '{HERE}:{dataset}'.*{said}"):
        preflight(rows_job(tmp_path, dataset), local=True)


@pytest.mark.parametrize("dataset", ["Classes", "here", "listed", "Columns", "pairs"])
def test_the_first_lines_say_how_samples_are_known_and_the_bits_are_one(tmp_path: Path, dataset: str) -> None:
    """The dataset is named as a class, an object, or a function that gives one.  The reference is one with
    ``read``.
    """
    job = rows_job(tmp_path / "rows", dataset)
    assert (
        preflight(job, local=True)
        .notes[0]
        .startswith(f"data.dataset = '{HERE}:{dataset}': each sample is a row of this dataset; ")
    )
    assert train_here(job, STEPS).hash == train_here(job_of(tmp_path / "read", Net), STEPS).hash


def test_an_object_takes_no_arguments_and_may_be_of_a_script(tmp_path: Path) -> None:
    job = rows_job(tmp_path, "here")
    with pytest.raises(
        DataError,
        match=(
            r"here' is a Classes already, and takes no arguments: leave "
            r"\['count'\] out of args"
        ),
    ):
        preflight(job.replace(data={"dataset": f"{HERE}:here", "args": {"count": 8}}), local=True)
    given = job.replace(name="given", data={"dataset": Classes(), "prefetch": 1})
    assert run_local(given, lambda line: None)[0] == "Finished" == run_local(job, lambda line: None)[0]
    assert exported_hash(given) == exported_hash(job)


def test_a_part_of_a_mixture_may_be_of_rows(tmp_path: Path) -> None:
    parts = [{"dataset": f"{HERE}:Classes", "args": {"count": 24}}, {"dataset": f"{HERE}:Columns"}]
    job = rows_job(tmp_path, "Classes").replace(
        data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}}
    )
    with pytest.raises(DataError, match="a sample of one part has"):
        train_here(job, 1)
    parts[1]["dataset"] = f"{HERE}:Classes"
    job = job.replace(data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}})
    assert [note.partition(":")[0] for note in preflight(job, local=True).notes[:2]] == [
        f"data.args.parts[{number}].dataset = '{HERE}" for number in (0, 1)
    ]
    parts[1]["dataset"] = f"{HERE}:Stream"
    with pytest.raises(
        DataError,
        match=(
            r"^data.args.parts\[1\].dataset = .*Stream': Stream gives its samples only one after the other"
        ),
    ):
        preflight(
            job.replace(data={"dataset": "elastic.data.mixture:Mixture", "args": {"parts": parts}}),
            local=True,
        )


def test_u1_rows_that_draw_have_the_same_bits_on_one_worker_on_two_and_after_a_kill(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The process gets SIGKILL in its third step, and another one goes on.  The control has no noise."""
    alone = train_here(rows_job(tmp_path / "one", "Drawing"), STEPS).hash
    assert train(ranks, rows_job(tmp_path / "two", "Drawing"), TWO, STEPS).hash == alone
    read_by_others = rows_job(tmp_path / "readers", "Drawing").replace(
        data={"dataset": f"{HERE}:Drawing", "readers": 2}
    )
    assert train(ranks, read_by_others, TWO, STEPS).hash == alone
    job = rows_job(tmp_path / "killed", "Drawing", checkpoint={"save_every": 1})
    fault = {"point": "backward", "step": 3, "world_rank": 0, "kind": "SIGKILL"}
    killed = subprocess.run(
        [sys.executable, "-c", TRAINS, job.replace(faults=[fault]).model_dump_json()],
        cwd=ROOT,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    lines: list[str] = []
    assert run_local(job, lambda line: lines.append(str(line)))[0] == "Finished"
    assert any("from step 2" in line for line in lines) and exported_hash(job) == alone
    assert train_here(rows_job(tmp_path / "plain", "Classes"), STEPS).hash != alone


# ---- readers: other processes that read


def loader_of(dataset: str, readers: int, **args: Any) -> Loader:
    rows = dataset_of(getattr(row_datasets, dataset), args, "")
    others = Readers(readers, f"{HERE}:{dataset}", args, "data") if readers else None
    return Loader(
        rows,
        Cursor(48, 12, 0),
        2,
        2 * max(readers, 1),
        named=f"data.dataset = '{HERE}:{dataset}'",
        readers=others,
    )


def pids(folder: Path) -> set[int]:
    return {int(each.name.partition("-")[2]) for each in folder.glob("pid-*")}


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + 40
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


BLOCKS = [(first, (first * 7 + 3) % 48) for first in range(24)]


@pytest.mark.full
def test_readers_give_the_bits_of_the_worker_in_its_order(tmp_path: Path) -> None:
    """Rows that draw have the noise of their ids wherever they are read, and those of the model are left
    alone.
    """
    before = torch.get_rng_state()
    with closing(loader_of("Varied", 0)) as here, closing(loader_of("Varied", 2)) as there:
        for one, other in zip(here.each(BLOCKS), there.each(BLOCKS), strict=True):
            assert [*one] == [*other]
            for name, value in one.items():
                assert other[name].dtype == value.dtype and torch.equal(other[name], value), name
        assert here.draws and not there.draws
        assert not torch.equal(here.read((1, 2))["torch"], there.read((2, 1))["torch"]), "the control"
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.full
def test_two_readers_are_nearly_twice_as_fast_where_rows_are_slow() -> None:
    took = {}
    for readers in (0, 2):
        with closing(loader_of("Slow", readers)) as loader:
            # the processes start, and the worker looks whether the rows draw
            for _ in loader.each(BLOCKS[:8]):
                pass
            began = time.monotonic()
            assert len([*loader.each(BLOCKS)]) == len(BLOCKS)
            took[readers] = time.monotonic() - began
    assert took[0] >= 1.5 * took[2], took


@pytest.mark.full
def test_what_a_reader_raises_has_the_sentence_and_the_traceback_of_the_worker() -> None:
    said = []
    for readers in (0, 2):
        with closing(loader_of("mistaken", readers)) as loader:
            with pytest.raises(DataError) as raised:
                loader.read((4, 5))
            assert raised.value.__cause__ is not None
            said.append((str(raised.value), users_traceback(raised.value.__cause__, or_ours=False)))
            assert loader.read((6, 7))["t"].tolist() == [1, 0], "the next read"
    assert (
        said[0] == said[1]
        and "samples [4, 5] cannot be read: ZeroDivisionError" in said[0][0]
        and "1 // (i - 5)" in said[0][1]
    )


def test_a_reader_that_is_killed_is_replaced_and_samples_that_kill_two_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(loader_of("Deadly", 2, folder=str(tmp_path), deadly=5)) as loader:
        got = [*loader.each([(first, first + 1) for first in range(0, 12, 2)])]
    expected = [batch_of(dataset_of(Classes, {}, ""), (first, first + 1), "") for first in range(0, 12, 2)]
    assert all(torch.equal(one["t"], other["t"]) for one, other in zip(got, expected, strict=True))
    assert (
        f"data.dataset = '{HERE}:Deadly': a reader was killed by SIGKILL while it read samples [4, 5]\n"
        in capfd.readouterr().out
    )
    with closing(loader_of("Deadly", 2, folder=str(tmp_path), deadly=9, times=3)) as loader:
        assert torch.equal(loader.read((4, 5))["t"], got[2]["t"])
        with pytest.raises(
            DataError,
            match=(
                r"samples \[8, 9\] cannot be read: 2 reader processes died while they read them \(the "
                r"last one was killed by SIGKILL\)"
            ),
        ):
            loader.read((8, 9))
    assert len(pids(tmp_path)) > 3 and all(map(is_gone, pids(tmp_path)))


@pytest.mark.full
def test_readers_end_with_the_loader_in_the_middle_of_a_read(tmp_path: Path) -> None:
    loader = loader_of("Deadly", 2, folder=str(tmp_path), endless=3)
    under_way = loader._submitted((2, 3))
    assert under_way is not None and loader.read((4, 5))
    wait_until(lambda: [*tmp_path.glob("in-*")])
    loader.close()
    with pytest.raises(DataError, match="its readers are closed"):
        under_way.result(20)
    assert len(pids(tmp_path)) == 2 and all(map(is_gone, pids(tmp_path)))


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_no_reader_is_left_when_the_worker_is_killed_or_interrupted(
    tmp_path: Path, how: signal.Signals
) -> None:
    """A reader is in the middle of a read that does not end.  Ctrl-C goes to all processes of the terminal."""
    args = {"folder": str(tmp_path), "endless": Cursor(48, 12, 0).microbatch_ids(2, 0, 2)[0]}
    job = rows_job(tmp_path, "Deadly").replace(
        data={"dataset": f"{HERE}:Deadly", "args": args, "readers": 2}, trial=False
    )
    command = [sys.executable, "-c", TRAINS, job.model_dump_json()]
    with subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as worker:
        wait_until(lambda: [*tmp_path.glob("in-*")] and len(pids(tmp_path) - {worker.pid}) == 2)
        os.killpg(worker.pid, how)
        said = worker.communicate(timeout=40)[0]
        assert worker.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 0), said
    wait_until(lambda: all(map(is_gone, pids(tmp_path))))


@pytest.mark.full
def test_a_run_with_readers_has_the_bits_of_one_without_also_after_a_resume_and_validates(
    tmp_path: Path,
) -> None:
    """The process gets SIGKILL in its third step, with two readers; another one goes on with one.  The
    reference has none.
    """
    held_out, said = (
        {"every": 2, "samples": 8, "dataset": f"{HERE}:Drawing"},
        dict[str, list[Any]](none=[], some=[]),
    )
    none, some = (
        rows_job(tmp_path / name, "Drawing", checkpoint={"save_every": 1}, validation=held_out, trial=False)
        for name in said
    )
    assert run_local(none, said["none"].append)[0] == "Finished"
    fault = {"point": "backward", "step": 3, "world_rank": 0, "kind": "SIGKILL"}
    killed = some.replace(data={"dataset": f"{HERE}:Drawing", "readers": 2}, faults=[fault])
    done = subprocess.run(
        [sys.executable, "-c", TRAINS, killed.model_dump_json()], cwd=ROOT, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = some.replace(data={"dataset": f"{HERE}:Drawing", "readers": 1})
    assert run_local(resumed, said["some"].append)[0] == "Finished"
    assert any("from step 2" in str(line) for line in said["some"]) and exported_hash(
        resumed
    ) == exported_hash(none)
    last = [
        [str(line) for line in lines if "validat" in str(line)][-1].partition("validat")[2]
        for lines in said.values()
    ]
    assert last[0] and last[0] == last[1]


def test_readers_open_only_what_has_a_name(tmp_path: Path) -> None:
    job = rows_job(tmp_path, "here").replace(data={"dataset": Classes(), "readers": 2})
    with pytest.raises(
        JobError,
        match=(
            r"^data\.readers = 2: .*'object:Classes' by its name, .* module .*, "
            r"or set data.readers = 0"
        ),
    ):
        preflight(job, local=True)
    preflight(rows_job(tmp_path, "here").replace(data={"dataset": f"{HERE}:here", "readers": 2}), local=True)
