"""Every source of notices does the same: one suite, and a place for each source in which a notice can be given,
be taken back, and go wrong.

Ray's drain speaks of the whole cluster: test_cluster_sources.py, and actors/test_notices.py.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.notices import aws, azure, gcp, watch
from actors.notices.known_sources import open_sources
from actors.notices.port import Notice, NoticeSource, Unreadable
from actors.notices.watch import SourceWatch
from elastic.config.sections import Notices
from tests.support.metadata_services import (
    AwsService,
    AzureService,
    GcpService,
    Service,
    event,
    served,
    utc,
)
from tests.support.patience import until

pytestmark = pytest.mark.fast

TIMEOUT_S = 0.3
"""Timeout in seconds of sources in these tests."""


class Place:
    """A machine on which one source can say something."""

    source: NoticeSource

    def give(self, seconds: float) -> float:
        """Gives notice, and returns its deadline."""
        raise NotImplementedError

    def withdraw(self) -> None: ...

    def wrong(self) -> None: ...

    def hang(self) -> None: ...

    def fail(self) -> None: ...

    def heal(self) -> None:
        """Ends what goes wrong."""


class Cloud(Place):
    """A machine with a metadata service."""

    def __init__(self, service: Service, source: NoticeSource) -> None:
        self.service, self.source = service, source

    def wrong(self) -> None:
        self.service.say(broken="wrong")

    def hang(self) -> None:
        self.service.say(broken="hangs")

    def fail(self) -> None:
        self.service.say(broken="fails")

    def heal(self) -> None:
        self.service.say(broken="")


class OnAws(Cloud):
    def give(self, seconds: float) -> float:
        at = math.floor(time.time() + seconds)
        self.service.say(keys={"spot/instance-action": f'{{"action": "terminate", "time": "{utc(at)}"}}'})
        return at

    def withdraw(self) -> None:
        self.service.say(keys={})


class OnGcp(Cloud):
    """It says no time, so the deadline is ``grace_s`` later, whatever is asked for."""

    def give(self, seconds: float) -> float:
        self.service.say(preempted="TRUE")
        return time.time() + GRACE_S

    def withdraw(self) -> None:
        self.service.say(preempted="FALSE")


class OnAzure(Cloud):
    def give(self, seconds: float) -> float:
        at = math.floor(time.time() + seconds)
        self.service.say(events=[event(at)])
        return at

    def withdraw(self) -> None:
        self.service.say(events=[])


class Signalled(Place):
    """A process that gets SIGTERM."""

    def __init__(self, source: NoticeSource) -> None:
        self.source = source

    def give(self, seconds: float) -> float:
        os.kill(os.getpid(), signal.SIGTERM)
        return time.time() + GRACE_S


class Written(Place):
    """A file that somebody writes."""

    def __init__(self, path: Path, source: NoticeSource) -> None:
        self.path, self.source = path, source

    def give(self, seconds: float) -> float:
        self.path.write_text(f"{seconds}\n")
        return time.time() + seconds

    def withdraw(self) -> None:
        self.path.unlink()

    def wrong(self) -> None:
        self.path.write_text("soon\n")

    def heal(self) -> None:
        self.path.unlink(missing_ok=True)


class Printed(Written):
    """A command that shows that file, and may hang or fail."""

    def hang(self) -> None:
        self.path.with_name("hangs").touch()

    def fail(self) -> None:
        self.path.with_name("fails").touch()

    def heal(self) -> None:
        for name in ("hangs", "fails", self.path.name):
            self.path.with_name(name).unlink(missing_ok=True)


GRACE_S = 45.0
SHOWS = (
    "cd {}; if [ -e fails ]; then echo out of order >&2; exit 7; fi; "
    "if [ -e hangs ]; then sleep 3600; fi; if [ -e taken ]; then cat taken; fi"
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (aws, azure, gcp):
        monkeypatch.setattr(module, "TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(azure, "FIRST_S", TIMEOUT_S)
    monkeypatch.setattr(gcp, "WAIT_S", 0.1)
    monkeypatch.setattr("actors.notices.told.COMMAND_S", 3 * TIMEOUT_S)


def one(name: str, **settings: Any) -> NoticeSource:
    return open_sources(Notices(sources=(name,), grace_s=GRACE_S, **settings))[name]


@pytest.fixture
def place(
    request: pytest.FixtureRequest, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    path = tmp_path / "taken"
    match request.param:
        case "aws":
            with served(AwsService) as service:
                monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", service.url)
                yield OnAws(service, one("aws"))
        case "gcp":
            with served(GcpService) as service:
                monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
                yield OnGcp(service, one("gcp"))
        case "azure":
            with served(AzureService) as service:
                monkeypatch.setattr(azure.Azure, "home", service.url)
                yield OnAzure(service, one("azure"))
        case "sigterm":
            before = signal.getsignal(signal.SIGTERM)
            yield Signalled(one("sigterm"))
            signal.signal(signal.SIGTERM, before)
        case "file":
            yield Written(path, one("file", file=str(path)))
        case "command":
            yield Printed(path, one("command", command=SHOWS.format(tmp_path)))


def places(*names: str) -> Any:
    return pytest.mark.parametrize("place", names, indirect=True)


CLOUDS = ("aws", "gcp", "azure")
ALL = (*CLOUDS, "sigterm", "file", "command")


class Heard:
    """A watch of the source of a place, with what it tells and says."""

    def __init__(self, place: Place) -> None:
        self.told, self.said = list[Notice | None](), list[str]()
        self.anew(place)

    def first_answer(self, place: Place) -> None:
        """Looks until the source has answered, which a busy machine may delay."""
        self.watch.look()
        if place.source.remembers:
            until(lambda: self.told or self.watch.look())

    def anew(self, place: Place) -> None:
        """Watches as a keeper does that has just been started."""
        self.watch = SourceWatch(
            "it", place.source, lambda _, notice: self.told.append(notice), self.said.append
        )


@places(*ALL)
def test_a_notice_is_said_with_its_deadline_and_only_while_it_is_there(place: Place) -> None:
    """The control is the look before: without a notice there is none."""
    assert place.source.look() is None is place.source.look(), "the control"
    deadline = place.give(77)
    first, second = place.source.look(), place.source.look()
    assert first is not None is not second
    assert not first.advice and first.text and abs(first.deadline - deadline) < 1
    assert second.text == first.text and abs(second.deadline - first.deadline) < 0.5
    if type(place).withdraw is Place.withdraw:
        return  # who is asked to end cannot be asked not to
    place.withdraw()
    assert place.source.look() is None
    again = place.give(99)
    found = place.source.look()
    assert found is not None and abs(found.deadline - again) < 1, "a later notice has a deadline of its own"


@places(*ALL)
def test_only_what_changes_is_told(place: Place) -> None:
    heard = Heard(place)
    heard.first_answer(place)
    for _ in range(3):
        heard.watch.look()
    assert heard.told == [None] * place.source.remembers, "once"
    heard.told.clear()
    place.give(77)
    for _ in range(3):
        heard.watch.look()
    assert len(heard.told) == 1 and heard.told[0] is not None
    place.withdraw()
    for _ in range(3):
        heard.watch.look()
    assert heard.told[1:] == ([] if type(place).withdraw is Place.withdraw else [None])
    assert heard.said == []


@places(*ALL)
def test_a_keeper_that_starts_anew_takes_back_what_is_not_said_any_more(place: Place) -> None:
    """A notice was told by the keeper before.  The controls: a notice that stands is told again, and a source
    that forgets everything with its process takes nothing back.
    """
    heard = Heard(place)
    heard.first_answer(place)
    assert heard.told == ([None] if place.source.remembers else [])
    heard.told.clear()
    place.give(77)
    heard.anew(place)
    until(lambda: heard.watch.look() or heard.told)
    assert len(heard.told) == 1 and heard.told[0] is not None


@places(*CLOUDS, "command")
def test_a_source_that_does_not_answer_takes_nothing_back(place: Place) -> None:
    """Nor does one whose answer makes no sense, also at the first look of a keeper."""
    heard = Heard(place)
    for goes_wrong in (place.fail, place.wrong, place.hang):
        goes_wrong()
        heard.watch.look()
        place.heal()
    assert heard.told == []
    heard.first_answer(place)
    assert heard.told == [None]


@places(*CLOUDS, "file", "command")
def test_an_answer_that_makes_no_sense_changes_nothing_and_is_said_once(place: Place) -> None:
    heard = Heard(place)
    place.give(77)
    heard.watch.look()
    place.wrong()
    for _ in range(4):
        heard.watch.look()
    assert len(heard.told) == 1 and len(heard.said) == 1, (heard.told, heard.said)
    assert "'it' fails, and is asked again" in heard.said[0]
    assert "<html>no such thing" in heard.said[0] or "'soon'" in heard.said[0], "its words are shown"
    with pytest.raises(Unreadable):
        place.source.look()
    place.withdraw()
    place.heal()
    heard.watch.look()
    assert heard.told[1:] == [None], "a good answer counts again"


@places(*CLOUDS, "command")
def test_after_a_look_that_hangs_the_next_one_works(place: Place) -> None:
    place.source.look()
    place.hang()
    began = time.monotonic()
    with pytest.raises(OSError, match=r"no answer within|has not ended within"):
        place.source.look()
    assert time.monotonic() - began < 10 * TIMEOUT_S
    place.heal()
    assert place.source.look() is None
    place.give(77)
    assert place.source.look() is not None


@places(*CLOUDS, "command")
def test_a_source_that_fails_is_said_once_an_hour_and_keeps_its_word(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(place)
    place.give(77)
    heard.watch.look()
    place.fail()
    for _ in range(4):
        heard.watch.look()
    assert len(heard.said) == 1 and ("500" in heard.said[0] or "code 7: out of order" in heard.said[0])
    monkeypatch.setattr(watch, "SAID_S", 0.0)  # an hour is over
    heard.watch.look()
    assert len(heard.said) == 2
    assert len(heard.told) == 1, "who does not answer has taken nothing back"


@places(*CLOUDS)
def test_a_service_that_is_gone_is_no_answer(place: Cloud) -> None:
    place.service.close()
    with pytest.raises(OSError, match="ConnectionRefusedError"):
        place.source.look()


@places(*ALL)
def test_leaving_is_told_as_often_as_one_likes(place: Place) -> None:
    place.source.left()
    place.give(77)
    place.source.look()
    place.source.left()
    place.source.left()
    assert place.source.look() is not None


@places("gcp")
def test_a_source_that_hangs_keeps_no_other_one_back(place: Cloud, tmp_path: Path) -> None:
    place.hang()
    path, told, closed = tmp_path / "other", list[tuple[str, Notice | None]](), threading.Event()
    sources = {"gcp": place.source, "file": one("file", file=str(path))}
    threads = []
    for name, source in sources.items():
        source.every_s = 0.05
        looks = SourceWatch(name, source, lambda *heard: told.append(heard), lambda _: None)
        threads.append(threading.Thread(target=looks.run, args=(closed,)))
    for thread in threads:
        thread.start()
    path.write_text("20")
    until(lambda: told, 5 * TIMEOUT_S)
    until(lambda: told[-1][1], 5 * TIMEOUT_S)
    assert {name for name, _ in told} == {"file"}
    place.give(30)
    place.heal()
    until(lambda: told[-1][0] == "gcp" and told[-1][1])
    closed.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
