"""Real etcd for tests: a cluster of members on 127.0.0.1, none left over afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Endpoint, Refused, Security
from outlast.coordination.stores.etcd.store import EtcdStore
from procs import default_signals, free_port

NET_S = 60.0
SHM = Path("/dev/shm")


def etcd_is_installed() -> bool:
    return shutil.which("etcd") is not None


def require_etcd() -> None:
    """Skips the test where there is no etcd."""
    if not etcd_is_installed():
        pytest.skip("etcd is not installed: run `make services` as root, or install etcd-server")


class Member:
    """One process of etcd; may be started again after its end, with its data."""

    def __init__(self, name: str, folder: Path, options: Sequence[str]) -> None:
        self.name, self._folder, self._options = name, folder, options
        self.port, self.peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        scheme = "https" if "--cert-file" in " ".join(self._options) else "http"
        return f"{scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, cluster: str) -> None:
        peer = f"http://127.0.0.1:{self.peer_port}"
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("etcd", "--name", self.name, "--data-dir", str(self._folder / self.name)),
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", cluster, "--logger", "zap", "--log-level", "error"),
                    *("--heartbeat-interval", "50", "--election-timeout", "500"),
                    *self._options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "ETCD_UNSUPPORTED_ARCH": os.uname().machine},
                preexec_fn=default_signals,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Cluster:
    """Members that form one cluster. A context manager."""

    def __init__(self, size: int = 1, options: Sequence[str] = ()) -> None:
        require_etcd()
        base = SHM if os.access(SHM, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="outlast-etcd-", dir=base))
        self.members = [Member(f"m{n}", self.folder, options) for n in range(size)]
        self._names = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)

    def __enter__(self) -> Cluster:
        for member in self.members:
            member.start(self._names)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for member in self.members:
            member.end()
        shutil.rmtree(self.folder)

    def restart(self, member: Member) -> None:
        member.start(self._names)

    @property
    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("127.0.0.1", member.port) for member in self.members]

    @property
    def rdzv_endpoint(self) -> str:
        return ",".join(map(str, self.endpoints))

    def client(self, security: Security | None = None) -> EtcdClient:
        """A client, once the cluster answers."""
        client = EtcdClient(self.endpoints, security or Security())
        with contextlib.suppress(Refused):
            client.repeat("/v3/kv/range", {"key": "AA=="}, NET_S)
        return client

    def leader(self) -> Member:
        """The member that leads the cluster, once there is one."""
        deadline = time.monotonic() + NET_S
        while time.monotonic() < deadline:
            for member in self.members:
                status = ask(f"{member.url}/v3/maintenance/status")
                if status is not None and status.get("leader") == status["header"]["member_id"]:
                    return member
            time.sleep(0.02)
        raise AssertionError("etcd has elected no leader")


def ask(url: str, body: str = "{}") -> Any:
    """The answer of a member; `None` without one."""
    try:
        with urllib.request.urlopen(url, data=body.encode(), timeout=2.0) as answer:
            return json.loads(answer.read())
    except OSError:
        return None


def etcdctl(cluster: Cluster, *arguments: str) -> str:
    """Runs the command-line client, which tests use only to set up users."""
    if shutil.which("etcdctl") is None:
        pytest.skip("etcdctl is not installed: run `make services` as root")
    done = subprocess.run(
        ["etcdctl", "--endpoints", cluster.rdzv_endpoint, *arguments],
        env={**os.environ, "ETCDCTL_API": "3"},
        text=True,
        capture_output=True,
        check=False,
        timeout=NET_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def etcd_stores(cluster: Cluster) -> Iterator[Callable[[], EtcdStore]]:
    """Makes stores on a part of `cluster` of its own, each with its own connections."""
    root = f"/outlast/{uuid.uuid4().hex}/"
    with contextlib.ExitStack() as stack:

        def make() -> EtcdStore:
            client = stack.enter_context(contextlib.closing(cluster.client()))
            store = EtcdStore(client, root, uuid.uuid4().hex)
            return stack.enter_context(contextlib.closing(store))

        yield make
