"""Hosts in network namespaces, for tests; a skip with the reason where they cannot be made."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network, unavailable

from hosts.cluster import SHARDED, TRAIN
from zygote import Zygote


@pytest.fixture(scope="session")
def _allowed(zygote: object) -> None:
    """Programs on hosts are started by the zygote."""
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture
def network(_allowed: None) -> Iterator[Network]:
    """A network with the hosts h1, h2 and h3."""
    with Network(["h1", "h2", "h3"]) as network:
        yield network


@pytest.fixture
def four(_allowed: None) -> Iterator[Network]:
    """A network with the hosts h1, h2, h3 and h4."""
    with Network(["h1", "h2", "h3", "h4"]) as network:
        yield network


@pytest.fixture
def five(_allowed: None) -> Iterator[Network]:
    with Network([f"h{number}" for number in range(1, 6)]) as network:
        yield network


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> str:
    """The hash of the weights of a run without faults, in one process."""
    state = tmp_path_factory.mktemp("undisturbed") / "state"
    command = [sys.executable, str(TRAIN), "--state", str(state), "--pause", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = zygote.run(command, environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def undisturbed_sharded(folder: Path, zygote: Zygote, ranks: int, **env: str) -> str:
    """What `sharded.py` prints without a fault or move."""
    run = ["-m", "outlast.launch", "run", f"--nproc-per-node={ranks}", "--standby", "0"]
    options = ["--state", str(folder / "state"), "--pause", "0"]
    command = [sys.executable, *run, str(SHARDED), *options]
    done = zygote.run(command, {**os.environ, "OMP_NUM_THREADS": "1", **env})
    assert done.returncode == 0, done.stderr
    found = re.search(r"weights (\w+)", done.stdout)
    assert found is not None
    return found[1]


@pytest.fixture(scope="session")
def sharded_weights(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> str:
    """With three ranks."""
    return undisturbed_sharded(tmp_path_factory.mktemp("undisturbed"), zygote, 3)


@pytest.fixture(scope="session")
def hsdp_weights(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> str:
    """With four ranks and HSDP."""
    return undisturbed_sharded(tmp_path_factory.mktemp("undisturbed"), zygote, 4, HSDP="1")
