"""Plain torchrun with its rendezvous in etcd v3: two agents, the master's host is lost."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from etcd_cluster import NET_S, Cluster
from outlast.coordination.stores.etcd.client import EtcdClient
from outlast.coordination.stores.etcd.connection import Security
from outlast.coordination.stores.etcd.operations import NoAnswer
from outlast.launch.hosts.etcd.torchrun import EtcdBackend, create
from procs import MARKER, default_signals, free_port, marked

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
folder = pathlib.Path(sys.argv[1])
size = dist.get_world_size()
(folder / f"{dist.get_rank()}-of-{size}").write_text(os.environ["OUTLAST_TEST_AGENT"])
done = torch.zeros(1)
while not done.item():
    done += float((folder / "done").exists())
    dist.all_reduce(done, op=dist.ReduceOp.MAX)
    time.sleep(0.02)
"""


class LosesAnswers(EtcdClient):
    """Loses the answer to every second request."""

    calls = 0

    def call(self, path: str, body: Any, limit: float | None = None) -> Any:
        answer = super().call(path, body, limit)
        self.calls += 1
        if self.calls % 2:
            raise NoAnswer("lost")
        return answer


@pytest.mark.parametrize("kind", [EtcdClient, LosesAnswers])
def test_the_state_is_only_replaced_by_who_has_read_it(
    etcd: Cluster, kind: type[EtcdClient]
) -> None:
    with contextlib.closing(kind(etcd.endpoints, Security())) as client:
        root = f"/outlast/{uuid.uuid4().hex}/".encode()
        one, two = EtcdBackend(client, root), EtcdBackend(client, root)
        assert one.get_state() is None
        first = one.set_state(b"a")
        assert first is not None
        assert (first[0], first[2]) == (b"a", True)
        assert two.set_state(b"b") == (b"a", first[1], False)
        assert two.get_state() == (b"a", first[1])
        second = two.set_state(b"b", first[1])
        assert second is not None
        assert (second[0], second[2]) == (b"b", True)
        assert one.set_state(b"c", first[1]) == (b"b", second[1], False)
        assert one.set_state(b"c", "no token") == (b"b", second[1], False)


def test_an_endpoint_that_is_no_etcd_is_named() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    params = RendezvousParameters("outlast-etcd", endpoint, "run", 1, 1)
    with pytest.raises(RendezvousConnectionError, match=f"nothing answers at {endpoint}"):
        create(params)


@pytest.fixture
def agent(tmp_path: Path, etcd: Cluster) -> Iterator[Callable[[int], subprocess.Popen[bytes]]]:
    """`agent(2)`: a torchrun agent with the address 127.0.0.2. Kills all at the end."""
    # The entry point as an installed outlast has it: the one of this checkout may be older.
    _, _, declared = (ROOT / "pyproject.toml").read_text().partition('"torchrun.handlers"]\n')
    name, value = re.findall(r'"?([\w.:-]+)"?', declared.splitlines()[0])
    info = tmp_path / "site" / "outlast_handlers-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outlast-handlers\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{name} = {value}\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run_id, started = uuid.uuid4().hex, dict[int, subprocess.Popen[bytes]]()

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"),
            *("--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", run_id),
            *("--rdzv-backend", "outlast-etcd", "--rdzv-endpoint", etcd.rdzv_endpoint),
            *("--local-addr", f"127.0.0.{number}", "--rdzv-conf"),
            "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=2",
            *("--monitor-interval", "0.1", str(script), str(tmp_path)),
        ]
        with (tmp_path / f"agent{number}.log").open("wb") as log:
            started[number] = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    "PYTHONPATH": str(tmp_path / "site"),
                    "GLOO_SOCKET_IFNAME": "lo",
                    "OUTLAST_TEST_AGENT": str(number),
                    MARKER: f"{run_id}-{number}",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=default_signals,
            )
        return started[number]

    yield start
    for number, process in started.items():
        kill_host(f"{run_id}-{number}")
        process.wait()


def kill_host(mark: str) -> None:
    """Kills all processes of an agent."""
    while left := marked(mark):
        for process in left:
            with contextlib.suppress(Exception):
                process.kill()
        time.sleep(0.02)


@pytest.mark.slow
def test_two_agents_go_on_without_the_master(
    agent: Callable[[int], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    agents = {number: agent(number) for number in (2, 3)}

    def wait_for(name: str) -> str:
        deadline = time.monotonic() + NET_S
        while not (tmp_path / name).exists() or not (tmp_path / name).read_text():
            ended = [number for number, process in agents.items() if process.poll() is not None]
            logs = "\n".join((tmp_path / f"agent{n}.log").read_text()[-3000:] for n in (2, 3))
            assert not ended, f"{ended} ended before {name}\n{logs}"
            assert time.monotonic() < deadline, f"no {name}\n{logs}"
            time.sleep(0.02)
        return (tmp_path / name).read_text()

    master = int(wait_for("0-of-2"))
    wait_for("1-of-2")
    lost = agents.pop(master)
    mark = next(
        line.removeprefix(MARKER + "=")
        for line in Path(f"/proc/{lost.pid}/environ").read_text().split("\0")
        if line.startswith(MARKER + "=")
    )
    kill_host(mark)
    lost.wait()
    [(survivor, process)] = agents.items()
    assert int(wait_for("0-of-1")) == survivor
    (tmp_path / "done").touch()
    assert process.wait(NET_S) == 0, (tmp_path / f"agent{survivor}.log").read_text()
