"""Code is found by its name (U8), or one sentence says why not; no folder may take the place of our packages."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic
from actors.cli.parser import commands, parser_of
from elastic.code.imports import ROOT, _digest, check_packages, code_digest, load, own_digest
from elastic.errors import CodeError
from tests.support.patience import PATIENCE_S


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text(
        "import json\nfrom pathlib import Path\n\ndef build(dim): return dim\nSIZE = 3\n"
    )
    (package / "needs.py").write_text("import not_installed_anywhere\n")
    (package / "raises.py").write_text("import json\n\nx = 1 // 0\n")
    (package / "syntax.py").write_text("def f(:\n")
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


@pytest.mark.fast
def test_code_is_found_by_name(user_code: Path) -> None:
    assert load("theirs.good:build")(4) == 4
    assert load("elastic.plan.layout:Layout").__name__ == "Layout"


@pytest.mark.fast
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("theirs.good.build", "'theirs.good.build' does not name code; write 'package.module:name'"),
        ("theirs.good:", "does not name code"),
        (":build", "does not name code"),
        ("theirs/good.py:build", "does not name code"),
        ("theirs.good:biuld", "has no 'biuld'; did you mean 'theirs.good:build'?"),
        ("theirs.good:Pth", "did you mean 'theirs.good:Path'?"),
        ("theirs.good:xyzzy", "has no 'xyzzy'; it has SIZE, build"),
        ("nobodys.good:build", "Python finds no module 'nobodys' on this machine (its path begins with '"),
        ("theirs.missing:build", "Python finds no module 'theirs.missing' on this machine"),
        ("theirs.godo:build", "or add its folder to PYTHONPATH; did you mean 'theirs.good'?"),
        ("thiers.good:build", "or add its folder to PYTHONPATH; did you mean 'theirs'?"),
        (
            "theirs.needs:build",
            (
                "importing theirs.needs failed with ModuleNotFoundError: No module named "
                "'not_installed_anywhere'"
            ),
        ),
        ("theirs.raises:build", "importing theirs.raises failed with ZeroDivisionError"),
        ("theirs.syntax:build", "importing theirs.syntax failed with SyntaxError"),
    ],
)
def test_u8_code_that_cannot_be_imported_is_named(user_code: Path, path: str, said: str) -> None:
    """U8: a named error, before any world forms."""
    with pytest.raises(CodeError) as caught:
        load(path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_where_the_users_import_failed_is_said(user_code: Path) -> None:
    with pytest.raises(CodeError, match=rf"in {user_code}/raises.py, line 3"):
        load("theirs.raises:build")
    with pytest.raises(CodeError, match=rf"in {user_code}/needs.py, line 1"):
        load("theirs.needs:build")
    with pytest.raises(CodeError, match=rf"\(in {user_code}/syntax.py, line 1\)"):
        load("theirs.syntax:build")


@pytest.mark.fast
def test_our_own_packages_are_ours() -> None:
    check_packages()
    check_packages(ROOT)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["elastic", "actors", "storage"])
@pytest.mark.parametrize("form", ["{}/__init__.py", "{}.py"])
def test_u8_a_working_folder_that_would_shadow_us_is_refused(tmp_path: Path, name: str, form: str) -> None:
    """U8: the path that offends is named, before any worker starts in that folder."""
    offender = tmp_path / form.format(name)
    offender.parent.mkdir(exist_ok=True)
    offender.write_text("")
    with pytest.raises(
        CodeError,
        match=(rf"{tmp_path}/{name}(\.py)? hides Elastic's own package '{name}'.*rename your file or folder"),
    ):
        check_packages(tmp_path)


@pytest.mark.fast
@pytest.mark.parametrize("form", ["{}/__init__.py", "{}.py"])
def test_a_file_that_would_be_imported_in_place_of_a_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The controls: a folder of data of that name, and a folder in which the library itself is worked on."""
    offender = tmp_path / form.format("torch")
    offender.parent.mkdir(exist_ok=True)
    (tmp_path / "ray").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    check_packages()
    offender.write_text("")
    with pytest.raises(
        CodeError,
        match=(rf"{tmp_path}/torch(\.py)? hides the package 'torch', .*; rename your file or folder"),
    ):
        check_packages()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_packages()


@pytest.mark.fast
def test_a_folder_of_data_shadows_nothing(tmp_path: Path) -> None:
    """The control: a folder without ``__init__.py`` may have any name, and our package is found all the same."""
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "data.txt").touch()
    check_packages(tmp_path)
    code = "import storage; print(storage.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(ROOT / "storage" / "__init__.py")


@pytest.mark.parametrize("name", ["actors", "storage"])
def test_u8_a_shadowed_package_is_named_by_the_command(tmp_path: Path, name: str) -> None:
    """U8: ``python -m elastic`` in a folder that has a package of our name says which, and exits with 1."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "elastic", "--help"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"elastic: {tmp_path / name} hides Elastic's own package {name!r} ({ROOT / name}); rename "
        "your file or folder\n"
    )


@pytest.mark.fast
def test_public_names_are_lazy() -> None:
    assert elastic.JobError is load("elastic.errors:JobError")
    assert set(elastic.__all__) <= set(dir(elastic))
    with pytest.raises(AttributeError, match="no attribute 'Jobs'"):
        elastic.Jobs  # noqa: B018


@pytest.mark.fast
def test_the_digest_is_of_the_sources_wherever_they_lie(user_code: Path, tmp_path: Path) -> None:
    """R22, U8: two nodes have the same code if and only if they compute the same digest of it."""
    load("theirs.good:build")
    first = code_digest(["theirs.good:build", "elastic.plan.layout:Layout"])
    assert re.fullmatch(r"theirs [0-9a-f]{12}", first), "ours is left out"
    (user_code / ".venv").mkdir()
    (user_code / ".venv" / "hidden.py").write_text("x = 1\n")
    (user_code / "notes.txt").write_text("not code\n")
    assert code_digest(["theirs.good:build"]) == first
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(user_code, elsewhere / "theirs")
    assert _digest([elsewhere / "theirs"]) == first.split()[1], "whatever the folder above is called"
    (user_code / "deep").mkdir()
    (user_code / "deep" / "new.py").write_text("")
    with_another = code_digest(["theirs.good:build"])
    (user_code / "deep" / "new.py").rename(user_code / "deep" / "renamed.py")
    renamed = code_digest(["theirs.good:build"])
    (user_code / "good.py").write_text("def build(dim): return dim + 0\nSIZE = 3\n")
    assert code_digest(["builtins:len"]) == code_digest(["builtins:print"]), "a module of C has no source"
    assert len({first, with_another, renamed, code_digest(["theirs.good:build"])}) == 4


@pytest.mark.fast
def test_our_own_digest_is_of_every_package() -> None:
    assert (
        own_digest()
        == _digest([ROOT / "elastic", ROOT / "actors", ROOT / "storage"])
        != _digest([ROOT / "elastic"])
    )


@pytest.mark.fast
def test_whatever_process_imports_actors_finds_the_shadow_first(tmp_path: Path) -> None:
    """U8: also on a worker's node, where nobody has checked the path, the error names the folder, not a
    module missing in ``storage``.
    """
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    found = subprocess.run(
        [sys.executable, "-c", "import actors.worker"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"elastic.errors.CodeError: {tmp_path}/storage hides Elastic's own package 'storage' ("
    )


def printed(*lines: str) -> list[str]:
    """Returns the words that a new process prints for these lines."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_coordinator_and_a_command_do_not_wait_for_torch() -> None:
    """Its import takes a second.  The control: what computes imports it."""
    asked = 'print("torch" in sys.modules)'
    assert printed(
        "import sys, actors.coordinator, actors.launch", asked, "import elastic.engine.world", asked
    ) == ["False", "True"]


HEAVY = ("torch", "ray", "pyarrow", "numpy", "pydantic")
LINES = {
    "--help": "",
    "settings": "Every setting of a job",
    "train job.toml --workres.max 3": "unknown setting '--workres.max'; did you mean '--workers.max'?",
    "train typo.toml": "typo.toml: unknown setting 'stepps'; did you mean 'steps'?",
    "train job.toml --steps many": "steps = 'many' must be a whole number",
    "train nothing.toml": "there is no job file 'nothing.toml'",
    "train job.toml --model nobodys.own:build": "Python finds no module 'nobodys'",
    "train job.toml --model elastic.models.llama:biuld": "did you mean 'elastic.models.llama:build'?",
    "train job.toml --bucket job.toml": "is not a folder in which this user can write",
    "train job.toml --metrics.sinks.tensorbord.folder x": "did you mean 'tensorboard'?",
    "runs job.toml": "there is no run in bucket",
    "report job.toml": "there is no run 'toy'",
    "checkpoint ls job.toml": "there is no run 'toy'",
    "train job.toml --data.args.path nowhere": "data.args.path = 'nowhere' holds no dataset",
    "data show nowhere": "holds no dataset",
}
"""Lines that need no torch, in one process: what one of them imports is there for those after it.  Each has a
part of what it says.
"""


def test_a_line_that_needs_no_torch_does_not_wait_for_it(tmp_path: Path) -> None:
    """Modules are counted, and seconds of a core, of which torch and Ray alone take more.  The control:
    `dtypes`, which asks torch.
    """
    job = 'name = "toy"\nbucket = "bucket"\nsteps = 4\nglobal_batch = 8\n[data.args]\npath = "tokens"\n'
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "typo.toml").write_text(job.replace("steps", "stepps"))
    program = [
        "import io, json, sys, time",
        "from contextlib import redirect_stderr, redirect_stdout, suppress",
        "from elastic.__main__ import main",
        "for line in sys.stdin.read().splitlines():",
        "    sys.argv = ['elastic', *line.split()]",
        "    with redirect_stdout(said := io.StringIO()), redirect_stderr(said), suppress(SystemExit):",
        "        main()",
        f"    heavy = [name for name in {HEAVY} if name in sys.modules]",
        "    print(json.dumps([said.getvalue(), heavy, len(sys.modules), time.process_time()]))",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input="\n".join([*LINES, "dtypes"]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    answers = dict(zip([*LINES, "dtypes"], map(json.loads, done.stdout.splitlines()), strict=True))
    for line, said in LINES.items():
        assert said in answers[line][0], line
    heavy = {line: found for line, (_, found, _, _) in answers.items()}
    assert heavy["--help"] == [] and "torch" in heavy["dtypes"]
    without_data = [line for line in LINES if "--help" not in line and "nowhere" not in line]
    assert all(heavy[line] == ["pydantic"] for line in without_data), heavy
    assert all(heavy[line] == ["pyarrow", "numpy", "pydantic"] for line in LINES if "nowhere" in line), heavy
    (_, _, few, least), (_, _, many, most) = answers["--help"], answers["checkpoint ls job.toml"]
    assert few < 320 and many < 640, (
        "a quarter of what torch brings, and it is cheap to see where these come from: -X importtime"
    )
    assert least < 1.5 and most < 4


@pytest.mark.fast
def test_every_command_says_what_it_takes() -> None:
    """Its parser is made of its signature and its docstring.  The control: the parameter of a function that
    has no line there.
    """
    assert len(commands()) > 25
    for name, (place, declared) in commands().items():
        there = load(place)
        assert (inspect.signature(there), there.__doc__) == (inspect.signature(declared), declared.__doc__)
        assert parser_of(name, there).description

    def command(silent: bool = False) -> None:
        """Returns at once."""

    with pytest.raises(KeyError, match="silent"):
        parser_of("nothing", command)


def test_a_process_that_stays_alone_does_not_wait_for_the_compiler() -> None:
    """Its import takes a second.  What the user's code compiles is deterministic all the same.  The control:
    a worker, which FSDP2 makes import it, does so before it joins.
    """
    assert printed(
        "import sys, torch",
        "from elastic.train.model import build_model, builder_of",
        "from elastic.train.session import prepare_process",
        "from tests.support.toys import toy_job",
        'job = toy_job("/nowhere")',
        "build_model(job, builder_of(job))",
        "prepare_process(job, alone=True)",
        'print(torch.are_deterministic_algorithms_enabled(), "torch._dynamo" in sys.modules)',
        "prepare_process(job)",
        'print("torch._dynamo" in sys.modules)',
        "import torch._inductor.config as compiler",
        "print(compiler.deterministic)",
    ) == ["True", "False", "True", "True"]
