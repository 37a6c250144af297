"""The sockets of a worker use the network interface by which other nodes reach it, or the one that the job
names.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastic.errors import JobError
from elastic.job import Job
from elastic.train.machine.interface import SOCKETS, choose, faster_than, interface, interface_of
from elastic.train.session import prepare_process
from tests.support.toys import toy_job

NAMES = [name for _, name in socket.if_nameindex()]


def address() -> tuple[str, str]:
    """Returns the address of an interface that is not loopback, and the name of that interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))  # sends nothing: only the route is looked up
        found: str = asking.getsockname()[0]
    return found, interface_of(found)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears the variables before each test and restores them after it."""
    for variable in SOCKETS:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


def test_the_interface_of_the_routable_address_is_used_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    here, name = address()
    assert name in NAMES and name != "lo"
    prepare_process(toy_job("/nowhere"), here)
    assert [os.environ[variable] for variable in SOCKETS] == [name, name] and interface() == name
    assert f"sockets use interface {name}; other nodes reach this one at {here}" in capsys.readouterr().out


def test_what_the_job_names_comes_before_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    here, name = address()
    monkeypatch.setenv(SOCKETS[0], "lo")
    prepare_process(toy_job("/nowhere"), here)
    assert interface() == "lo", "a machine's own setting is kept where the job has none"
    prepare_process(toy_job("/nowhere", network={"interface": name}), here)
    assert [os.environ[variable] for variable in SOCKETS] == [name, name]


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        JobError,
        match=(
            r"network\.interface = 'eth77' does not exist on this node, which "
            r"has .*lo.*; name one that"
        ),
    ):
        prepare_process(toy_job("/nowhere", network={"interface": "eth77"}))


@pytest.mark.parametrize(
    ("gpu", "value", "found"),
    [
        *((False, "lo", True), (False, "lo,eth77", False), (False, "l", False)),
        *(
            (True, "lo", True),
            (True, "lo:5000", True),
            (True, "l", True),
            (True, "=l", False),
            (True, "eth77,lo", True),
        ),
        *((True, "eth77", False), (True, "^eth77", True), (True, "^=eth77", True)),
    ],
)
def test_an_interface_of_the_environment_that_is_not_there_is_named(
    gpu: bool, value: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each library reads its variable in its own way.  The variable of the library that the worker does not
    use is not looked at.
    """
    monkeypatch.setenv(SOCKETS[gpu], value)
    monkeypatch.setenv(SOCKETS[not gpu], "=eth77")
    if found:
        choose("auto", "127.0.0.1", gpu=gpu)
        assert os.environ[SOCKETS[gpu]] == value
    else:
        with pytest.raises(
            JobError,
            match=(
                rf"{SOCKETS[gpu]} = '{value}' names no network interface of this "
                r"node, which has .*lo"
            ),
        ):
            choose("auto", "127.0.0.1", gpu=gpu)
    choose("lo", "127.0.0.1", gpu=gpu)
    assert os.environ[SOCKETS[gpu]] == "lo", "the job's comes first"


def test_on_loopback_the_libraries_choose(capsys: pytest.CaptureFixture[str]) -> None:
    prepare_process(toy_job("/nowhere"), "127.0.0.1")
    assert interface() == "" and "interface that the libraries choose" in capsys.readouterr().out


def test_it_is_no_part_of_the_trajectory() -> None:
    assert toy_job("/nowhere").digest == toy_job("/nowhere", network={"interface": "eth0"}).digest
    with pytest.raises(JobError, match=r"network\.interface"):
        Job(name="x", bucket="/nowhere", network={"interface": "a name with spaces"})


def devices(folder: Path) -> None:
    """Writes network devices as the kernel shows them: name, state, Mb/s, and whether they are hardware."""
    for name, state, speed, hardware in (
        ("eth0", "up", "10000", True),
        ("ib0", "up", "200000", True),
        ("eth1", "down", "400000", True),
        ("silent", "up", "", True),
        ("unknown", "up", "-1", True),
        ("veth", "up", "400000", False),
        ("eth2", "up", "25000", True),
    ):
        (folder / name / "device" if hardware else folder / name).mkdir(parents=True)
        (folder / name / "operstate").write_text(f"{state}\n")
        (folder / name / "speed").write_text(f"{speed}\n")


def test_a_quicker_interface_that_is_up_is_named(tmp_path: Path) -> None:
    """An interface is not named if it is down, is no hardware, does not tell its speed, or is only slightly
    faster.
    """
    devices(tmp_path)
    assert faster_than("eth0", tmp_path) == "ib0 runs at 200000 Mb/s, eth0 at 10000"
    assert faster_than("ib0", tmp_path) == faster_than("silent", tmp_path) == faster_than("", tmp_path) == ""
    (tmp_path / "ib0" / "operstate").write_text("down\n")
    assert faster_than("eth0", tmp_path) == ""
    assert faster_than("eth0", tmp_path / "none") == ""
