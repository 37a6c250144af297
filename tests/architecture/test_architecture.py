"""The architecture is as the table says; and each check finds what it is for."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.architecture import checks, prose, table
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    file.relative_to(ROOT)
    for package in (*table.PACKAGES, "tests")
    for file in sorted((ROOT / package).rglob("*.py"))
]
OURS = [file for file in FILES if file.parts[0] in table.PACKAGES]
MODULES = frozenset(checks.module_name(file) for file in OURS)

pytestmark = pytest.mark.fast


def source(file: Path) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def none(found: Iterable[str]) -> None:
    """Fails with all sentences in ``found``, each on its line."""
    lines = list(found)
    assert not lines, "\n" + "\n".join(lines)


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    """Returns what each check says of all files, each of which is read and parsed once."""
    said = defaultdict[str, list[str]](list)
    for file in FILES:
        text = source(file)
        said["prose"] += (f"{file.as_posix()}:{line}: {fault}" for line, fault in prose.faults(text))
        said["too long"] += checks.too_long(file, text)
        if file.parts[0] in table.PACKAGES:
            said["classes"] += (" ".join(each) for each in checks.classes(file, text))
            said["imports"] += checks.wrong_imports(file, text, MODULES)
            said["calls"] += checks.wrong_calls(file, text)
            said["groups"] += checks.groups_made(file, text)
            said["axes"] += checks.axes_named(file, text)
            said[f"elsewhere, {file.as_posix()}"] += checks.wrong_calls(Path("elsewhere.py"), text)
    return dict(said)


def test_imports_follow_the_table(found: dict[str, list[str]]) -> None:
    none(found["imports"])


def test_nothing_pickles_reads_the_environment_or_catches_everything(found: dict[str, list[str]]) -> None:
    none(found["calls"])


def test_only_the_world_makes_and_leaves_process_groups(found: dict[str, list[str]]) -> None:
    """If torch's own reconfigure is used one day, only that file has to change."""
    none(found["groups"])
    assert list(checks.groups_made(Path("elsewhere.py"), source(Path(table.SEAM)))), (
        "the control: where they are made they are found"
    )


@pytest.mark.parametrize(
    "line",
    [
        "import torch.distributed as dist\ndist.new_group([0])",
        "from torch.distributed import init_process_group as begin",
        "import torch\ntorch.distributed.destroy_process_group()",
        "from torch.distributed.device_mesh import DeviceMesh",
        "import torch.distributed.distributed_c10d",
    ],
)
def test_a_group_that_is_made_elsewhere_is_found(line: str) -> None:
    assert "only elastic/engine/world.py may" in next(checks.groups_made(Path("elastic/train/x.py"), line))
    assert list(checks.groups_made(Path(table.SEAM), line)) == []


def test_few_files_know_the_axes_by_name(found: dict[str, list[str]]) -> None:
    """All others ask a layout, so that an axis that is added is not left out of what they compute."""
    none(found["axes"])


@pytest.mark.parametrize(
    "line", ["layout.dp_shard", 'index["tp"]', "Layout(dp_replicate=2)", "def f(dp_shard): pass"]
)
def test_an_axis_that_is_named_elsewhere_is_found(line: str) -> None:
    assert "is the name of an axis" in next(checks.axes_named(Path("elastic/train/x.py"), line))
    assert not list(checks.axes_named(Path("elastic/plan/layout.py"), line))
    assert not list(checks.axes_named(Path("elastic/engine/axes/tensor.py"), line))
    assert not list(checks.axes_named(Path("elastic/train/x.py"), '"set parallel.dp_shard = 2"'))


def test_docstrings_are_whole_sentences(found: dict[str, list[str]]) -> None:
    """The product, its tests and its examples are read."""
    none(found["prose"])


def test_long_files_and_functions_are_listed(found: dict[str, list[str]]) -> None:
    """A limit that fails makes files that stand just below it; so this one reminds only.  pytest prints
    warnings in its summary.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("\n".join(["long files and functions:", *found["too long"]]), stacklevel=1)


def test_one_word_means_one_thing(found: dict[str, list[str]]) -> None:
    """Two classes of one name in the product are read as one; a line in the table may allow it."""
    pairs = (each.split(" ") for each in found["classes"])
    ours = [(name, module) for name, module in pairs if not module.startswith("examples.")]
    none(checks.doubles(ours, table.DOUBLES))


def test_a_name_of_a_file_means_one_thing() -> None:
    """A newcomer looks for a word, and finds the file that has it."""
    ours = [file for file in OURS if file.parts[0] != "examples" and not file.stem.startswith("__")]
    none(checks.doubles(((file.stem, file.parent.as_posix()) for file in ours), table.FILE_DOUBLES, "a file"))


def test_every_row_and_every_exception_is_used(found: dict[str, list[str]]) -> None:
    """A table that speaks of what is gone misleads."""
    for names, wrong in ((table.ENVIRONMENT, "os."), (table.BOUNDARIES, "catches everything")):
        used = {
            file.as_posix()
            for file in OURS
            if any(wrong in each for each in found[f"elsewhere, {file.as_posix()}"])
        }
        none(
            f"nothing needs the entry of {name}"
            for name in names
            if not any(file.startswith(name) for file in used)
        )
    none(f"nothing has the row of {row}" for row in table.IMPORTS if row not in MODULES and row != "examples")


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("elastic/control/x.py", "import torch", "may not import torch"),
        ("elastic/control/x.py", "def f():\n    import ray", "may not import ray"),
        ("elastic/control/x.py", "from elastic.sim import faults", "may not import elastic.sim"),
        (
            "elastic/plan/x.py",
            "from elastic.protocol.commit_record import Outcome",
            "may not import elastic.protocol.commit_record",
        ),
        (
            "elastic/plan/x.py",
            "from ..protocol.commit_record import Outcome",
            "may not import elastic.protocol.commit_record",
        ),
        ("elastic/plan/x.py", "import storage.objects", "may not import storage"),
        ("elastic/engine/x.py", "import ray.util", "may not import ray"),
        ("elastic/engine/x.py", "from elastic.plan.axes import chunk", "may not import elastic.plan.axes"),
        ("elastic/train/x.py", "from actors.launch import launch", "may not import actors"),
        ("storage/x.py", "from elastic.ids import Version", "may not import elastic.ids"),
        ("storage/x.py", "import torch", "may not import torch"),
        ("actors/x.py", "import examples.quickstart", "may not import examples"),
        ("actors/x.py", "import pickle", "imports pickle"),
        ("actors/x.py", "from ray import cloudpickle", "imports cloudpickle"),
        ("elastic/new.py", "import os", "no row of the import table"),
    ],
)
def test_a_wrong_import_is_found(file: str, line: str, wrong: str) -> None:
    found = list(checks.wrong_imports(Path(file), line, MODULES))
    assert len(found) == 1
    assert wrong in found[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("elastic/control/x.py", "from elastic.plan.layout import Layout"),
        ("elastic/plan/x.py", "from storage.slices import Slice"),
        ("actors/x.py", "import ray"),
        ("actors/users_code.py", "from ray import cloudpickle"),
        ("elastic/engine/x.py", "import torch.distributed as dist"),
    ],
)
def test_a_right_import_is_left_alone(file: str, line: str) -> None:
    assert list(checks.wrong_imports(Path(file), line, MODULES)) == []


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("storage/x.py", "import os\nos.environ['A']", "os.environ"),
        ("storage/x.py", "import os\nos.getenv('A')", "os.getenv"),
        ("elastic/train/x.py", "import torch\ntorch.load('f')", "pickles"),
        ("elastic/plan/x.py", "try:\n    pass\nexcept Exception:\n    pass", "catches everything"),
        ("elastic/plan/x.py", "try:\n    pass\nexcept:\n    pass", "catches everything"),
    ],
)
def test_a_wrong_call_is_found(file: str, line: str, wrong: str) -> None:
    found = list(checks.wrong_calls(Path(file), line))
    assert len(found) == 1
    assert wrong in found[0]
    assert list(checks.wrong_calls(Path("actors/cluster.py"), line)) == [] or wrong == "pickles"


def test_a_long_file_and_a_long_function_are_found() -> None:
    function = "def f():\n" + "    x = 1\n" * 60
    assert "f has 61 lines" in next(checks.too_long(Path("a.py"), function))
    assert list(checks.too_long(Path("a.py"), "def f():\n" + "    x = 1\n" * 59)) == []
    assert "501 lines" in next(checks.too_long(Path("a.py"), "x = 1\n" * 501))


def test_a_double_and_a_line_that_nothing_needs_are_found() -> None:
    source = "class {0}:\n    class Inner: pass\n"
    files = {
        "elastic/a.py": "Twice",
        "actors/b.py": "Twice",
        "elastic/c.py": "Allowed",
        "storage/d.py": "Allowed",
        "storage/e.py": "Once",
    }
    pairs = [each for file, name in files.items() for each in checks.classes(Path(file), source.format(name))]
    found = list(checks.doubles(pairs, {"Allowed": "", "Gone": ""}))
    assert [each.split()[0] for each in found] == ["Inner", "Twice", "Gone"]
    assert "actors.b and in elastic.a" in found[1]


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Block())
{code}
"""
HEAVY = ("torch", "ray", "pydantic", "numpy", "pyarrow", "fsspec", "safetensors")


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(blocked=set(HEAVY), code=code)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_what_decides_and_plans_imports_nothing_installed() -> None:
    """Decisions run where torch, Ray, pydantic and numpy are not installed."""
    done = run_blocked(
        "import elastic.control.machine, elastic.journal.codec, elastic.plan.transfer, elastic.sim, "
        "storage.slices, elastic; dir(elastic)"
    )
    assert done.returncode == 0, done.stderr


def test_the_block_blocks() -> None:
    done = run_blocked("from elastic import Job")
    assert done.returncode != 0
    assert "is blocked" in done.stderr
