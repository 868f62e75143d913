"""The store that the launcher hosts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.runs import WORKER, Run
from outlast.coordination.job_record import JobState
from outlast.errors import LaunchError
from outlast.launch.agent.coordinator import JobStore
from outlast.launch.agent.job_keys import JOB_KEY, JobKeys
from procs import free_port


@pytest.fixture
def store() -> JobStore:
    return JobStore("127.0.0.1", 0)


def client(store: JobStore) -> dist.TCPStore:
    return dist.TCPStore(store.host, store.port, is_master=False)


def test_it_reads_what_the_wrapper_wrote(store: JobStore) -> None:
    assert JobKeys(store.client).job().state is JobState.PLAIN
    client(store).set(JOB_KEY, '{"call": 0, "state": "running"}')
    assert JobKeys(store.client).job().state is JobState.RUNNING
    store.close()


def test_a_new_attempt_finds_nothing_at_the_same_address(store: JobStore) -> None:
    port = store.port
    for _ in range(5):
        worker = client(store)
        assert not worker.check(["key"])
        worker.set("key", "value")
        store.renew()
        assert store.port == port
    store.close()


def test_it_listens_on_the_address_alone(store: JobStore) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.2", store.port))  # refused if the store had taken all addresses
    store.close()


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"127.0.0.1 port {port}: Address already in use"):
            JobStore("127.0.0.1", port)
        with Run(tmp_path, WORKER, f"--master-port={port}") as run:
            assert run.wait() == 1
        assert run.err == (
            "outlast: error: the job's store cannot listen on 127.0.0.1 "
            f"port {port}: Address already in use\n"
        )


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1"):
        JobStore("192.0.2.1", 0)


def test_the_port_asked_for(tmp_path: Path) -> None:
    port = free_port()
    with Run(tmp_path, WORKER, "--master-port", str(port)) as run:
        worker = run.ready(0)
        assert worker.env["MASTER_PORT"] == str(port)
        worker.succeed()
        assert run.wait() == 0
