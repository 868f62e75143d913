"""Delays, loses and repeats packets between hosts, where the kernel may have no netem.

The packets of the chosen directions are routed into a TUN device of the switch. A process there,
this file run as a program, sends each on: late, twice or never.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from network import Network

_DEVICE, _TABLE = "shake0", 77
_TUNSETIFF, _TUN_NO_PI = 0x400454CA, 0x1001


def why_not() -> str:
    """Why packets cannot be shaken here; an empty string if they can."""
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "there is no /dev/net/tun"


class Shaker:
    """Shakes directions of a network. Close it before the network."""

    def __init__(self, network: Network, seed: int) -> None:
        self._network = network
        self._shaken: set[tuple[str, str]] = set()
        switch = network.switch
        command = ["nsenter", "--target", str(switch.init), "--net", sys.executable, "-S", __file__]
        self._process = subprocess.Popen(
            [*command, str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the shaker does not start"
        switch.ip(
            f"link set {_DEVICE} up",
            f"route add default dev {_DEVICE} table {_TABLE}",
            # What it sends on is not sent to it again. Cuts come first: they are added later.
            f"rule add pref 100 iif {_DEVICE} lookup main",
        )

    def shake(
        self, directions: Collection[tuple[str, str]], delay_s: float, loss: float, twice: float
    ) -> None:
        """Shakes these directions and no others: a random delay of up to twice `delay_s`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{delay_s} {loss} {twice}\n")
        self._process.stdin.flush()
        wanted = set(directions)
        for change, pairs in (
            ("add", wanted - self._shaken),
            ("delete", self._shaken - wanted),
        ):
            for source, target in sorted(pairs):
                where = f"from {self._network.address(source)} to {self._network.address(target)}"
                self._network.switch.ip(f"rule {change} pref 200 {where} lookup {_TABLE}")
        self._shaken = wanted

    def close(self) -> None:
        """Ends its process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _main(seed: int) -> None:
    r = random.Random(seed)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _TUN_NO_PI))
    print("ready", flush=True)
    delay_s = loss = twice = 0.0
    late: list[tuple[float, int, bytes]] = []
    number = 0
    with selectors.DefaultSelector() as selector:
        selector.register(tun, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
            for key, _ in selector.select(wait_s):
                if key.fd == tun:
                    packet = os.read(tun, 1 << 16)
                    for _ in range((r.random() >= loss) * (1 + (r.random() < twice))):
                        number += 1
                        at = time.monotonic() + 2 * delay_s * r.random()
                        heapq.heappush(late, (at, number, packet))
                elif line := os.read(0, 1 << 12):
                    delay_s, loss, twice = map(float, line.splitlines()[-1].split())
                else:
                    return
            while late and late[0][0] <= time.monotonic():
                with contextlib.suppress(OSError):  # the host is gone, or its queue is full
                    os.write(tun, heapq.heappop(late)[2])


if __name__ == "__main__":
    _main(int(sys.argv[1]))
