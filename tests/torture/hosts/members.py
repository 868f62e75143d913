"""etcd's members among the hosts of a trial: each on a host of its own, which has faults too."""

from __future__ import annotations

import signal
from pathlib import Path

from etcd import Etcd
from network import Network

from .faults import Agents

NAMES = ("e1", "e2", "e3")


class WithMembers:
    """The agents of a trial, and etcd's members; see `faults.Agents`. Without members, the agents
    alone. A member that is started again has its data.
    """

    def __init__(self, network: Network, agents: Agents, folder: Path, backend: str) -> None:
        names = NAMES if backend == "etcd" else ()
        self.etcd = Etcd(network, names, folder / "etcd")
        self._agents = agents
        if names:
            self.etcd.start_all()

    def start(self, host: str) -> None:
        if host in self.etcd.names:
            self.etcd.start(host)
        else:
            self._agents.start(host)

    def kill(self, host: str) -> None:
        if host in self.etcd.names:
            process = self.etcd.process(host)
            process.send_signal(signal.SIGCONT)  # `nsenter` must see the end of its child
            process.send_signal(signal.SIGKILL)
            process.wait()
        else:
            self._agents.kill(host)

    def pause(self, host: str) -> None:
        if host in self.etcd.names:
            self.etcd.process(host).send_signal(signal.SIGSTOP)
        else:
            self._agents.pause(host)

    def drain(self, host: str) -> None:
        if host not in self.etcd.names:
            self._agents.drain(host)

    def join_again(self, host: str) -> None:
        if host not in self.etcd.names:
            self._agents.join_again(host)

    def resume(self, host: str) -> None:
        if host in self.etcd.names:
            self.etcd.process(host).send_signal(signal.SIGCONT)
        else:
            self._agents.resume(host)
