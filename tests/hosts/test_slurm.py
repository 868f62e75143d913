"""Jobs under a real Slurm: controller, three nodes, authentication, on hosts in namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.slurm_cluster import SlurmCluster, unavailable

pytestmark = pytest.mark.slow


@pytest.fixture
def slurm(_allowed: None, tmp_path: Path) -> Iterator[SlurmCluster]:
    if reason := unavailable():
        pytest.skip(reason)
    with Network(["c0", "h1", "h2", "h3"]) as network, SlurmCluster(network, tmp_path) as cluster:
        yield cluster


def test_the_variables_that_srun_sets(slurm: SlurmCluster, tmp_path: Path) -> None:
    code = (
        "import os; from outlast.launch.config.slurm import slurm_step as s; print(s(os.environ))"
    )
    output = tmp_path / "out"
    assert slurm.srun(["--nodes=3"], ["python", "-c", code], output).wait() == 0
    lines = output.read_text().splitlines()
    assert len(lines) == 3
    for line in lines:
        assert "nodes=('h1', 'h2', 'h3')" in line
        assert "run_id='1.0'" in line
    assert {line.rpartition("node=")[2] for line in lines} == {f"'h{n}')" for n in (1, 2, 3)}
