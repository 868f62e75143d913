"""A real Ray cluster on hosts in network namespaces: one node on each host."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from host import Host
from network import Network

PORT = 6379
_READY_S = 300.0  # a net: on two busy cores, a node takes most of a minute
_COUNT = """
import ray
ray.init(address="{address}", _node_ip_address="{own}", logging_level="ERROR")
print("alive", sum(node["Alive"] for node in ray.nodes()))
"""


class RayCluster:
    """The first host of `network` is the head, and has no CPUs for actors; the others are nodes."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.head, *self.nodes = network
        self.address = f"{self.head.address}:{PORT}"
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_USAGE_STATS_ENABLED": "0",
            # By default, a token in the home directory, which a later `ray.init` may not use.
            "RAY_AUTH_MODE": "disabled",
            # A dead node is seen after seconds, not half a minute.
            "RAY_health_check_initial_delay_ms": "1000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "1000",
            "RAY_health_check_failure_threshold": "3",
        }
        folder.mkdir()

    def __enter__(self) -> RayCluster:
        try:
            options = ["--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false"]
            # Ray's sockets are in this folder, and their paths must be short.
            self._node(self.head, [*options, "--temp-dir=/dev/shm/ray"])
            self._until_alive(1)
            for node in self.nodes:
                self._node(node, [f"--address={self.address}", "--num-cpus=1"])
            self._until_alive(1 + len(self.nodes))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _node(self, host: Host, options: Sequence[str]) -> None:
        command = ["ray", "start", "--block", f"--node-ip-address={host.address}", *options]
        log = self._stack.enter_context((self._folder / f"{host.name}.log").open("wb"))
        memory = "--object-store-memory=100000000"
        node = host.start(
            [*command, memory], env=self.env, cwd=self._folder, stdout=log, stderr=log
        )
        self._stack.callback(node.wait)
        self._stack.callback(node.send_signal, signal.SIGKILL)

    def _until_alive(self, number: int) -> None:
        deadline = time.monotonic() + _READY_S
        code = _COUNT.format(address=self.address, own=self.head.address)
        while f"alive {number}" not in (said := self._ask(code)):
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-3000:] for p in sorted(self._folder.glob("*.log")))
                raise AssertionError(f"Ray: no {number} nodes within {_READY_S} s\n{said}\n{logs}")

    def _ask(self, code: str) -> str:
        process = self.head.start(
            [sys.executable, "-c", code],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        with process.stdout as stream:
            text = stream.read().decode()
        process.wait()
        return text
