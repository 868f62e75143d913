"""Hosts of one run, each a process with an address of its own: 127.0.0.2, 127.0.0.3, ..."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etcd_cluster import Cluster, require_etcd
from launch.hosts.agents import Hosts, on
from launch.runs import WORKER
from procs import MARKER, default_signals, free_port

NET_S = 60.0
SCRIPT = Path(__file__).parent / "scripts" / "host.py"


class Host:
    """One agent's membership in a process of its own."""

    def __init__(self, address: str, given: dict[str, Any]) -> None:
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(given)],
            env={**os.environ, MARKER: uuid.uuid4().hex},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=default_signals,
        )

    def line(self) -> dict[str, Any]:
        """The next line that the host says."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], NET_S)[0]:
            raise AssertionError(f"{self.address} says nothing")
        line = self.process.stdout.readline()
        assert line, f"{self.address} has ended"
        said: dict[str, Any] = json.loads(line)
        return said

    def joined(self) -> dict[str, Any]:
        """Waits until the host has joined."""
        said = self.line()
        assert said["event"] == "joined", said
        return said

    def failed(self) -> str:
        """Waits until the host has failed to join; returns the error."""
        said = self.line()
        assert said["event"] == "failed", said
        return str(said["error"])

    def begin(self, name: str, *arguments: Any, **keywords: Any) -> None:
        """Sends a command, whose answer `line` or `answer` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments, keywords]).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Performs a command; an error of the host is an `AssertionError` here."""
        self.begin(name, *arguments, **keywords)
        return self.answer()

    def answer(self) -> Any:
        """The result of the command that was begun."""
        said = self.line()
        assert "result" in said, said
        return said["result"]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def leave(self) -> None:
        """Leaves the group in order, and ends."""
        self.begin("close", leave=True)
        assert self.line() == {"event": "closed"}
        self.process.wait(NET_S)

    def close(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Run:
    """The hosts of one run. `endpoints` are those of the command line."""

    def __init__(self, lease_s: float, endpoints: int, folder: Path) -> None:
        self._folder = folder
        port = free_port()
        self.endpoints = [(f"127.0.0.{2 + i}", port) for i in range(endpoints)]
        self.run_id = uuid.uuid4().hex[:8]
        self.lease_s = lease_s
        self.hosts: list[Host] = []

    def host(self, number: int, **options: Any) -> Host:
        """Starts the host with the address 127.0.0.`number`."""
        address = f"127.0.0.{number}"
        given: dict[str, Any] = {
            "run_id": self.run_id,
            "endpoints": self.endpoints,
            "local_addr": address,
            "lease_s": self.lease_s,
            "join_limit_s": NET_S,
            "silence_s": 0.0,  # no other group is alive
            "record_dir": str(self._folder / "records"),
            "folder": str(self._folder),
        }
        self.hosts.append(Host(address, given | options))
        return self.hosts[-1]

    def start(self, *numbers: int) -> list[Host]:
        """Starts hosts one after the other, each when the one before has joined."""
        started = []
        for number in numbers:
            started.append(self.host(number))
            started[-1].joined()
        for host in started:
            addresses = [each.address for each in started]
            host.ask("until", hosts=addresses, voters=len(started))
        return started


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`run(lease_s=5.0, endpoints=1)`: a run, whose hosts are killed at the end."""
    runs: list[Run] = []

    def make(lease_s: float = 5.0, endpoints: int = 1) -> Run:
        runs.append(Run(lease_s, endpoints, tmp_path))
        return runs[-1]

    yield make
    for each in runs:
        for host in each.hosts:
            host.close()


@pytest.fixture(params=["c10d", "etcd"])
def meet(
    request: pytest.FixtureRequest, tmp_path: Path, etcd_if_installed: Cluster | None
) -> Callable[..., Hosts]:
    """`meet("--nnodes=2")`: hosts with these options, which meet by each of the backends."""
    if request.param == "c10d":
        return lambda *options: Hosts(tmp_path, WORKER, *options)
    require_etcd()
    assert etcd_if_installed is not None
    return partial(on, etcd_if_installed, tmp_path)
