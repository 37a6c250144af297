"""Exports and samples of text: what they hold, and that each is made once in a process that trains alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor, nn

from actors.cli import main
from actors.launch import launch
from elastic.errors import FencedOff, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.models import llama
from elastic.protocol.commit_record import Validated, told_of
from elastic.report.story import Line, Sentence
from elastic.runs import owed
from elastic.runs.owed import Debt
from elastic.runs.run import Run
from elastic.train.alone.local import run_local
from elastic.train.alone.revisit import evaluate_between, evaluate_here
from elastic.train.errands import check_samples, encoder_of, restored
from elastic.train.gauges.counters import Counters
from elastic.train.session import make_session
from tests.support.chaos import exported_hash
from tests.support.job_file import to_toml
from tests.support.toys import Own, Sums, toy_job

SMALL = {"vocab": 257, "dim": 16, "layers": 2, "heads": 2}
PROMPTS = ["Once", "a longer prompt than the window of the dataset"]


class Tied(Own):
    """A model whose head is its embedding, with a table that it does not save."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.head = nn.Linear(self.embed.embedding_dim, self.embed.num_embeddings, bias=False)
        self.head.weight = self.embed.weight


def tied(**args: Any) -> nn.Module:
    return Tied(**args)


class Breaks(Own):
    """A model that cannot continue "a" as long as a file is there."""

    def forward(self, tokens: Tensor) -> Tensor:
        # no sample begins so
        if BROKEN.exists() and tokens.device.type == "cpu" and int(tokens[0, 0]) == ord("a"):
            raise RuntimeError("not today")
        return super().forward(tokens)


BROKEN = Path("/nonexistent")


def breaks(**args: Any) -> nn.Module:
    return Breaks(**args)


def job_of(folder: Path, **changes: Any) -> Job:
    settings = {
        "name": "local",
        "model_args": SMALL,
        "global_batch": 4,
        "steps": 6,
        "checkpoint": {"save_every": 2},
        "export": {"every": 2},
    }
    return toy_job(folder, **settings | {"samples": {"every": 4, "prompts": PROMPTS, "tokens": 12}} | changes)


def trained(job: Job) -> list[str]:
    lines: list[Line] = []
    assert run_local(job, lines.append)[0] == "Finished"
    return [line.text for line in lines if isinstance(line, Sentence)]


def result(job: Job, kind: str, step: int) -> dict[str, Any]:
    return owed.result(Run.open(job), Debt(Version(step, 1), kind))


def greedy(model: nn.Module, prompt: str, most: int, window: int) -> list[int]:
    """Returns the most likely continuation, byte by byte, computed by plain torch."""
    tokens = list(prompt.encode())
    with torch.no_grad():
        for _ in range(most):
            tokens.append(int(model(torch.tensor([tokens[-window:]]))[0, -1].argmax()))
    return tokens[-most:]


def plain(job: Job, step: int) -> nn.Module:
    """Returns a model of the job with exported weights, without any code that makes samples."""
    build = {"elastic.models.llama:build": llama.build, "tests.train.test_errands:tied": tied}[job.model]
    model = build(**job.model_args)
    model.init_weights()
    weights = load_file(Path(job.bucket) / result(job, "export", step)["place"])
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)
    return model.eval()


@pytest.mark.parametrize("model", ["elastic.models.llama:build", "tests.train.test_errands:tied"])
def test_each_is_made_once_and_is_what_plain_torch_says(tmp_path: Path, model: str) -> None:
    """The judge reads the exported file; the control is a greedy continuation by the weights of another step.

    No bit of the training depends on it.
    """
    args = SMALL if "llama" in model else {"vocab": 257, "dim": 19}
    job = job_of(tmp_path / "run", model=model, model_args=args)
    said = trained(job)
    for kind, steps in (("export", (2, 4, 6)), ("samples", (4, 6))):
        assert [
            sum(text.startswith(f"{kind} of step {step}: ") for text in said) for step in range(1, 7)
        ] == [int(step in steps) for step in range(1, 7)]
    for step in (4, 6):
        found = result(job, "samples", step)
        expected = [greedy(plain(job, step), prompt, 12, 16) for prompt in PROMPTS]
        assert found["tokens"] == expected and found["prompts"] == PROMPTS
        assert found["texts"] == [
            bytes(token for token in each if token < 256).decode(errors="replace") for each in expected
        ]
    other = [greedy(plain(job, 2), prompt, 12, 16) for prompt in PROMPTS]
    assert result(job, "samples", 6)["tokens"] != other, "the control"
    for step in (2, 4, 6):
        about = result(job, "export", step)
        raw = (tmp_path / "run" / about["place"]).read_bytes()
        assert (about["bytes"], about["digest"]) == (len(raw), blake3(raw).hexdigest())
    without = job_of(tmp_path / "without", model=model, model_args=args, export={}, samples={})
    trained(without)
    assert exported_hash(without) == exported_hash(job)
    assert not [key for key in Run.open(without).store.list("local/") if "owed" in key or "exports" in key]


def test_l10_samples_are_written_by_the_code_that_made_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """L10: the command refuses changed code, and counts no attempt.  The oracle is what the run wrote.  The
    control: an accepted change.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the time stamps of cached code have whole seconds
    code, file = tmp_path / "a_writer.py", tmp_path / "job.toml"
    built = (
        "from tests.support.toys import own\n\n\ndef build(**args):\n    model = own(**args)\n    "
        "return model\n"
    )

    def write(text: str) -> None:
        code.write_text(text)
        sys.modules.pop("a_writer", None)

    write(built)
    job = job_of(tmp_path / "run", model="a_writer:build", model_args={"vocab": 257, "dim": 19}, steps=4)
    assert launch(job, local=True).state == "Finished"
    file.write_text(to_toml(job))
    wrote, run = result(job, "samples", 4), Run.open(job)
    done = [key for key in run.store.list("local/owed/") if key.endswith("done.json")]

    def pay(*words: str) -> tuple[int, str]:
        found = main(["owed", str(file), "--pay", *words])
        return found, " ".join(capsys.readouterr().out.split())

    for key in done:
        run.store.delete(key)
    write(
        built.replace(
            "    return model",
            "    model.register_forward_hook(lambda _, given, logits: -logits)\n    return model",
        )
    )
    returned, said = pay()
    assert (
        returned == 1
        and "samples of step 4 failed: the code of the run 'local'" in said
        and "a_writer.py (changed); undo" in said
    )
    assert "export of step 4: " in said, "an export needs no code"
    assert [(debt.kind, debt.failures) for debt in owed.debts(run)] == [("samples", ())]
    assert (
        main(["owed", str(file), "--accept-code"]) == 1
        and "--accept-code has no effect without --pay" in capsys.readouterr().out
    )
    assert pay("--accept-code")[0] == 0 and result(job, "samples", 4)["tokens"] != wrote["tokens"]
    write(built)
    run.store.delete(next(key for key in done if "samples" in key))
    assert "local owes nothing" in pay()[1] and result(job, "samples", 4) == wrote


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone(tmp_path: Path) -> None:
    drawn = {"every": 2, "prompts": ["a", "a"], "tokens": 8, "temperature": 1.0}
    jobs = [
        job_of(tmp_path / str(number), steps=2, samples={**drawn, "seed": seed})
        for number, seed in enumerate((1, 1, 2))
    ]
    for job in jobs:
        trained(job)
    first, again, other = (result(job, "samples", 2)["tokens"] for job in jobs)
    assert first == again != other and first[0] != first[1]


def test_what_fails_is_tried_again_at_the_next_save_and_given_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure disturbs no step.  A resume finds what is owed; the control is that the text is the one that
    an undisturbed run writes.
    """
    settings: dict[str, Any] = {
        "model": "tests.train.test_errands:breaks",
        "model_args": {"vocab": 257, "dim": 19},
        "export": {},
    }
    settings["samples"] = {"every": 4, "prompts": ["a"], "tokens": 4}
    trained(smooth := job_of(tmp_path / "smooth", **settings))
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setattr("tests.train.test_errands.BROKEN", broken)
    job = job_of(tmp_path / "run", **settings)
    said = trained(job)
    failed = [text for text in said if "not today" in text]
    assert [text.partition(" failed: ")[0] for text in failed] == [
        "samples of step 4",
        "samples of step 4",
        "samples of step 6",
    ]
    assert all(text.endswith("the run tries again soon") for text in failed)
    broken.unlink()
    longer = job.replace(steps=8)
    Run.look(longer, branch=True).branch(0.0)
    trained(longer)
    assert owed.debts(Run.open(longer)) == []
    assert result(longer, "samples", 4)["tokens"] == result(smooth, "samples", 4)["tokens"]
    broken.touch()
    other = job_of(tmp_path / "other", **settings | {"steps": 10})
    assert sum("given up after 3 attempts" in text for text in trained(other)) == 1
    assert owed.sentence(owed.debts(Run.open(other))).startswith(
        "owed: samples of step 8, samples of step 10; given up: samples of"
    )


def test_a_shared_weight_stays_shared(tmp_path: Path) -> None:
    job = job_of(
        tmp_path, model="tests.train.test_errands:tied", model_args={"vocab": 257, "dim": 19}, steps=2
    )
    trained(job)
    model = restored(job, Run.open(job).checkpoints.open(Version(2, 1)))
    assert isinstance(model, Tied) and model.head.weight is model.embed.weight and not model.training
    assert torch.equal(model.scale, torch.linspace(0.9, 1.1, 19))


def test_l1_a_worker_between_two_worlds_measures_what_the_members_would(tmp_path: Path) -> None:
    """L1: from the checkpoint alone, with the same bits.  It stops at any slice or microbatch once it is to
    do something else.

    The control is another checkpoint.
    """
    held_out = {
        "every": 2,
        "samples": 7,
        "dataset": "tests.support.toys:Sums",
        "args": {"samples": 50, "seq_len": 16},
    }
    job = job_of(
        tmp_path, model_args=SMALL | {"layers": 1}, steps=4, export={}, samples={}, validation=held_out
    )
    said, run = trained(job), Run.open(job)
    by_spares = job.replace(validation={**held_out, "by": "spares"}, workers={"spares": 1})
    session = make_session(by_spares, Counters(tmp_path / "counters", create=True))
    asked = []

    def measure(step: int, stop_at: int = -1) -> Validated:
        def interrupted() -> bool:
            asked.append(step)
            return len(asked) == stop_at

        return evaluate_between(session, torch.device("cpu"), run.checkpoints, Version(step, 1), interrupted)

    first, second = measure(2), measure(4)
    assert [text for text in said if "validation" in text] == [told_of(2, first), told_of(4, second)]
    assert owed.found(json.loads(json.dumps(owed.validated(first, "")))) == first != second
    _, there = evaluate_here(job, 2)
    assert there == first
    for place in range(1, (often := len(asked) // 2) + 1):
        asked.clear()
        with pytest.raises(FencedOff):
            measure(2, place)
    assert often > 4, "there are four microbatches, and slices before them"
    session.close()


class Pair(Own):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), tokens


@pytest.mark.parametrize(
    ("model", "prompts", "said"),
    [
        (
            Pair(vocab=257),
            ["a"],
            ("Pair returns a tuple for tokens of shape .1, 1.; samples need a model that returns logits"),
        ),
        (Own(vocab=29), ["a"], "'a' has the token 97, and the model knows 29; leave .samples. out"),
        (Own(vocab=257), ["a", ""], "'' has no token, so the model has nothing to continue"),
    ],
)
def test_a_model_that_cannot_write_is_refused_before_a_worker_starts(
    model: nn.Module, prompts: list[str], said: str
) -> None:
    job = toy_job("/bucket", checkpoint={"save_every": 2}, samples={"every": 2, "prompts": prompts})
    with pytest.raises(ModelError, match=said):
        check_samples(job, model.to("meta"), Sums())
    check_samples(job.replace(samples={}), model, Sums())


def test_the_tokenizer_is_that_of_the_dataset(tmp_path: Path) -> None:
    from elastic.data.mixture import Mixture
    from elastic.data.prepare import prepare
    from elastic.data.tokens import TokenDataset

    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("so many words, so many more words, " * 40)
    prepare([str(tmp_path / "text")], str(tmp_path / "tokens"), bpe=300)
    args = {"path": str(tmp_path / "tokens"), "seq_len": 8}
    for dataset in (TokenDataset(**args), Mixture([{"args": args}])):
        coding = encoder_of(dataset).coding
        assert coding.tokenizer == "tokenizer.json" and coding.vocabulary > 257
    assert encoder_of(Sums()).coding.tokenizer == "bytes"
