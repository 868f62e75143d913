"""The wall clock of a host jumps: the job goes on, and can recover from a fault afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import time
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import Cluster

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parent / "scripts" / "wall_clock.c"
HOUR_S = 3600


class WallClock:
    """A wall clock that processes started with `env` read."""

    def __init__(self, library: Path, file: Path) -> None:
        self._file = file
        self.env = {"LD_PRELOAD": str(library), "WALL_CLOCK_FILE": str(file)}
        self._file.write_bytes(struct.pack("=q", 0))

    def set_ahead(self, seconds: int) -> None:
        with self._file.open("r+b") as file:  # in place: processes have this file mapped
            file.write(struct.pack("=q", seconds))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (`cc`) for a library that moves the wall clock")
    path = tmp_path_factory.mktemp("clock") / "wall_clock.so"
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(path), str(SOURCE), "-ldl", "-pthread"]
    subprocess.run(command, check=True)
    return path


@pytest.mark.parametrize(
    "leads",
    [
        pytest.param(True, id="leader"),
        pytest.param(False, id="follower", marks=pytest.mark.exhaustive),
    ],
)
def test_a_wall_clock_that_jumps_by_hours_disturbs_nothing(
    network: Network, tmp_path: Path, weights: str, library: Path, leads: bool
) -> None:
    cluster = Cluster(network, tmp_path)
    clocks = {name: WallClock(library, tmp_path / f"clock-{name}") for name in network.names}
    for name, clock in clocks.items():
        # With these pauses, training goes on for about the length of a lease after each jump.
        cluster.agent(name, "--nnodes=3", args=("--pause=0.15",), env=clock.env)
    cluster.until_step(5, size=3)
    leader = cluster.leader()
    jumping = leader if leads else next(name for name in network.names if name != leader)
    agent = next(started for started in cluster.started if started.host == jumping)
    (worker,) = cluster.training(jumping)
    for pid in (agent.process.pid, worker):
        assert str(library) in Path(f"/proc/{pid}/maps").read_text()
    for ahead_s, until in ((HOUR_S, 32), (-HOUR_S, 60)):
        clocks[jumping].set_ahead(ahead_s)
        _check(cluster, jumping, clocks[jumping], ahead_s)
        cluster.until_step(until)
    assert {step.iteration for step in cluster.steps()} == {0}, cluster.output()
    assert cluster.leader() == leader
    os.kill(worker, signal.SIGKILL)  # the host recovers from a fault by its own clock
    cluster.until_step(60, 1, size=3)
    cluster.go()
    assert set(cluster.wait()) == {0}, cluster.output()
    cluster.check(weights)


def _check(cluster: Cluster, host: str, clock: WallClock, ahead_s: int) -> None:
    """The test's own check: a process with this clock sees the jump, and no other clock's."""
    program = "import time; print(time.time(), time.monotonic()); time.sleep(0.01)"
    before = time.time(), time.monotonic() + cluster.network[host].clock_offset_s
    shown = cluster.start(host, ["-c", program], clock.env)
    assert cluster.wait(shown) == [0], shown.output
    after = time.time(), time.monotonic() + cluster.network[host].clock_offset_s
    wall, monotonic = map(float, shown.output.split())
    assert before[0] + ahead_s <= wall <= after[0] + ahead_s
    assert before[1] <= monotonic <= after[1]
