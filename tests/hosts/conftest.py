"""Hosts in network namespaces, for tests; a skip with the reason where they cannot be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from network import Network, unavailable

from hosts.cluster import TRAIN


@pytest.fixture(scope="session")
def _allowed() -> None:
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


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights of a run without faults, in one process."""
    state = tmp_path_factory.mktemp("undisturbed") / "state"
    command = [sys.executable, str(TRAIN), "--state", str(state), "--pause", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]
