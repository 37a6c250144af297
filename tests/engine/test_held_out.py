"""A14: documents that ``data prepare`` has held out are never trained on, as the ledger of a real run has it."""

from __future__ import annotations

from pathlib import Path

from elastic.data.prepare import prepare
from elastic.data.tokens import TokenDataset
from elastic.job import Job
from elastic.plan.layout import Layout
from storage.objects import ObjectStore
from tests.data.test_prepare import jsonl, texts_of
from tests.support.ranks import Ranks
from tests.support.segments import Trained, train, train_here
from tests.support.toys import small_job

TEXTS = [f"<document {number:03d}>" for number in range(120)]
LENGTH = 15


def job_on(folder: Path, data: Path) -> Job:
    """Returns a job of one epoch and a few samples more, and a validation of what is held out."""
    args = {"path": str(data), "seq_len": LENGTH}
    validation = {"every": 4, "args": args | {"path": str(folder / "split" / "held-out")}}
    model = {"vocab": 257, "dim": 16, "layers": 2, "heads": 2}
    return small_job(
        folder,
        name=data.name,
        steps=9,
        global_batch=16,
        microbatch=4,
        data={"args": args},
        validation=validation,
        model_args=model,
    )


def trained_on(trained: Trained, job: Job) -> bytes:
    """Returns the text of all samples of the ledger, in their order in the dataset."""
    samples = sorted({sample for outcome in trained.outcomes for ids in outcome.samples for sample in ids})
    rows = TokenDataset(**job.data.args).read(tuple(samples))["tokens"][:, :-1]
    return bytes(token if token < 256 else 10 for token in rows.flatten().tolist())


def test_a14_no_held_out_document_is_in_the_ledger(ranks: Ranks, tmp_path: Path) -> None:
    """A14: the intersection is empty, while the loss on them is told.  The control: without the split, all
    are trained on.
    """
    (tmp_path / "texts.jsonl").write_bytes(jsonl(*({"text": text} for text in TEXTS)))
    prepare(tmp_path / "texts.jsonl", str(tmp_path / "split"), held_out=0.2)
    prepare(tmp_path / "texts.jsonl", str(tmp_path / "whole"))
    held_out = texts_of(ObjectStore.open(str(tmp_path / "split" / "held-out")))
    assert 10 < len(held_out) < 40
    job = job_on(tmp_path, tmp_path / "split")
    trained = train(ranks, job, Layout(1, 2), job.steps)
    text = trained_on(trained, job)
    assert not [document for document in held_out if document in text]
    assert sum(document.encode() in text for document in TEXTS) >= len(TEXTS) - len(held_out) - 1, (
        "the last one may be cut"
    )
    assert [outcome.step for outcome in trained.outcomes if outcome.validated is not None] == [5, 9]
    whole = job_on(tmp_path, tmp_path / "whole")
    trained = train_here(whole, whole.steps)
    assert all(document in trained_on(trained, whole) for document in held_out)
