"""An etcd cluster on the hosts of a network: one member a host."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from host import HostProcess
from network import Network

_STATUS = """
import sys, urllib.request
url = "http://127.0.0.1:2379/v3/maintenance/status"
request = urllib.request.Request(url, b"{}")
sys.stdout.buffer.write(urllib.request.urlopen(request, timeout=1).read())
"""


class Etcd:
    """The members, whose data stay in `folder` when their hosts lose power.

    Args:
        network: where the hosts are.
        names: the hosts that have a member.
        folder: for the data and the logs of the members.
    """

    def __init__(self, network: Network, names: Sequence[str], folder: Path) -> None:
        self.names = tuple(names)
        self.endpoints = ",".join(f"{name}:2379" for name in names)
        self._network = network
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._processes: dict[str, HostProcess] = {}

    def start(self, name: str) -> None:
        """Starts the member of a host, also again after a loss of power."""
        peers = {peer: f"http://{self._network.address(peer)}:2380" for peer in self.names}
        options = {
            "name": name,
            "data-dir": self._folder / name,
            "listen-peer-urls": peers[name],
            "initial-advertise-peer-urls": peers[name],
            "listen-client-urls": "http://0.0.0.0:2379",
            "advertise-client-urls": f"http://{self._network.address(name)}:2379",
            "initial-cluster": ",".join(f"{peer}={url}" for peer, url in peers.items()),
        }
        command = ["etcd", *(f"--{option}={value}" for option, value in options.items())]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = self._network[name].start(command, stdout=log, stderr=log)

    def process(self, name: str) -> HostProcess:
        """The member of a host that was started last."""
        return self._processes[name]

    def start_all(self) -> None:
        """Starts all members, and waits until they have a leader."""
        for name in self.names:
            self.start(name)
        self.leader()

    def leader(self, seconds: float = 30.0) -> str:
        """The host whose member leads, as soon as one of them says so of itself."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name in self.names:
                if self._network[name].on and self.leads(name):
                    return name
            time.sleep(0.05)
        logs = [(self._folder / f"{name}.log").read_text()[-2000:] for name in self.names]
        raise RuntimeError("\n".join(["etcd has no leader", *logs]))

    def leads(self, name: str) -> bool:
        """Whether the member of a host says that it leads; one that is cut off may do so, too."""
        asked = self._network[name].start(
            [sys.executable, "-S", "-c", _STATUS],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert asked.stdout is not None
        with asked.stdout:
            answer = asked.stdout.read()
        if asked.wait():
            return False  # it does not answer yet
        status = json.loads(answer)
        # JSON leaves out a leader that is 0, while there is none.
        return bool(status.get("leader") == status["header"]["member_id"])
