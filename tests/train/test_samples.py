"""U1: samples are those of the dataset, whatever it draws from and whatever the loss writes; a run and a node
are bound to them.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from actors.launch import launch
from elastic.data.cursor import Cursor
from elastic.data.loader import LOOKED_AT, Loader
from elastic.errors import JobError
from elastic.job import Job
from elastic.models.spec import ShardingTable
from elastic.protocol.builds import Build, difference
from elastic.runs import data
from elastic.runs.data import OF_ROWS
from elastic.runs.run import Run
from elastic.train.model import digest_of
from elastic.train.session import build_of, make_session
from tests.support.commands import ROOT
from tests.support.plain_models import STEPS, TWO, Batch, Net, Numbers, counting, job_of, loss
from tests.support.ranks import Ranks
from tests.support.segments import train, train_here

HERE = "tests.train.test_samples"

# ---- samples


class Noisy(Numbers):
    """Noise of a generator of its own."""

    def noise(self, i: int) -> Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(i))

    def read(self, ids: tuple[int, ...]) -> Batch:
        return super().read(ids) | {"noise": torch.stack([self.noise(i) for i in ids])}


class Seeding(Noisy):
    """It takes that noise from the generator that the model has, too."""

    def noise(self, i: int) -> Tensor:
        torch.manual_seed(i)
        return torch.randn(6)


class Dropping(Net):
    def forward(self, t: Tensor) -> Tensor:
        return F.dropout(super().forward(t), 0.3, self.training)


def loss_of_noise(model: nn.Module, batch: Batch) -> Any:
    out = model(batch["t"]) + 0.1 * batch["noise"][..., None]
    return F.cross_entropy(out.flatten(0, 1), batch["y"].flatten(), reduction="sum"), batch["y"].numel()


def test_u1_a_dataset_that_seeds_the_models_generator_gives_the_same_weights(
    ranks: Ranks, tmp_path: Path
) -> None:
    hashes = []
    for name, dataset, layout in (("own", Noisy, None), ("here", Seeding, None), ("two", Seeding, TWO)):
        job = job_of(
            tmp_path / name,
            Dropping,
            loss=f"{HERE}:loss_of_noise",
            data={"dataset": f"{HERE}:{dataset.__name__}"},
        )
        hashes.append((train_here(job, STEPS) if layout is None else train(ranks, job, layout, STEPS)).hash)
    assert len(set(hashes)) == 1


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(2),
        lambda: random.random(),
        lambda: numpy.random.rand(2),
        lambda: torch.manual_seed(3),
    ],
)
def test_a_dataset_that_draws_is_read_when_its_samples_are_needed(
    capsys: pytest.CaptureFixture[str], draw: Callable[[], object]
) -> None:
    """One that draws for some samples only is noticed, too.  The control draws never, and is read ahead."""

    class Draws(Numbers):
        def read(self, ids: tuple[int, ...]) -> Batch:
            if 3 in ids:
                draw()
            return super().read(ids)

    for dataset in (Draws(), Numbers()):
        with closing(Loader(dataset, Cursor(48, 12, 0), 2, named="data.dataset = 'mine'")) as loader:
            before = torch.get_rng_state(), random.getstate()
            for first in range(LOOKED_AT):
                loader.read((first, first + 1))
            assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
            assert loader.draws is isinstance(dataset, Draws)
            assert ("data.dataset = 'mine': read() draws" in capsys.readouterr().out) is loader.draws
            assert (loader._submitted((1,)) is None) is loader.draws


class Lent(Numbers):
    """Gives out its own memory."""

    kept: ClassVar[dict[tuple[int, ...], Batch]] = {}

    def read(self, ids: tuple[int, ...]) -> Batch:
        return self.kept.setdefault(ids, super().read(ids))


def loss_in_place(model: nn.Module, batch: Batch) -> Any:
    batch["y"].clamp_(max=1)
    return loss(model, batch)


def test_u1_a_batch_that_the_loss_changes_is_its_own(tmp_path: Path) -> None:
    Lent.kept.clear()
    job = job_of(tmp_path, Net, loss=f"{HERE}:loss_in_place", data={"dataset": f"{HERE}:Lent"})
    train_here(job, 2)
    assert Lent.kept and all(
        torch.equal(batch["y"], Numbers().read(ids)["y"]) for ids, batch in Lent.kept.items()
    )


def test_a_run_and_a_node_are_bound_to_the_number_of_samples(tmp_path: Path) -> None:
    run = Run.open(job_of(tmp_path, Net))
    data.bind(run, "numbers-1", 48)
    assert data.check(run, "numbers-1", 48)
    with pytest.raises(
        JobError,
        match=(
            r"the dataset has 60 samples, but the run .* was begun on 48 samples with the same fingerprint"
        ),
    ):
        data.check(run, "numbers-1", 60)
    for other, known, fix in (
        (OF_ROWS, f"{OF_ROWS}1", f"fingerprint.. that returns '{OF_ROWS}1'"),
        ("mine", "yours", "the same in"),
    ):
        bound = Run.open(job_of(tmp_path / other, Net))
        data.bind(bound, known, 48)
        with pytest.raises(
            JobError, match=f"fingerprint {other}, but .* begun on data with the fingerprint {known}; .*{fix}"
        ):
            data.check(bound, other, 48)
    here, there = Build(data="numbers-1", samples="48"), Build(data="numbers-1", samples="60")
    found = difference(there, here, True)
    assert found is not None and found.sentence.startswith("the dataset's length is 60 on this node and 48")
    assert difference(here, here, True) is None


class Unstable(Numbers):
    """Its fingerprint is another one for each object, as with ``id()``, the time or random numbers."""

    made = itertools.count()

    def __init__(self, stable: bool = False) -> None:
        self.number = 0 if stable else next(self.made)

    def fingerprint(self) -> str:
        return f"object {self.number}"


@pytest.mark.parametrize("section", ["data", "validation"])
def test_a_fingerprint_that_is_another_each_time_is_refused_with_local(tmp_path: Path, section: str) -> None:
    """The control is one that stays.  On a cluster its node is refused, by the difference of the two builds."""

    def job(*, stable: bool) -> Job:
        validation = {
            "every": 2,
            "dataset": f"{HERE}:Unstable",
            "args": {"stable": stable or section == "data"},
        }
        data = {"dataset": f"{HERE}:Unstable", "args": {"stable": stable or section == "validation"}}
        return job_of(tmp_path / str(stable), Net, data=data, validation=validation)

    with pytest.raises(
        JobError,
        match=(
            rf"^{section}\.dataset = .*Unstable': fingerprint\(\) returned "
            r"object \d.* first, and object \d"
        ),
    ):
        launch(job(stable=False), local=True, show=lambda line: None)
    assert not (tmp_path / "False" / "toy" / "data.json").exists()
    assert launch(job(stable=True), local=True, show=lambda line: None).state == "Finished"


class Deadly(Numbers):
    """The first read of a sample of the third step ends its process without a word, as a library that crashes
    does.
    """

    sample = Cursor(48, 12, 0).microbatch_ids(3, 0, 2)[0]

    def __init__(self, mark: str, how: str) -> None:
        self.mark, self.how = Path(mark), how

    def read(self, ids: tuple[int, ...]) -> Batch:
        if self.sample in ids and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGSEGV) if self.how == "crashes" else os._exit(3)
        return super().read(ids)


def deadly(folder: Path, how: str, **changes: Any) -> Job:
    return job_of(
        folder,
        Net,
        data={"dataset": f"{HERE}:Deadly", "args": {"mark": str(folder / "mark"), "how": how}},
        **changes,
    )


def loss_that_exits(model: nn.Module, batch: Batch) -> Any:
    os._exit(3)


@pytest.mark.parametrize("how", ["crashes", "exits", "in the loss"])
def test_samples_that_end_the_process_are_named(tmp_path: Path, how: str) -> None:
    """The control exits in the loss."""
    job = (
        deadly(tmp_path, how)
        if how != "in the loss"
        else job_of(tmp_path, Net, loss=f"{HERE}:loss_that_exits", trial=False)
    )
    dying = (
        "import sys; from tests.train.test_samples import *; from elastic.train.alone.local import "
        "run_local; "
    )
    command = [
        sys.executable,
        "-c",
        f"{dying}run_local(Job.model_validate_json(sys.argv[1]), print)",
        job.model_dump_json(),
    ]
    (tmp_path / "scratch").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (-signal.SIGSEGV if how == "crashes" else 3), done.stderr
    ids = list(Cursor(48, 12, 0).microbatch_ids(3, 0, 2))
    said = (
        f"elastic: the process died while it read samples {ids} of data.dataset: read these alone to see "
        "why\n"
    )
    assert (said in done.stderr) is (how != "in the loss") and not [*(tmp_path / "scratch").iterdir()]


class Shuffled(Net):
    """Its layers come from a set, so their order depends on the hash seed of a process."""

    order = ("a", "b")

    def __init__(self) -> None:
        super().__init__()
        for name in self.order:
            self.add_module(name, nn.Linear(3, 3))


def test_a_node_with_another_order_of_tensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, builds = job_of(tmp_path, Shuffled), []
    for order in (("a", "b"), ("b", "a"), ("a", "b")):
        monkeypatch.setattr(Shuffled, "order", order)
        with counting() as counters, closing(make_session(job, counters)) as session:
            builds.append(build_of(session))
    found = difference(builds[1], builds[0], True)
    assert found is not None and found.part == "model" and "sort what comes from a set" in found.sentence
    assert difference(builds[2], builds[0], True) is None
    frozen = Net()
    assert digest_of(frozen) != digest_of(frozen.requires_grad_(False))
    tables = (ShardingTable(()), ShardingTable((), vocabulary=("a",)), ShardingTable((), column={"a": 1}))
    digests = set[str]()
    for table in tables:
        frozen.sharding = lambda table=table: table  # type: ignore[assignment]
        digests.add(digest_of(frozen))
    assert len(digests) == len(tables), "how the model is cut counts, too"


class Reusing(Numbers):
    """Fills the same memory in each call."""

    def __init__(self) -> None:
        self.memory = {"t": torch.empty(2, 6, dtype=torch.int64), "y": torch.empty(2, 6, dtype=torch.int64)}

    def read(self, ids: tuple[int, ...]) -> Batch:
        for name, value in super().read(ids).items():
            self.memory[name].copy_(value)
        return self.memory


class Rarely(Numbers):
    """Draws for one sample, long after the first reads."""

    def read(self, ids: tuple[int, ...]) -> Batch:
        if 40 in ids:
            torch.rand(3)
        return super().read(ids)


def test_what_is_read_ahead_is_a_copy_and_leaves_the_generators_alone() -> None:
    """The control: the reads before the one that draws are made ahead."""
    for kind in (Reusing, Rarely):
        with closing(Loader(kind(), Cursor(48, 12, 0), 2, named="data.dataset = 'mine'")) as loader:
            for first in range(LOOKED_AT):
                loader.read((first, first + 1))
            before = torch.get_rng_state()
            ahead = [loader._submitted((first, first + 1)) for first in (30, 32, 40)]
            assert None not in ahead
            for future, first in zip(ahead, (30, 32, 40), strict=True):
                found = loader._await(future, (first, first + 1))
                assert torch.equal(found["t"], Numbers().read((first, first + 1))["t"])
            assert torch.equal(before, torch.get_rng_state())
            assert loader.draws is (kind is Rarely)
