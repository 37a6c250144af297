"""L10: a run whose code has changed does not go on without a word; the files are named, also those that only
imports reach.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from actors.cli import main
from actors.launch import launch
from elastic.code import sources
from elastic.code.sources import Sources, sources_of
from elastic.errors import JobError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.report.story import Line, Sentence, StepLine
from elastic.runs.code import at, begin, listed, noted
from elastic.runs.metrics import rows_of
from elastic.runs.run import Run
from elastic.train.alone.revisit import evaluate_here, rerun_here
from storage.errors import Exists, Missing
from storage.objects import ObjectStore
from tests.support.chaos import exported_hash
from tests.support.job_file import to_toml

FILES = {
    "mine/__init__.py": "",
    "mine/model.py": """
        from torch import nn
        from .layers import act, init


        class Net(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.up, self.down = nn.Linear(4, width), nn.Linear(width, 1)

            def init_weights(self):
                init(self)

            def forward(self, x):
                return self.down(act(self.up(x)))


        def build(width=8):
            return Net(width)
    """,
    "mine/layers.py": """
        import torch
        from torch import nn


        def act(x):  # the activation
            return torch.relu(x)


        def init(model):
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.3)
    """,
    "mine/samples.py": """
        import torch


        class Waves:
            def __len__(self):
                return 64

            def read(self, ids):
                import helpers
                x = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in ids])
                return {"x": x, "y": helpers.target(x)}

            def fingerprint(self):
                return "waves"
    """,
    "mine/unused.py": "nobody = imports_this\n",
    "mine_loss.py": """
        import torch


        def loss(model, batch):
            errors = model(batch["x"]) - batch["y"]
            return errors.square().sum(), torch.tensor(errors.numel())
    """,
    "helpers.py": "def target(x):\n    return x.sin().sum(1, keepdim=True)\n",
}
USED = {
    "mine/__init__.py",
    "mine/model.py",
    "mine/layers.py",
    "mine/samples.py",
    "mine_loss.py",
    "helpers.py",
}
NAMED = ("mine.model:build", "mine_loss:loss", "mine.samples:Waves")
RELU, GELU = "torch.relu(x)", "torch.nn.functional.gelu(x)"


def write(folder: Path) -> Path:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def forget() -> None:
    """Lets the next import read the files again, as a new process does."""
    sys.dont_write_bytecode = True  # its time stamps have whole seconds
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "mine_loss", "helpers")]:
        del sys.modules[name]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    before = sys.dont_write_bytecode
    folder = write(tmp_path / "code")
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    forget()
    sys.dont_write_bytecode = before


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    forget()


def job_of(folder: Path, **changes: object) -> Job:
    data = {"dataset": "mine.samples:Waves"}
    values = {
        "name": "run",
        "bucket": str(folder / "bucket"),
        "model": "mine.model:build",
        "loss": "mine_loss:loss",
        "data": data,
    }
    return Job(**values | {"steps": 6, "global_batch": 8, "checkpoint": {"save_every": 3}} | changes)


def trained(job: Job, stop: int = 0, *, accept_code: bool = False) -> list[str]:
    """Trains in this process, to the end or until Ctrl-C at step ``stop``.  Returns the sentences."""
    said: list[str] = []

    def show(line: Line) -> None:
        if isinstance(line, Sentence):
            said.append(line.text)
        elif isinstance(line, StepLine) and line.step == stop:
            raise KeyboardInterrupt

    result = launch(job, local=True, accept_code=accept_code, show=show)
    assert result.state == ("Stopped" if stop else "Finished"), result
    return said


# ---- which files


@pytest.mark.fast
def test_l10_the_files_are_those_that_the_job_names_and_what_they_import(code: Path) -> None:
    """L10: also inside of functions, and only the user's own; what nobody imports does not count."""
    assert set(sources_of(NAMED).files) == USED
    assert set(sources_of(["mine_loss:loss"]).files) == {"mine_loss.py"}
    assert sources_of(["elastic.models.llama:build", "torch.nn:Linear", "json:loads"]).files == {}, (
        "neither ours nor installed ones"
    )
    assert not any(name.partition(".")[0] in ("mine", "helpers") for name in sys.modules), (
        "nothing was imported for it"
    )


@pytest.mark.fast
def test_l10_folders_without_init_below_a_package_count_though_nothing_is_imported(code: Path) -> None:
    """L10: importlib looks for the path of the package among imported modules, and raises KeyError."""
    (code / "mine/plain").mkdir()
    (code / "mine/plain/loss.py").write_text("from mine import layers\n")
    assert "mine" not in sys.modules
    assert {"mine/plain/loss.py", "mine/layers.py"} <= {*sources_of(["mine.plain.loss:loss"]).files}
    assert not sources_of(["mine.absent.loss:loss"]).files.keys() - {"mine/__init__.py"}


def test_l10_what_an_installer_put_into_any_folder_is_no_code_of_the_user(code: Path) -> None:
    """L10: as ``pip install --target`` does.  The control: the same files beside the list of a project that
    is worked on are the user's.
    """
    assert "mine/model.py" in sources_of(["mine.model:build"]).files
    for kind, users in (("egg-info", True), ("dist-info", False)):
        info = code / f"mine-1.0.{kind}"
        info.mkdir()
        (info / {"egg-info": "PKG-INFO", "dist-info": "METADATA"}[kind]).write_text(
            "Name: mine\nVersion: 1.0\n"
        )
        (info / {"egg-info": "SOURCES.txt", "dist-info": "RECORD"}[kind]).write_text(
            "mine/__init__.py,,\nmine/model.py,,\n"
        )
        sources._distributed.cache_clear()
        assert ("mine/model.py" in sources_of(["mine.model:build"]).files) == users, kind
    sources._distributed.cache_clear()


def test_l10_a_file_of_the_user_is_theirs_whatever_an_installer_put_beside_it(code: Path) -> None:
    """L10: wheels bring folders such as ``tests``.  Only the files that are listed are the installer's, and
    what only they import.

    The control: with the user's file on the list, it is no code of the user.
    """
    info = code / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        'mine/__init__.py,,\nmine/samples.py,sha256=x,12\n"mine/a,b.txt",,\nother-1.0.dist-info/RECORD,,\n'
    )
    sources._distributed.cache_clear()
    assert set(sources_of(NAMED).files) == {"mine/model.py", "mine/layers.py", "mine_loss.py"}
    (code / "mine/__init__.py").unlink()
    assert set(sources_of(NAMED).files) == {"mine/model.py", "mine/layers.py", "mine_loss.py"}, (
        "also in a package without __init__.py"
    )
    with (info / "RECORD").open("a") as record:
        record.write("mine/model.py,,\nmine_loss.py,,\n")
    sources._distributed.cache_clear()
    assert sources_of(NAMED).files == {}
    sources._distributed.cache_clear()


def test_l10_a_package_that_imports_by_computed_names_counts_whole(code: Path) -> None:
    """L10: nobody can read from ``import_module(name)`` which files it takes."""
    edit(
        code / "mine/model.py",
        "from torch import nn",
        "from importlib import import_module\nfrom torch import nn",
    )
    assert set(sources_of(NAMED).files) == USED, "the import alone calls nothing"
    edit(code / "mine/model.py", "return Net(width)", "return import_module('mine.' + 'model').Net(width)")
    assert set(sources_of(NAMED).files) == {*USED, "mine/unused.py"}


@pytest.mark.fast
def test_l10_the_same_code_in_another_folder_is_the_same(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sources_of(NAMED)
    shutil.move(code, tmp_path / "moved")
    monkeypatch.syspath_prepend(tmp_path / "moved")
    forget()
    after = sources_of(NAMED)
    assert after == before and after.differ(before) == []
    edit(tmp_path / "moved/helpers.py", ".sin()", ".cos()")
    assert sources_of(NAMED).differ(before) == ["helpers.py (changed)"]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("old", "new", "differs"),
    [
        ("# the activation", "# another remark", []),
        ("return torch.relu(x)", "return (\n        torch.relu(x)\n    )", []),
        (RELU, GELU, ["mine/layers.py (changed)"]),
        ("std=0.3", "std=0.30001", ["mine/layers.py (changed)"]),
        (
            "import torch\n",
            "import torch\nfrom . import unused\n",
            ["mine/layers.py (changed)", "mine/unused.py (new)"],
        ),
    ],
)
def test_l10_comments_and_formatting_are_no_change(
    code: Path, old: str, new: str, differs: list[str]
) -> None:
    """L10: all else is one.  Between versions of Python only the bytes can be compared."""
    before = sources_of(NAMED)
    edit(code / "mine/layers.py", old, new)
    assert sources_of(NAMED).differ(before) == differs
    assert ("mine/layers.py (changed)" in sources_of(NAMED).differ(Sources(before.files, "2.7"))) is True
    edit(code / "mine/layers.py", new, old)
    assert sources_of(NAMED).differ(Sources(before.files, "2.7")) == []


@pytest.mark.fast
def test_l10_a_file_that_is_gone_or_cannot_be_parsed(code: Path) -> None:
    before = sources_of(NAMED)
    edit(code / "mine/samples.py", "import helpers", "pass")
    assert sources_of(NAMED).differ(before) == ["helpers.py (gone)", "mine/samples.py (changed)"]
    edit(code / "mine/samples.py", "pass", "import helpers")
    (code / "helpers.py").write_text("def (")
    assert sources_of(NAMED).differ(before) == ["helpers.py (changed)"]
    assert listed([f"{n}.py (new)" for n in range(8)]).endswith("5.py (new) and 2 more")


# ---- a run


def test_l10_changed_code_is_refused_by_name_and_accepted_by_a_word(code: Path, tmp_path: Path) -> None:
    """L10: relu becomes gelu, in a file that the job does not name.  The record says which file, and from
    which step on.
    """
    whole = tmp_path / "whole"
    trained(job_of(whole))
    job, store = job_of(tmp_path), ObjectStore.open(str(tmp_path / "bucket"))
    trained(job, stop=3)
    edit(code / "mine/layers.py", RELU, GELU)
    refused = (
        r"^the code of the run 'run' in bucket = '.*' has changed since step 3: mine/layers\.py "
        r"\(changed\); undo the change, or go on with today's code by --accept-code \(launch\(\.\.\., "
        r"accept_code=True\)\), or begin at step 0 under another name$"
    )
    with pytest.raises(JobError, match=refused):
        trained(job)
    assert [each.changed for each in noted(store, "run")] == [[]], "a refusal writes nothing"
    said = trained(job, accept_code=True)
    assert "code 2 of run goes on from step 3: mine/layers.py (changed)" in said
    assert [(each.number, each.step, each.changed) for each in noted(store, "run")] == [
        (1, 0, []),
        (2, 3, ["mine/layers.py (changed)"]),
    ]
    assert exported_hash(job) != exported_hash(job_of(whole)), "the change was one"


def test_l10_unchanged_code_needs_no_word(code: Path, tmp_path: Path) -> None:
    """L10, the control: a remark, or a change that was undone, is none, and the bits are those of a run that
    never stopped.
    """
    whole, job = job_of(tmp_path / "whole"), job_of(tmp_path)
    trained(whole)
    trained(job, stop=3)
    edit(code / "mine/layers.py", RELU, GELU)
    edit(code / "mine/layers.py", GELU, RELU)
    edit(code / "mine/layers.py", "# the activation", "# what bends the line")
    said = trained(job, accept_code=True)
    assert not any(text.startswith("code ") for text in said), "the word alone begins nothing"
    assert exported_hash(job) == exported_hash(whole)


def test_l10_code_matters_only_where_a_run_goes_on(code: Path, tmp_path: Path) -> None:
    """L10: a run that has no checkpoint begins with the code of now, and one that has made all its steps
    trains no more.
    """
    job = job_of(tmp_path)
    edit(code / "mine_loss.py", "errors = ", "errors = nothing = undefined + ")
    with pytest.raises(ModelError, match="'undefined' is not defined"):
        trained(job)
    edit(code / "mine_loss.py", "errors = nothing = undefined + ", "errors = ")
    assert not any("the code of" in text for text in [*trained(job), *trained(job)])
    edit(code / "mine/layers.py", RELU, GELU)
    note = (
        "the code has changed since run was trained (mine/layers.py (changed)); this does not matter "
        "now, since no step is left to train"
    )
    assert note in trained(job)
    with pytest.raises(JobError, match=r"steps = 6 in the run and 9 now"):
        trained(job.replace(steps=9))
    with pytest.raises(JobError, match=r"has changed since step 6: mine/layers\.py \(changed\)"):
        launch(job.replace(steps=9), local=True, branch=True)


@pytest.fixture
def of_two(code: Path, tmp_path: Path) -> Job:
    """Returns the job of a run whose steps 1 to 3 were made with relu, and 4 to 6 with gelu; what is on disk
    is relu.
    """
    validation = {"every": 3, "dataset": "mine.samples:Waves"}
    job = job_of(tmp_path, validation=validation)
    trained(job, stop=3)
    edit(code / "mine/layers.py", RELU, GELU)
    trained(job, accept_code=True)
    edit(code / "mine/layers.py", GELU, RELU)
    return job


def test_l10_a_step_is_looked_at_with_the_code_that_made_it(
    code: Path, of_two: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L10: `evaluate` and `rerun` take relu for what relu has made, and gelu for the rest; the bits are those
    that the run recorded.

    The control: accepted all the same, other code gives another loss.
    """
    changed = (
        r"code of the run 'run' .* has changed since step {}: mine/layers\.py \(changed\); undo the "
        r"change, or use today's code"
    )
    told = {int(row["step"]): row for row in rows_of(Run.find(of_two))}
    assert rerun_here(of_two, 1).now.loss == told[1]["loss"] and evaluate_here(of_two, 3)[0].step == 3
    for look, step in ((rerun_here, 4), (evaluate_here, 6), (evaluate_here, None)):
        with pytest.raises(JobError, match=changed.format(step or 6)):
            look(of_two, step)
    assert rerun_here(of_two, 4, accept_code=True).now.loss != told[4]["loss"]
    assert evaluate_here(of_two, 6, accept_code=True)[1].mean != told[6]["validation_loss"]
    (tmp_path / "job.toml").write_text(to_toml(of_two))
    for words in (["rerun", "--step", "4"], ["evaluate"]):
        command = [words[0], str(tmp_path / "job.toml"), *words[1:]]
        assert (main(command), main([*command, "--accept-code"])) == (1, 0)
    assert "mine/layers.py" in capsys.readouterr().out
    edit(code / "mine/layers.py", RELU, GELU)
    assert (
        rerun_here(of_two, 4).now.loss == told[4]["loss"]
        and evaluate_here(of_two)[1].mean == told[6]["validation_loss"]
    )
    for look, step in ((rerun_here, 1), (evaluate_here, 3)):
        with pytest.raises(JobError, match=changed.format(step)):
            look(of_two, step)


@pytest.mark.parametrize("name", ["run", "fork"])
def test_l10_what_goes_on_from_a_step_has_the_code_that_made_it(code: Path, of_two: Job, name: str) -> None:
    """L10: a fork, and the run itself that goes back.  The control: with its newest code a run goes on from
    its newest step.
    """
    job = of_two.replace(name=name, steps=9, validation={})
    edit(code / "mine/layers.py", RELU, GELU)
    with pytest.raises(JobError, match=r"has changed since step 3: mine/layers\.py \(changed\)"):
        launch(job, local=True, resume="run@3")
    store = ObjectStore.open(job.bucket)
    assert not store.list("fork/") and not store.list("run/branches/") and len(noted(store, "run")) == 2
    assert launch(job.replace(name="newest"), local=True, resume="run@6").state == "Finished"
    edit(code / "mine/layers.py", GELU, RELU)
    assert launch(job, local=True, resume="run@3").state == "Finished"
    with pytest.raises(JobError, match=r"has changed since step 6: mine/layers\.py \(changed\)"):
        launch(job.replace(name="other"), local=True, resume="newest@6")
    assert (
        launch(job.replace(name="other"), local=True, resume="newest@6", accept_code=True).state == "Finished"
    )


def test_l10_after_a_rollback_the_run_has_the_code_of_the_version_it_goes_on_from(
    code: Path, of_two: Job, tmp_path: Path
) -> None:
    """L10: rolled back to step 3, the run is one of relu again, and gelu is refused.  The control: until then
    relu is refused.
    """
    job = of_two.replace(steps=9)
    with pytest.raises(JobError, match=r"has changed since step 6: mine/layers\.py \(changed\)"):
        launch(job, local=True, branch=True)
    (tmp_path / "job.toml").write_text(to_toml(of_two))
    assert main(["rollback", str(tmp_path / "job.toml"), "--to", "3"]) == 0
    edit(code / "mine/layers.py", RELU, GELU)
    with pytest.raises(JobError, match=r"has changed since step 3: mine/layers\.py \(changed\)"):
        trained(of_two)
    edit(code / "mine/layers.py", GELU, RELU)
    assert "code 3 of run goes on from step 3: mine/layers.py (changed)" in trained(of_two)
    relu = job_of(tmp_path / "whole", validation={"every": 3, "dataset": "mine.samples:Waves"})
    trained(relu)
    assert exported_hash(of_two) == exported_hash(relu)


@pytest.mark.fast
def test_l10_what_was_abandoned_has_the_code_that_made_it() -> None:
    """L10: code that was noted after a rewind to step 2 did not make step 4 of an older generation, which is
    later than its beginning.
    """
    store, relu, gelu = (
        ObjectStore.open("memory://sources-at"),
        Sources({"a.py": ("1", "1")}),
        Sources({"a.py": ("2", "2")}),
    )
    begin(store, "run", relu, Version(0, 0), 0.0)
    begin(store, "run", gelu, Version(2, 1), 0.0, until=3)
    assert [at(store, "run", Version(4, generation)) for generation in (1, 2, 3, 4)] == [
        relu,
        relu,
        relu,
        gelu,
    ]


def test_l10_no_command_is_locked_out_by_changed_code(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L10: a file that cannot even be imported locks nobody out of what the run has done (L6)."""
    job = job_of(tmp_path)
    trained(job, stop=3)
    (tmp_path / "job.toml").write_text(to_toml(job))
    (code / "mine/model.py").write_text("def (")
    forget()
    for *words, option in (
        ["status", "--once"],
        ["metrics", ""],
        ["checkpoint", "ls", ""],
        ["checkpoint", "verify", ""],
    ):
        assert main([*words, str(tmp_path / "job.toml"), *filter(None, [option])]) == 0, words
    assert main(["train", str(tmp_path / "job.toml"), "--local"]) == 1, (
        "the control: what needs the code says so"
    )
    assert "SyntaxError" in capsys.readouterr().out


class Before:
    """A store as it was before another command wrote, for the first looks at it."""

    def __init__(self, store: ObjectStore, looks: int) -> None:
        self.store, self.looks = store, looks

    def matching(self, folder: str, pattern: str) -> Any:
        self.looks -= 1
        return [] if self.looks >= 0 else self.store.matching(folder, pattern)

    def size(self, key: str) -> int:
        if self.looks >= 0:
            raise Missing(key)
        return self.store.size(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.fast
def test_l10_two_commands_that_begin_at_once_begin_with_the_same_code(tmp_path: Path) -> None:
    """L10: one of two drivers follows the other; with other code it is refused, and what was noted stays."""
    store, same, version = ObjectStore.open(str(tmp_path)), Sources({"a.py": ("1", "1")}), Version(0, 0)
    assert begin(store, "run", same, version, 0.0) == ""
    late: Any = Before(store, 2)
    assert begin(late, "run", same, version, 1.0) == "" and late.looks < 0
    with pytest.raises(Exists):
        begin(cast(Any, Before(store, 2)), "run", Sources({"a.py": ("2", "2")}), version, 1.0)
    assert [each.sources for each in noted(store, "run")] == [same]


def test_l10_a_changed_shape_is_one_sentence(code: Path, tmp_path: Path) -> None:
    """L10: point 8 of the issue: the parameter, both shapes, the version and the fix, before anything of the
    run begins.
    """
    job = job_of(tmp_path)
    trained(job, stop=3)
    begun = sorted(path for path in (tmp_path / "bucket").rglob("*"))
    fix = "go on with the code and the settings with which the run began, or begin a run of another name$"
    for old, new, says in (
        (
            "nn.Linear(4, width)",
            "nn.Linear(4, width, bias=False)",
            r"^parameter 'up\.bias', F32 of shape \[8\], is in the checkpoint of step 3 ",
        ),
        (
            "nn.Linear(width, 1)",
            "nn.Linear(width, 2)",
            r"^parameter 'down\.weight' of model = 'mine\.model:build' is F32 of shape \[2, 8\], and ",
        ),
        (
            "def forward",
            "extra = 1\n\n    def forward",
            (
                r"^the code of the run 'run' .* mine/model\.py "
                r"\(changed\)"
            ),
        ),
    ):
        edit(code / "mine/model.py", old, new)
        with pytest.raises(JobError, match=says) as caught:
            trained(job)
        if isinstance(caught.value, ModelError):
            assert "\n" not in str(caught.value)
            assert str(caught.value).endswith(fix.removesuffix("$"))
        edit(code / "mine/model.py", new, old)
    assert sorted(path for path in (tmp_path / "bucket").rglob("*")) == begun, (
        "refused before the run was touched"
    )
    trained(job)
