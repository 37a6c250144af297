"""L11: a job takes the functions and classes of a script or a notebook in place of names, and knows them
again.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.cli import main
from actors.launch import launch
from actors.users_code import LARGEST, UsersCode, pack
from elastic.code.given import Given, parts_of
from elastic.code.imports import code_digest, load
from elastic.code.sources import sources_of
from elastic.engine.optim.schedule import learning_rate_of
from elastic.errors import CodeError, JobError, ModelError
from elastic.job import Job
from elastic.report.story import Line, StepLine
from elastic.train.alone.revisit import evaluate_here, rerun_here
from elastic.train.session import loop_of
from tests.support.chaos import alone, exported_hash
from tests.support.toys import Sums, toy_job

CELL = """
import torch
from torch import nn
from math import pi as about_three

SCALE, UNUSED, TABLE = 0.3, 1, {"a": [1.5, {2, 3}], "b": torch.arange(3)}

def unused():
    return UNUSED

class Base(nn.Sequential):
    pass

class Net(Base):
    def init_weights(self):
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=SCALE)

def helper(x):
    return x * TABLE["a"][0] + about_three

def build(width=8, *, bias=True):
    # a remark
    return Net(nn.Linear(4, width, bias=bias), nn.Tanh(), nn.Linear(width, 1))

def make_loss(power):
    def loss(model, batch):
        errors = [helper(e) for e in [model(batch["x"]) - batch["y"]]][0]
        return (errors.abs() ** power).sum(), torch.tensor(errors.numel())
    return loss

loss = make_loss(2)
short = lambda model, batch: loss(model, batch)

class Waves:
    def __len__(self):
        return 64
    def read(self, ids):
        x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in ids])
        return {"x": x, "y": x.sin().sum(1, keepdim=True)}
    def fingerprint(self):
        return "waves"
"""


def cell(source: str = CELL) -> dict[str, Any]:
    """Runs the cell as a script does: what it defines belongs to ``__main__``."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), namespace)
    return namespace


def edited(old: str, new: str) -> dict[str, Any]:
    assert CELL.count(old) == 1
    return cell(CELL.replace(old, new))


def job_of(folder: Path, of: dict[str, Any], **changes: Any) -> Job:
    values = {
        "name": "run",
        "bucket": str(folder),
        "model": of["build"],
        "loss": of["loss"],
        "data": {"dataset": of["Waves"]},
    }
    return Job(**values | {"steps": 6, "global_batch": 8, "checkpoint": {"save_every": 3}} | changes)


def parts(of: dict[str, Any], *names: str) -> dict[str, str]:
    return parts_of(Given(of[name]) for name in names or ("build", "loss", "Waves"))[0]


# ---- names


@pytest.mark.fast
def test_l11_an_object_is_its_name_if_that_can_be_imported(tmp_path: Path) -> None:
    """L11: else it is a text that stands for it, also in ``job.json``; the object goes nowhere by itself."""
    job = toy_job(tmp_path, name="run", data={"dataset": Sums}, model=parts_of)
    assert (job.data.dataset, job.model) == (
        "tests.support.toys:Sums",
        "elastic.code.given:parts_of",
    ) and job.objects() == {}
    of = cell()
    job = job_of(tmp_path, of, loss=of["short"]).replace(seed=3)
    assert job.code() == ("object:build", "object:lambda", "object:Waves")
    assert [load(path) for path in job.code()] == [of["build"], of["short"], of["Waves"]]
    assert set(job.objects()) == {"model", "loss", "data.dataset"}
    assert Job(name="run", bucket="b", model=partial(of["build"], 4)).model == "object:partial"
    for copied in (Job.from_json(job.to_json()), pickle.loads(pickle.dumps(job))):
        assert copied.code() == job.code() and copied.digest == job.digest and copied.objects() == {}
    with pytest.raises(
        CodeError,
        match=(
            r"^model = 'object:build' is code of the script or notebook that began the run, and this "
            r"command"
        ),
    ):
        load(Job.from_json(job.to_json()).model, "model")


@pytest.mark.fast
@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "must be text"),
        ([1], "must be text"),
        ("nothing", r"must name code as 'package\.module:name'"),
        (
            "__main__:build",
            (
                "names code of the running script; give the function or class itself, without quotes, "
                "or put it into"
            ),
        ),
    ],
)
def test_l11_what_a_file_can_say_is_checked_as_before(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(JobError, match=rf"^Job: model = .* {says}"):
        Job(name="run", bucket=str(tmp_path), model=value)


# ---- fingerprints


@pytest.mark.fast
@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("# a remark", "# another", set()),
        ("    return UNUSED", "    return -UNUSED", set()),
        ("SCALE, UNUSED, TABLE = 0.3, 1,", "SCALE, UNUSED, TABLE = 0.3, 2,", set()),
        ("= 0.3, 1", "= 0.4, 1", {"__main__.SCALE"}),
        ("{2, 3}", "{2, 4}", {"__main__.TABLE"}),
        ("arange(3)", "arange(4)", {"__main__.TABLE"}),
        ("normal_", "uniform_", {"__main__.Net"}),
        ("class Net(Base):", "class Net(Base):\n    extra = 1", {"__main__.Net"}),
        (
            "class Base(nn.Sequential):\n    pass",
            "class Base(nn.Sequential):\n    extra = 1",
            {"__main__.Net"},
        ),
        ("def build(width=8", "def build(width=9", {"object:build"}),
        ("bias=True)", "bias=False)", {"object:build"}),
        ("nn.Tanh()", "nn.GELU()", {"object:build"}),
        ("make_loss(2)", "make_loss(3)", {"object:loss"}),
        (".abs() **", ".square() **", {"object:loss"}),
        ("return x * TABLE", "return -x * TABLE", {"__main__.helper"}),
        ("import pi as", "import tau as", {"__main__.about_three"}),
        ('return "waves"', 'return "tides"', {"object:Waves"}),
    ],
)
def test_l11_a_fingerprint_is_of_all_that_the_object_computes_with(
    old: str, new: str, differs: set[str]
) -> None:
    """L11: code, defaults, closures, members, bases, and globals through other functions; each difference is
    at the part that has it.
    """
    before, after = parts(cell()), parts(edited(old, new))
    assert before == parts(cell()), "the control: the same cell, run again"
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == differs


def test_l11_a_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    """L11: sets have another order in each, unless the seed of their hashes is fixed; so two are, and one
    program is typed.
    """
    small = """
WORDS, SCALE = {"a", "b", "c", "d"}, {"x": 0.3}
class Base: pass
class Net(Base):
    def of(self, word): return word in WORDS or SCALE[word]
def outer(power):
    def build(x): return Net().of(x) ** power
    return build
build = outer(2)
"""
    program = (
        f"{small}\nfrom elastic.code.given import Given, "
        "parts_of\nprint(sorted(parts_of([Given(build)])[0].items()))"
    )
    (tmp_path / "script.py").write_text(program)
    told = {
        subprocess.run(
            [sys.executable, *words],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            input=text,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, words, text in (("1", [str(tmp_path / "script.py")], None), ("2", ["-"], program))
    }
    assert told == {f"{sorted(parts(cell(small), 'build').items())}\n"}


@pytest.mark.fast
def test_l11_modules_of_an_object_are_files_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L11, L10: a helper beside the script is read as a file, and two objects of one name are two."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "beside.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "later.py").write_text("")
    build = "def build():\n    import later\n    return twice(1)"
    of = cell(f"from beside import twice\n{build}\nloss = (lambda: twice(2))\nother = (lambda: twice(3))")
    files = sources_of([Given(of[name]) for name in ("build", "loss", "other")]).files
    assert set(files) == {"beside.py", "later.py", "object:build", "object:lambda", "object:lambda (2)"}
    assert files["object:lambda"] != files["object:lambda (2)"]


@pytest.mark.fast
def test_l11_things_that_contain_themselves_or_cannot_be_taken_apart() -> None:
    build = "def build(n):\n    return build(n - 1) if n else (lock, ring)"
    of = cell(f"import threading\nlock, ring = threading.Lock(), []\nring.append(ring)\n{build}")
    assert set(parts(of, "build")) == {"object:build", "__main__.build", "__main__.lock", "__main__.ring"}


# ---- the way to workers


@pytest.mark.fast
def test_l11_a_worker_gets_what_the_driver_had(tmp_path: Path) -> None:
    """L11: the job that travels has only names; with the bytes it has the objects, which compute the same and
    have the same build.
    """
    of = cell()
    job = job_of(tmp_path, of)
    there = UsersCode([], b"".join(pack(job))).restore(pickle.loads(pickle.dumps(job)))
    assert (
        code_digest(there.code())
        == code_digest(job.code())
        != code_digest(Job.from_json(job.to_json()).code())
    )
    assert load(there.model) is not of["build"], "the control: it is another object"
    batch, model = of["Waves"]().read((1, 2)), torch.nn.Linear(4, 1)
    assert torch.equal(load(there.loss)(model, batch)[0], of["loss"](model, batch)[0])
    assert pack(toy_job(tmp_path)) == [] and UsersCode([]).restore(toy_job(tmp_path)) == toy_job(tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ("held = open('/dev/null')", r"it holds the open file '/dev/null'"),
        ("import threading\nheld = threading.Lock()", r"TypeError: cannot pickle '_thread\.lock' object"),
    ],
)
def test_l11_what_cannot_be_sent_is_one_sentence(tmp_path: Path, extra: str, says: str) -> None:
    """L11: it names the setting, and in one process it works, since nothing is sent there."""
    of = cell(f"{CELL}\n{extra}\ndef holding(model, batch):\n    held\n    return loss(model, batch)\n")
    job = job_of(tmp_path, of, loss=of["holding"])
    fix = "create or open such an object inside the function that uses it"
    with pytest.raises(
        JobError, match=rf"^loss = 'object:holding' cannot be sent to workers: {says}; {fix}$"
    ):
        launch(job)
    assert launch(job, local=True, show=lambda line: None).state == "Finished"
    if isinstance(of["held"], TextIOWrapper):
        of["held"].close()


@pytest.mark.fast
def test_l11_data_in_a_closure_has_a_limit(tmp_path: Path) -> None:
    for numbers, fits in ((LARGEST // 8, True), (LARGEST // 2, False)):
        of = cell(f"{CELL}\ntable = torch.zeros({numbers})\nWaves.table = table")
        if fits:
            chunks = pack(job_of(tmp_path, of))
            assert sum(map(len, chunks)) > 4 * numbers and max(map(len, chunks)) < 100 * 2**10
            continue
        with pytest.raises(
            JobError,
            match=(
                r"^data\.dataset = 'object:Waves' takes 8\.39 MB, and all objects of a job together "
                r"may take 4\.19 MB"
            ),
        ):
            pack(job_of(tmp_path, of))


@pytest.mark.fast
def test_l11_a_class_for_metrics_must_be_in_a_module(tmp_path: Path) -> None:
    job = job_of(tmp_path, cell(), metrics={"sinks": {cell()["Waves"]: {}}})
    with pytest.raises(
        JobError,
        match=(
            r"^metrics\.sinks = 'object:Waves' is used by processes that do not have your script; put "
            r"the class into a module"
        ),
    ):
        pack(job)


@pytest.mark.fast
def test_l11_a_loop_and_a_schedule_are_sent_too(tmp_path: Path) -> None:
    """L11: a worker gets them.  The control: whoever only reads the job has neither."""
    of = cell(
        f"{CELL}\ndef train(ctx):\n    for step in ctx.steps():\n        step.run()\n        step.commit()\n"
        "def halved(step, steps):\n    return 0.5\n"
    )
    job = job_of(tmp_path, of, loop=of["train"])
    there = UsersCode([], b"".join(pack(job))).restore(Job.from_json(job.to_json()))
    assert loop_of(there).__code__ == of["train"].__code__
    with pytest.raises(CodeError, match="this command does not have it"):
        loop_of(Job.from_json(job.to_json()))
    scheduled = job_of(tmp_path, of, schedule={"kind": of["halved"]})
    there = UsersCode([], b"".join(pack(scheduled))).restore(Job.from_json(scheduled.to_json()))
    assert learning_rate_of(there, 3) == 0.5 * scheduled.optim.lr
    with pytest.raises(CodeError, match="this command does not have it"):
        learning_rate_of(Job.from_json(scheduled.to_json()), 3)
    assert launch(scheduled, local=True, show=lambda line: None).state == "Finished"


# ---- a run


def trained(job: Job, stop: int = 0, **words: Any) -> Any:
    def show(line: Line) -> None:
        if isinstance(line, StepLine) and line.step == stop:
            raise KeyboardInterrupt

    result = launch(job, local=True, show=show, **words)
    assert result.state == ("Stopped" if stop else "Finished")
    return result


def test_l11_a_run_goes_on_with_the_same_objects_only(tmp_path: Path) -> None:
    """L11: a cell that is run again has the same fingerprint; another one is refused by name.  The control:
    it changes the bits.
    """
    whole = trained(job_of(tmp_path / "whole", cell()))
    trained(job_of(tmp_path / "bucket", cell()), stop=3)
    other = edited("make_loss(2)", "make_loss(3)")
    with pytest.raises(
        JobError,
        match=(
            r"the code of the run 'run' .* has changed since step 3: object:loss \(changed\); "
            r"undo the change, or"
        ),
    ):
        trained(job_of(tmp_path / "bucket", other))
    accepted = tmp_path / "accepted"
    trained(job_of(accepted, cell()), stop=3)
    trained(job_of(accepted, other), accept_code=True)
    result = trained(job_of(tmp_path / "bucket", cell()))
    assert exported_hash(job_of(tmp_path / "bucket", cell())) == exported_hash(
        job_of(tmp_path / "whole", cell())
    )
    assert exported_hash(job_of(accepted, other)) != exported_hash(job_of(tmp_path / "whole", cell()))
    assert result.losses == whole.losses and list(whole.losses) == [1, 2, 3, 4, 5, 6]
    again = job_of(tmp_path / "bucket", cell())
    assert rerun_here(again, 4).now.loss == whole.losses[4], "the script that has the objects can look again"
    with pytest.raises(CodeError, match="this command does not have it"):
        rerun_here(Job.from_json(again.to_json()), 4)


def test_l11_the_result_has_the_losses_and_the_validations(tmp_path: Path) -> None:
    """L11: those that were shown, to the bit, and as many validations as were due; the weights are those of
    the same code in a module.
    """
    validation = {"every": 2, "samples": 8}
    job, shown = toy_job(tmp_path / "one", name="run", steps=5, validation=validation), dict[int, float]()
    result = launch(
        job,
        local=True,
        show=lambda line: shown.update({line.step: line.loss}) if isinstance(line, StepLine) else None,
    )
    assert result.losses == shown and set(shown) == {1, 2, 3, 4, 5}
    assert set(result.validations) == {2, 4, 5}
    same = {
        name: (lambda of: lambda *a, **k: of(*a, **k))(load(path))
        for name, path in (("model", job.model), ("loss", job.loss))
    }
    given = toy_job(tmp_path / "two", name="run", steps=5, validation=validation, **same)
    assert alone(given).hash == exported_hash(job) != ""


def test_l11_an_optimizer_and_held_out_samples_are_objects_too(tmp_path: Path) -> None:
    """L11: with the product's own rule, wrapped, the bits are those of its name."""
    rule = "from elastic.engine.optim.sgd import SGD\nfrom dataclasses import replace\nRULE = replace(SGD)"
    of = cell(f"{CELL}\n{rule}")
    held_out = {"every": 3, "dataset": of["Waves"], "samples": 4}
    job = job_of(tmp_path / "object", of, optim={"kind": of["RULE"]}, validation=held_out)
    assert set(job.objects()) == {"model", "loss", "data.dataset", "optim.kind", "validation.dataset"}
    there = UsersCode([], b"".join(pack(job))).restore(Job.from_json(job.to_json()))
    assert there.objects().keys() == job.objects().keys() and there.code() == job.code()
    assert set(trained(job).validations) == {3, 6}
    named = job_of(tmp_path / "name", of, optim={"kind": "sgd"})
    trained(named)
    assert exported_hash(job) == exported_hash(named) != ""


def test_l11_a_checkpoint_is_looked_at_by_who_has_the_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L11: the judge is what the run measured and recorded by itself.  The control, a command without the
    objects, says what to do.
    """
    job = job_of(tmp_path, cell(), validation={"every": 6, "samples": 8})
    result = trained(job)
    version, found = evaluate_here(job)
    assert (version.step, found.mean) == (6, result.validations[6])
    assert rerun_here(job, 1).now.loss == result.losses[1]
    (path := tmp_path / "job.toml").write_text(f'name = "run"\nbucket = "{job.bucket}"\n')
    for words in (["evaluate"], ["rerun", "--step", "1"]):
        assert main([words[0], str(path), *words[1:]]) == 1
        said = " ".join(capsys.readouterr().out.split())
        assert (
            said.startswith("elastic: ")
            and "is code of the script or notebook that began the run" in said
            and "evaluate_here" in said
        )


def test_l11_launch_prints_its_progress_unless_told_where_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(toy_job(tmp_path / "one", name="run", steps=2), local=True)
    assert "step     2/2  loss " in capsys.readouterr().out
    launch(toy_job(tmp_path / "two", name="run", steps=2), local=True, show=lambda line: None)
    assert "step " not in capsys.readouterr().out


@pytest.mark.fast
@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"model": lambda: 3},
            ModelError,
            (
                r"^model = 'object:lambda' returned a int; it must return a "
                r"torch\.nn\.Module$"
            ),
        ),
        ({"loss": type("Loss", (), {})}, CodeError, r"^loss = '.*' names a class; name a function"),
    ],
)
def test_l11_what_an_object_must_be_is_said_as_of_a_name(
    tmp_path: Path, changes: dict[str, Callable[..., Any]], error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        launch(job_of(tmp_path, cell(), **copy.copy(changes)), local=True)
