"""Which network interface the sockets of a worker use: the one by which other nodes reach it, or the one that the job names."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from elastic.errors import JobError

SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without the first gloo listens where the host's own name leads, which on many machines is a loopback address that no other host
reaches."""
_SIOCGIFADDR = 0x8915
DEVICES = Path("/sys/class/net")


def choose(wanted: str, address: str) -> None:
    """For the sockets of this process: what the job names, else what this machine's environment does, else the one of ``address``.

    Raises :class:`JobError` for one that this machine has not.
    """
    there = [name for _, name in socket.if_nameindex()]
    if wanted != "auto" and wanted not in there:
        raise JobError(f"network.interface = {wanted!r}: this node has {', '.join(there)}; name one that every node has, or leave it out")
    found = interface_of(address) if wanted == "auto" else wanted
    for variable in SOCKETS:
        if wanted != "auto":
            os.environ[variable] = wanted
        elif found:
            os.environ.setdefault(variable, found)
    if address:
        print(f"sockets use interface {interface() or 'that the libraries choose'}; other nodes reach this one at {address}", flush=True)
    if wanted == "auto" and (better := faster_than(interface())):
        print(f"{better}: where every node has it, set network.interface = {better.split()[0]!r}", flush=True)


def faster_than(name: str, devices: Path = DEVICES) -> str:
    """An interface of this machine, of hardware and up, that has five times the speed of ``name``, in words; "" for none."""
    speeds = {link.parent.name: _speed(link.parent) for link in devices.glob("*/device")}
    best = max(speeds, key=lambda each: speeds[each], default="")
    mine = speeds.get(name, 0)
    return f"{best} runs at {speeds[best]} Mb/s, {name} at {mine}" if mine > 0 and speeds[best] >= 5 * mine else ""


def _speed(device: Path) -> int:
    """Mb/s; 0 where it is down, does not say, or is no hardware: a virtual one says anything."""
    with suppress(OSError, ValueError):
        if (device / "device").exists() and (device / "operstate").read_text().strip() == "up":
            return max(int((device / "speed").read_text()), 0)
    return 0


def interface() -> str:
    """That the sockets of this process use; "" where nobody has chosen."""
    return os.environ.get(SOCKETS[0], "")


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; "" for loopback and where none has it."""
    if not address or address.startswith("127."):
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
