"""Each source of notices has rules of its own, and a job watches those that it names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.notices import aws, azure, known_sources
from actors.notices.known_sources import CLUSTER_SOURCES, SOURCES, check_sources, open_sources
from actors.notices.metadata import ask
from actors.notices.port import ADVICE_S, Notice, NoticeSource, Unreadable
from actors.notices.watch import SourceWatch
from actors.users_code import pack
from elastic.config.sections import Notices
from elastic.errors import CodeError, JobError
from elastic.job import Job
from tests.support.metadata_services import AwsService, AzureService, GcpService, Service, event, served, utc

pytestmark = pytest.mark.fast


def one(name: str, **settings: Any) -> Any:
    return open_sources(Notices(sources=(name,), **settings))[name]


def look(source: NoticeSource) -> Notice:
    found = source.look()
    assert found is not None
    return found


# ---- the metadata services


@pytest.mark.parametrize(
    ("kind", "path", "code"),
    [
        (AwsService, "/latest/meta-data/spot/instance-action", 401),
        (GcpService, "/computeMetadata/v1/instance/preempted", 403),
        (AzureService, azure.EVENTS, 400),
    ],
)
def test_the_emulated_services_refuse_who_asks_without_the_header(
    kind: type[Service], path: str, code: int
) -> None:
    """The control of all that follows: a source that forgets its header would get nothing."""
    with served(kind) as service, pytest.raises(OSError, match=f"answered with {code}"):
        ask(service.url, path, {}, timeout_s=5)


def test_a_service_that_sends_a_byte_now_and_then_has_not_answered() -> None:
    """Each byte comes in time, so the socket's own timeout would never end it."""
    with served(AzureService) as service:
        service.say(broken="drips")
        began = time.monotonic()
        with pytest.raises(OSError, match=r"no answer within 0\.4 s"):
            ask(service.url, azure.EVENTS, azure.HEADERS, timeout_s=0.4)
        assert time.monotonic() - began < 3


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with served(AzureService) as service:
        assert ask(service.url, azure.NAME, azure.HEADERS, timeout_s=5).text == "vm_0"


# ---- AWS


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsService]:
    with served(AwsService) as service:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{service.url}/")
        yield service


def puts(service: Service) -> int:
    return sum(method == "PUT" for method, _ in service.asked)


def test_one_token_serves_many_looks_and_is_renewed_if_it_is_refused(ec2: AwsService) -> None:
    source = one("aws")
    assert [source.look() for _ in range(3)] == [None] * 3 and puts(ec2) == 1
    ec2.tokens.clear()
    ec2.keys["spot/instance-action"] = f'{{"action": "stop", "time": "{utc(time.time() + 90)}"}}'
    assert look(source).text == "spot interruption: stop" and puts(ec2) == 2


def test_a_token_is_renewed_before_its_end(ec2: AwsService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look never meets a 401.  The control: until then the token is kept."""
    monkeypatch.setattr(aws, "RENEW", 0.001)
    source, ec2.ttl_s = one("aws"), 300.0
    source.look()
    time.sleep(0.31)
    source.look()
    assert puts(ec2) == 2 and len(ec2.asked) == 2 * (1 + 3), "no question was asked twice"
    monkeypatch.setattr(aws, "RENEW", 0.9)
    source = one("aws")
    for _ in range(2):
        source.look()
    assert puts(ec2) == 3, "the control"


def test_who_refuses_each_token_does_not_answer(ec2: AwsService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ec2,
        "answer",
        lambda *asked: (
            (401, {}, "")
            if "meta-data" in asked[1]
            else (200, {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "token")
        ),
    )
    with pytest.raises(OSError, match="answered with 401"):
        one("aws").look()
    assert puts(ec2) == 2, "one for the look, and one because the first was refused"


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_each_action_takes_the_machine_at_its_time(ec2: AwsService, action: str) -> None:
    at = int(time.time()) + 120
    ec2.keys["spot/instance-action"] = f'{{"action":"{action}","time":"{utc(at)}"}}'
    assert look(one("aws")) == Notice(at, text=f"spot interruption: {action}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"action": "terminate"}',
        '{"action": "terminate", "time": "soon"}',
        '{"action": "terminate", "time": 3}',
        '{"action": "dance", "time": "2026-11-30T17:11:44Z"}',
        '{"action": "stop", "time": "2026-11-30T17:11:44"}',
    ],
)
def test_a_notice_of_aws_that_makes_no_sense_is_none(ec2: AwsService, text: str) -> None:
    ec2.keys["spot/instance-action"] = text
    with pytest.raises(Unreadable):
        one("aws").look()


def test_an_auto_scaling_group_takes_the_machine_without_a_time(ec2: AwsService) -> None:
    source = one("aws", grace_s=50)
    ec2.keys["autoscaling/target-lifecycle-state"] = "InService"
    assert source.look() is None, "the control"
    ec2.keys["autoscaling/target-lifecycle-state"] = "Terminated"
    found = look(source)
    assert abs(found.deadline - time.time() - 50) < 1 and look(source) == found
    ec2.keys["spot/instance-action"] = f'{{"action": "stop", "time": "{utc(0)}"}}'
    assert look(source).deadline == 0, "what has a time comes first"


def test_a_rebalance_recommendation_is_an_advice_that_expires(ec2: AwsService) -> None:
    """Many never come true, and none is taken back.  The control: a younger one is still told."""
    told = list[Notice | None]()
    watch = SourceWatch("aws", one("aws"), lambda _, notice: told.append(notice), told.append)  # type: ignore[arg-type]
    at = int(time.time()) - ADVICE_S + 1
    ec2.keys["events/recommendations/rebalance"] = f'{{"noticeTime": "{utc(at)}"}}'
    watch.look()
    assert told == [Notice(at + ADVICE_S, advice=True, text="rebalance recommendation")]
    time.sleep(max(0.0, at + ADVICE_S - time.time()) + 0.01)  # the time itself is what expires it
    watch.look()
    watch.look()
    assert told[1:] == [None]


class Advises(NoticeSource):
    """Gives an advice once, and then does not answer."""

    def __init__(self, advice: Notice) -> None:
        self.advice: Notice | None = advice

    def look(self) -> Notice:
        found, self.advice = self.advice, None
        if found is None:
            raise OSError("it is silent")
        return found


def test_an_advice_expires_also_while_its_source_is_silent() -> None:
    told, advice = list[Notice | None](), Notice(time.time() + 0.3, advice=True)
    watch = SourceWatch("it", Advises(advice), lambda _, notice: told.append(notice), lambda _: None)
    watch.look()
    watch.look()
    assert told == [advice], "the control"
    time.sleep(max(0.0, advice.deadline - time.time()) + 0.01)
    watch.look()
    assert told[1:] == [None]


# ---- Google


@pytest.fixture
def gce(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcpService]:
    with served(GcpService) as service:
        monkeypatch.setenv("GCE_METADATA_HOST", service.url.removeprefix("http://"))
        yield service


def test_a_preemption_is_seen_at_once_while_the_question_waits(gce: GcpService) -> None:
    """The control: the question before has waited for its whole time."""
    source, gce.longest_s = one("gcp"), 0.5
    source.look()  # the first one asks without a mark, and does not wait
    began = time.monotonic()
    assert source.look() is None and time.monotonic() - began > 0.4, "the control"
    gce.longest_s = 60.0
    threading.Timer(0.2, lambda: gce.say(preempted="TRUE")).start()
    began = time.monotonic()
    found = look(source)
    assert 0.1 < time.monotonic() - began < 5
    assert found.text == "preempted" and abs(found.deadline - time.time() - 30) < 1


def test_a_machine_that_is_moved_while_it_runs_is_not_taken(gce: GcpService) -> None:
    source = one("gcp")
    gce.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.look() is None
    gce.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    found = look(source)
    assert found.text == "host maintenance" and look(source) == found
    gce.preempted = "TRUE"
    assert look(source).text == "preempted"
    gce.maintenance = "DANCE_ON_HOST"
    with pytest.raises(Unreadable, match="'DANCE_ON_HOST'"):
        source.look()


def test_another_server_at_that_address_is_not_believed(gce: GcpService) -> None:
    gce.flavor, gce.preempted = "", "TRUE"
    with pytest.raises(Unreadable, match="Metadata-Flavor"):
        one("gcp").look()


# ---- Azure


@pytest.fixture
def vm(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureService]:
    with served(AzureService) as service:
        monkeypatch.setattr(azure.Azure, "home", service.url)
        yield service


@pytest.mark.parametrize("kind", azure.KINDS)
def test_each_kind_of_event_takes_the_machine_that_it_names(vm: AzureService, kind: str) -> None:
    """The controls: events of other machines, of other kinds, and events that are over."""
    at = int(time.time()) + 300
    source = one("azure")
    vm.events = [event(at, kind, ("vm_1",)), event(at, "Dance"), event(at, kind, EventStatus="Completed")]
    assert source.look() is None, "the controls"
    vm.events = [*vm.events[1:], event(at, kind) | {"Resources": "vm_0-extra"}]
    with pytest.raises(Unreadable):
        source.look()
    vm.events[-1] = event(at, kind, ("vm_1",))
    vm.events.append(event(at, kind, ("vm_1", "vm_0"), EventId="2"))
    assert look(source) == Notice(at, text=f"scheduled event {kind}")


def test_an_event_without_a_time_has_begun(vm: AzureService) -> None:
    source = one("azure")
    vm.events = [event(None)]
    found = look(source)
    assert abs(found.deadline - time.time()) < 1
    time.sleep(0.05)
    assert look(source) == found, "its deadline stays"
    vm.events = [event(None), event(time.time() - 60, "Reboot", EventId="2")]
    assert look(source).text == "scheduled event Reboot", "the first deadline counts"


def test_leaving_lets_an_event_of_this_machine_alone_begin(vm: AzureService) -> None:
    """An event that names other machines would take these, too.  One that has begun needs no word."""
    source, at = one("azure"), time.time() + 300
    vm.events = [
        event(at, EventId="ours"),
        event(at, "Reboot", ("vm_0", "vm_1"), EventId="shared"),
        event(None, EventId="begun"),
        event(at, machines=("vm_1",), EventId="theirs"),
    ]
    source.look()
    assert vm.started == [], "a look acknowledges nothing"
    source.left()
    source.left()
    assert vm.started == ["ours"]


def test_an_acknowledgment_that_fails_is_made_again(vm: AzureService) -> None:
    source = one("azure")
    vm.events = [event(time.time() + 300, EventId="ours")]
    source.look()
    vm.say(broken="fails")
    said = list[str]()
    SourceWatch("azure", source, lambda *_: None, said.append).left()
    assert len(said) == 1 and "POST was answered with 500" in said[0]
    vm.say(broken="")
    vm.started.clear()
    source.left()
    assert vm.started == ["ours"]


def test_an_acknowledgment_that_fails_is_made_again_after_each_look_until_the_deadline(
    vm: AzureService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: an event whose time has come is not acknowledged any more, since the machine is gone."""
    vm.say(events=[event(time.time() + 60)])
    source, refusals = one("azure"), [OSError("it is busy")] * 3
    real = source.left
    tries = list[int]()

    def left() -> None:
        tries.append(1)
        if refusals:
            raise refusals.pop()
        real()

    monkeypatch.setattr(source, "left", left)
    watch = SourceWatch("azure", source, lambda *_: None, lambda _: None)
    watch.look()
    watch.left()
    for _ in range(6):
        watch.look()
    assert len(tries) == 4 and len(vm.started) == 1, "once it has succeeded it is over"
    refusals += [OSError("it is busy")] * 9
    watch.left()
    watch._told = Notice(time.time() - 1.0)
    vm.say(broken="fails")
    for _ in range(3):
        watch.look()
    assert len(tries) == 6, "the first time, and once after the deadline"


# ---- signals, files and commands


def test_a_second_sigterm_ends_the_process() -> None:
    """The control: after the first one it lives, and says so."""
    code = (
        "import os, signal, sys, time\n"
        "from actors.notices.sigterm import Sigterm\nfrom elastic.config.sections import Notices\n"
        "it = Sigterm(Notices(grace_s=20))\nassert it.look() is None\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nprint(it.look().deadline - time.time(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGTERM and 18 < float(done.stdout) <= 20, done


@pytest.mark.parametrize(
    ("text", "left", "words"),
    [("", 30, ""), ("75", 75, ""), ("1.5\nthe rack\n is moved\n", 1.5, "the rack is moved"), ("0", 0, "")],
)
def test_a_file_says_the_seconds_since_it_was_written(
    tmp_path: Path, text: str, left: float, words: str
) -> None:
    path = tmp_path / "taken"
    path.write_text(text)
    os.utime(path, (1e9, 1.7e9))
    assert look(one("file", file=str(path))) == Notice(1.7e9 + left, text=words or str(path))


def test_a_file_or_a_command_may_say_a_unix_time(tmp_path: Path) -> None:
    path = tmp_path / "taken"
    path.write_text("1796059200\n")
    assert look(one("file", file=str(path))).deadline == 1796059200
    command = one("command", command=f"cat {path}")
    assert look(command).deadline == 1796059200
    path.write_text("1796059300\n")
    assert look(command).deadline == 1796059300, "a time that is given exactly may also be a later one"


@pytest.mark.parametrize("text", ["soon", "-3", "nan", "inf", "3 s"])
def test_a_file_without_a_number_makes_no_sense(tmp_path: Path, text: str) -> None:
    (tmp_path / "taken").write_text(text)
    with pytest.raises(Unreadable, match="neither a number of seconds nor a Unix time"):
        one("file", file=str(tmp_path / "taken")).look()


def test_a_command_that_always_prints_the_same_number_does_not_put_the_deadline_off(tmp_path: Path) -> None:
    source = one("command", command="echo 20")
    first = look(source)
    time.sleep(0.1)
    assert look(source) == first
    assert open_sources(Notices(command="true", sources=("command",)))["command"].look() is None


def test_nothing_of_a_command_that_takes_too_long_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.notices.told.COMMAND_S", 0.5)
    with pytest.raises(OSError, match="has not ended within"):
        one("command", command=f"sleep 3600 & echo $! > {tmp_path}/pid; wait").look()
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end, "the child of the shell lives on"
        time.sleep(0.01)


# ---- which sources a job watches


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({}, []),
        ({"sys_vendor": "Amazon EC2"}, ["aws"]),
        ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, ["aws"]),
        ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, ["gcp"]),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": known_sources.AZURE}, ["azure"]),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "None"}, []),
        ({"sys_vendor": "Dell Inc."}, []),
    ],
)
def test_auto_takes_the_cloud_whose_machine_this_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, str], found: list[str]
) -> None:
    monkeypatch.setattr(known_sources, "DMI", tmp_path)
    for name, word in words.items():
        (tmp_path / name).write_text(f"{word}\n")
    assert [*open_sources(Notices())] == found
    with_file = Notices(sources=("auto", "gcp"), file="/run/taken")
    assert [*open_sources(with_file)] == [*dict.fromkeys([*found, "file", "gcp"])]
    assert [*open_sources(Notices(sources=()))] == []


class Quiet(NoticeSource):
    """A source of a user that never says anything."""

    def __init__(self, settings: Notices) -> None: ...

    def look(self) -> None: ...


class Broken(Quiet):
    def __init__(self, settings: Notices) -> None:
        raise RuntimeError("no such rack")


class Rash(Quiet):
    def look(self) -> Any:
        return 3


class NoSource:
    """It looks like a source, but has no ``left``."""

    every_s = 1.0

    def look(self) -> None: ...


NUMBER = 3


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "awz",
            r"notices\.sources has no 'awz'; use auto, aws, gcp, .* or your own class .*did you mean 'aws'",
        ),
        ("no.such:Source", r"notices\.sources = 'no\.such:Source': Python finds no module 'no'"),
        (f"{__name__}:Quiett", f"did you mean '{__name__}:Quiet'"),
        (f"{__name__}:NoSource", "has no left; name a class that inherits actors.notices.port:NoticeSource"),
        (f"{__name__}:NUMBER", "is no class"),
    ],
)
def test_a_source_that_is_not_there_is_said_before_any_worker_starts(name: str, said: str) -> None:
    """The controls: all that are there."""
    with pytest.raises(CodeError, match=said) as error:
        check_sources(Notices(sources=(name,)))
    assert "\n" not in str(error.value)
    check_sources(Notices(sources=("auto", *SOURCES, *CLUSTER_SOURCES, f"{__name__}:Quiet")))


def test_a_source_of_the_user_that_cannot_be_made_or_answers_nonsense_is_named() -> None:
    with pytest.raises(
        CodeError, match=r":Broken' cannot be opened: RuntimeError: no such rack \(in .*, line"
    ):
        open_sources(Notices(sources=(f"{__name__}:Broken",)))
    said = list[str]()
    name = f"{__name__}:Rash"
    SourceWatch(name, one(name), lambda *_: None, said.append).look()
    assert len(said) == 1 and "look() has returned 3, which is no Notice" in said[0]


def test_a_deadline_in_milliseconds_makes_no_sense(tmp_path: Path) -> None:
    """The control is the same time in seconds."""
    path, said, told = tmp_path / "taken", list[str](), list[object]()
    watch = SourceWatch("file", one("file", file=str(path)), lambda *each: told.append(each), said.append)
    path.write_text("1796059200000")
    watch.look()
    assert (
        not told
        and len(said) == 1
        and "is 1796059200000, more than a year from now; it is in Unix" in said[0]
    )
    path.write_text(f"{time.time() + 60:.0f}")
    watch.look()
    assert told


def test_a_class_of_a_script_is_refused(tmp_path: Path) -> None:
    class Here(Quiet):
        pass

    job = Job(name="run", bucket=str(tmp_path), notices={"sources": [Here]})
    with pytest.raises(JobError, match=r"notices\.sources = 'object:Here' is used by processes"):
        pack(job)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sources": ["file"]}, "notices.sources has 'file', but notices.file is not set"),
        ({"sources": ["aws"], "command": "x"}, "notices.command = 'x' has no effect"),
        ({"file": "s3://a/b"}, "notices.file = 's3://a/b' must be a file of a local disk, not a URL"),
        ({"sources": ["a w s"]}, "must be a name without spaces and signs, or name code"),
        ({"grace_s": 0}, "notices.grace_s = 0 must be more than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(JobError) as error:
        Job(name="run", bucket=str(tmp_path), notices=settings)
    assert said in str(error.value)
    Job(name="run", bucket=str(tmp_path), notices={"sources": ["file"], "file": "taken"})
