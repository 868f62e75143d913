"""Several `outlast run` on this machine, each with a loopback address of its own: its "host".

with Hosts(tmp_path, WORKER, "--nnodes=2", "--max-restarts=1") as hosts:
    one, two = hosts.start_all(2)      # 127.0.0.2, 127.0.0.3
    one.ready(rank=0).kill()
    ...
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from etcd_cluster import Cluster
from launch.runs import WORKER, Run
from procs import free_port

LEASE_S = 1.5


class Hosts:
    """The agents of one job; all are ended with the block.

    Args:
        endpoints: how many of the first hosts are endpoints.
    """

    def __init__(
        self,
        tmp_path: Path,
        script: str,
        *options: str,
        endpoints: int = 1,
        args: Iterable[str] = (),
        launcher: str = "",
    ) -> None:
        self._launcher = launcher
        self._tmp_path, self._script, self._args = tmp_path, script, list(args)
        port = free_port()
        where = ",".join(f"{address(number)}:{port}" for number in range(2, 2 + endpoints))
        self.options = [
            f"--rdzv-endpoint={where}",
            f"--host-timeout={LEASE_S}",
            "--standby=0",
            "--rdzv-conf=last_call_timeout=0",
            *options,
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def start_all(self, count: int) -> list[Run]:
        """Starts the hosts 127.0.0.2, 127.0.0.3, ..., one after the other, so that these are their
        places.
        """
        runs: list[Run] = []
        for number in range(2, 2 + count):
            runs.append(self.start(number))
            runs[-1].until_said("leads the hosts")
        return runs

    def start(self, number: int, *options: str, args: Iterable[str] | None = None) -> Run:
        """Starts the agent of the host 127.0.0.`number`."""
        given = self._args if args is None else list(args)
        own = [f"--local-addr={address(number)}", *options]
        options = (*self.options, *own)
        run = Run(self._tmp_path, self._script, *options, args=given, launcher=self._launcher)
        return self._stack.enter_context(run)


def address(number: int) -> str:
    """The address of a host."""
    return f"127.0.0.{number}"


def on(cluster: Cluster, tmp_path: Path, *options: str) -> Hosts:
    """Hosts that meet in etcd."""
    meet = (f"--rdzv-endpoint={cluster.rdzv_endpoint}", "--rdzv-backend=etcd", "--rdzv-id=job")
    return Hosts(tmp_path, WORKER, *meet, *options)
