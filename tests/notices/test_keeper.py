"""A keeper watches the sources of its job's notices."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from actors.keeper import Keeper
from actors.notices.known_sources import open_sources
from actors.notices.watch import SourceWatch
from elastic.config.sections import Notices
from elastic.threads import keep_going
from tests.support.patience import until

pytestmark = pytest.mark.fast


def test_a_keeper_says_what_its_sources_say(tmp_path: Path) -> None:
    """The control: nothing is said before the file is written."""
    keeper, said, path = Keeper.__new__(Keeper), list[str](), tmp_path / "taken"
    keeper._say, keeper._closed = said.append, threading.Event()  # type: ignore[method-assign]
    sources = open_sources(Notices(sources=("file",), file=str(path)))
    keeper._sources = [
        SourceWatch(name, each, keeper._noticed, keeper._say) for name, each in sources.items()
    ]
    (watch,) = keeper._sources
    watch.look()
    assert said == [], "the control"
    path.write_text("60\nthe rack is moved")
    thread = keep_going(lambda: watch.run(keeper._closed), "notices")
    until(lambda: said)
    assert (
        said[0].startswith("file gives notice: this machine is taken in ")
        and "(the rack is moved)" in said[0]
    )
    path.unlink()
    until(lambda: len(said) == 2)
    assert said[1] == "file gives no notice any more"
    keeper.left_world()
    keeper._closed.set()
    thread.join(10)
    assert not thread.is_alive()
