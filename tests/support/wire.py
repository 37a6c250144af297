"""``python -m tests.support.wire DEVICE ...`` is the network between hosts of a test: what it loses, delays
and cuts, by direction.

Each host's network namespace has one device (TUN), whose other end is here: every packet between hosts passes
through this process.  So loss, delay and a cut are a few lines, and work where the kernel has no
``sch_netem`` (``tc qdisc add … netem``: "Specified qdisc kind is unknown").  Packets are IPv4; the last byte
of an address is the host's number plus one.

A line on standard input is a rule, ``{"source": 0, "target": 2, "loss": 1.0, "delay_s": 0.0}``; it holds from
then on, and is echoed.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKETS_A_TURN = 64


def device(name: str) -> int:
    """Makes a device and returns its descriptor.  The process that started this program moves the device to a
    host's namespace.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Wire:
    def __init__(self, devices: list[int], seed: int = 0) -> None:
        self.devices = devices
        self.hosts = {descriptor: number for number, descriptor in enumerate(devices)}
        self.rules: dict[tuple[int, int], tuple[float, float]] = {}
        self.late: list[tuple[float, int, int, bytes]] = []
        self.number = 0
        self.rng = random.Random(seed)

    def serve(self) -> None:
        """Passes packets on until standard input is closed."""
        while True:
            wait_s = max(self.late[0][0] - time.monotonic(), 0.0) if self.late else None
            readable = select.select([0, *self.devices], [], [], wait_s)[0]
            if 0 in readable and not self._rule(sys.stdin.readline()):
                return
            for descriptor in readable:
                if descriptor:
                    self._take(descriptor)
            while self.late and self.late[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self.late)
                self._give(target, packet)

    def _rule(self, line: str) -> bool:
        if not line:
            return False
        rule = json.loads(line)
        self.rules[rule["source"], rule["target"]] = (rule["loss"], rule["delay_s"])
        print(line, end="", flush=True)
        return True

    def _take(self, descriptor: int) -> None:
        for _ in range(PACKETS_A_TURN):
            try:
                packet = os.read(descriptor, 65536)
            except OSError:  # no more for now, or the host is not up yet
                return
            target = packet[19] - 1 if packet[0] >> 4 == 4 else -1
            if not 0 <= target < len(self.devices):
                continue
            loss, delay_s = self.rules.get((self.hosts[descriptor], target), (0.0, 0.0))
            if loss and self.rng.random() < loss:
                continue
            if delay_s:
                self.number += 1
                heapq.heappush(self.late, (time.monotonic() + delay_s, self.number, target, packet))
            else:
                self._give(target, packet)

    def _give(self, target: int, packet: bytes) -> None:
        try:
            os.write(self.devices[target], packet)
        except OSError:  # its queue is full, or it is gone: a network loses packets
            return


if __name__ == "__main__":
    wire = Wire([device(name) for name in sys.argv[1:]])
    print("ready", flush=True)
    wire.serve()
