"""The folder for logs in the temporary folder belongs to its user alone, and looks like a package to nobody
who works in that folder.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from actors.processes import clear, left_here, log_file, log_folder, make_log_folder, sweep
from elastic.errors import JobError
from elastic.train.gauges.counters import Counters, segment
from tests.support.commands import ROOT
from tests.support.patience import PATIENCE_S

RUN = "logs-0001-abcdef"
SEES = (
    "import sys; from importlib.machinery import PathFinder; print([PathFinder.find_spec(name, ['']) for "
    "name in sys.argv[1:]])"
)
PRINTS = (
    "import sys; from pathlib import Path; from actors.worker import _redirect_output; "
    "_redirect_output(Path(sys.argv[1]))"
)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def found(folder: Path) -> str:
    """Returns how a process that works in ``folder`` finds our packages there, before it looks where Elastic
    is installed.
    """
    command = [sys.executable, "-c", SEES, "elastic", "actors", "storage"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stdout.strip()


def test_no_process_that_works_in_the_temporary_folder_takes_it_for_a_package(there: Path) -> None:
    """The control is the name that the folder had: whoever was started there found an empty package
    ``elastic``.
    """
    make_log_folder(RUN)
    assert found(there) == "[None, None, None]"
    (there / "elastic").mkdir()
    assert "ModuleSpec(name='elastic'" in found(there)


def test_it_belongs_to_its_user_alone(there: Path) -> None:
    made, again = make_log_folder(RUN), make_log_folder(RUN)
    assert made == again == log_folder(RUN) == log_file(RUN, "w1").parent
    assert [stat.S_IMODE(each.stat().st_mode) for each in (made, made.parent)] == [0o700, 0o700]
    made.parent.chmod(0o777)
    assert stat.S_IMODE(make_log_folder(RUN).parent.stat().st_mode) == 0o700, (
        "it is taken from everybody else"
    )


def test_what_another_user_has_put_there_is_refused(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written there, and nothing removed."""
    (there / "theirs" / RUN).mkdir(parents=True)
    for put, uid in (("link", os.getuid()), ("folder", os.getuid() + 1)):
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda uid=uid: uid)
            root = log_folder("")
            root.symlink_to(there / "theirs") if put == "link" else (root / RUN).mkdir(parents=True)
            with pytest.raises(
                JobError, match="is a link, or belongs to another user: remove it, or set TMPDIR"
            ):
                make_log_folder("logs-0002-abcdef")
            assert (
                clear("logs", {"abcdef"}, 0.0) == []
                and (root / RUN).is_dir()
                and len(list(root.iterdir())) == 1
            )


def test_a_life_is_known_whatever_its_number(there: Path) -> None:
    """The first incarnation of a life has four digits or more.  The control: a run whose name begins with the
    name of this one.
    """
    lives = ["logs-0001-abcdef", "logs-9999-abcdef", "logs-10000-abcdef"]
    others = ["logs-2-10000-abcdef", "logs-10000-abcdef-2", "logs-100-abcdef"]
    for token in (*lives, *others):
        make_log_folder(token)
        log_file(token, "w1").touch()
    assert left_here("logs", {"abcdef"}) == [log_file(token, "w1") for token in lives], "oldest life first"
    counters = [segment(token, "w1") for token in (*lives, *others)]
    for removes in (lambda: sweep("logs"), lambda: clear("logs", {"abcdef"}, 0.0)):
        for path in counters:
            Counters(path, create=True)["pid"] = 2**22 + 1  # no process has this number
        try:
            removes()
            assert [path for path in counters if path.exists()] == counters[3:]
        finally:
            for path in counters:
                path.unlink(missing_ok=True)
    assert [token for token in (*lives, *others) if log_folder(token).exists()] == others


def test_a_worker_writes_through_no_link(there: Path) -> None:
    """The control is a file that is there already: its end is written on."""
    log, other = log_file(RUN, "w1"), there / "other"
    make_log_folder(RUN)
    for path in (log, other):
        path.write_text("before\n")
    command = [sys.executable, "-c", f"{PRINTS}; print('after')", str(log)]
    subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, check=True)
    assert log.read_text() == "before\nafter\n"
    log.unlink()
    log.symlink_to(other)
    done = subprocess.run(command, cwd=ROOT, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert "Too many levels of symbolic links" in done.stderr and other.read_text() == "before\n"
