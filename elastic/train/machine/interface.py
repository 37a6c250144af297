"""Chooses the network interface of a worker's sockets: the one by which other nodes reach it, or the one that
the job names.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from elastic.errors import JobError

SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the interface for gloo and for NCCL.  Without the first, gloo listens at the address of
the host's own name, which on many machines is a loopback address that no other host can reach.
"""
_SIOCGIFADDR = 0x8915
DEVICES = Path("/sys/class/net")


def choose(wanted: str, address: str, *, gpu: bool = False) -> None:
    """Sets the interface of this process's sockets: the one that the job names (``wanted``), else the one in
    the environment, else the one that has ``address``.

    Raises as :func:`check`.
    """
    check(wanted, gpu=gpu)
    found = interface_of(address) if wanted == "auto" else wanted
    for variable in SOCKETS:
        if wanted != "auto":
            os.environ[variable] = wanted
        elif found:
            os.environ.setdefault(variable, found)
    if address:
        print(
            (
                f"sockets use interface {interface() or 'that the libraries choose'}; other nodes reach "
                f"this one at {address}"
            ),
            flush=True,
        )
    if wanted == "auto" and (better := faster_than(interface())):
        print(f"{better}: where every node has it, set network.interface = {better.split()[0]!r}", flush=True)


def check(wanted: str, *, gpu: bool) -> None:
    """Raises :class:`JobError` if this machine does not have the interface that the job names, or that the
    environment names for the library that a worker uses: NCCL with a ``gpu``, else gloo.
    """
    there = [name for _, name in socket.if_nameindex()]
    if wanted != "auto" and wanted not in there:
        missing = f"network.interface = {wanted!r} does not exist on this node, which has {', '.join(there)}"
        one = "one exact name, not a list or a pattern as NCCL takes" if set(wanted) & set(",=^") else "one"
        raise JobError(f"{missing}; name {one} that every node has, or leave the setting out")
    value = os.environ.get(SOCKETS[gpu], "")
    if wanted == "auto" and value and not (_nccl_finds if gpu else _gloo_finds)(value, there):
        raise JobError(
            f"the environment variable {SOCKETS[gpu]} = {value!r} names no network interface of this node, "
            f"which has {', '.join(there)}; correct it, unset it, or set network.interface"
        )


def _gloo_finds(value: str, there: Sequence[str]) -> bool:
    """Returns whether all interfaces of ``value``, such as "eth0,eth1", are in ``there``: gloo needs each of
    them.
    """
    return all(name in there for name in value.split(","))


def _nccl_finds(value: str, there: Sequence[str]) -> bool:
    """Returns whether NCCL finds one of the interfaces ``there`` by ``value``, a list of beginnings of names.

    After "=" the names must match as a whole; after "^" the matching interfaces are left out.  A port may
    follow a name.
    """
    names = [name.partition(":")[0] for name in value.lstrip("^=").split(",")]
    exact = value.lstrip("^").startswith("=")
    meant = [
        each for each in there if any(each == name or (not exact and each.startswith(name)) for name in names)
    ]
    return bool(set(there) - set(meant)) if value.startswith("^") else bool(meant)


def faster_than(name: str, devices: Path = DEVICES) -> str:
    """Returns a sentence about a hardware interface that is up and at least five times as fast as ``name``;
    "" if there is none.
    """
    speeds = {link.parent.name: _speed(link.parent) for link in devices.glob("*/device")}
    best = max(speeds, key=lambda each: speeds[each], default="")
    mine = speeds.get(name, 0)
    return (
        f"{best} runs at {speeds[best]} Mb/s, {name} at {mine}"
        if mine > 0 and speeds[best] >= 5 * mine
        else ""
    )


def _speed(device: Path) -> int:
    """Returns the speed of an interface in Mb/s; 0 if it is down, unknown or virtual (a virtual one may
    report any speed).
    """
    with suppress(OSError, ValueError):
        if (device / "device").exists() and (device / "operstate").read_text().strip() == "up":
            return max(int((device / "speed").read_text()), 0)
    return 0


def interface() -> str:
    """Returns the interface that the sockets of this process use; "" if none was chosen."""
    return os.environ.get(SOCKETS[0], "")


def interface_of(address: str) -> str:
    """Returns the network interface that has this IPv4 address; "" for loopback, or if none has it."""
    if not address or address.startswith("127."):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
