"""Jobs under a real Slurm: controller, three nodes, authentication, on hosts in namespaces."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from network import Network

from hosts.cluster import TRAIN, Cluster, Started
from hosts.slurm_cluster import SlurmCluster, unavailable

pytestmark = pytest.mark.slow

# A lost node ends neither the allocation nor the step.
SRUN = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0")
RUN = ("outlast", "run", "--host-timeout=2", "--standby=0")


@pytest.fixture
def slurm(_allowed: None, tmp_path: Path) -> Iterator[SlurmCluster]:
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path / "slurm"
    with Network(["c0", "h1", "h2", "h3"]) as network, SlurmCluster(network, folder) as slurm:
        yield slurm


def start(slurm: SlurmCluster, cluster: Cluster, folder: Path, *options: str) -> Started:
    command = [*RUN, *options, str(TRAIN), *cluster.training_options()]
    log = folder / "srun.log"
    # With the number of the node before every line.
    process = slurm.srun([*SRUN, "--label"], command, log, {"OMP_NUM_THREADS": "1"})
    return cluster.adopt("c0", process, log)


def test_all_that_outlast_run_needs_comes_from_srun(
    slurm: SlurmCluster, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(slurm.network, tmp_path)
    job = start(slurm, cluster, tmp_path)
    cluster.until_step(10, size=3)
    cluster.go()
    assert cluster.wait(job) == [0]
    assert f"weights {weights}" in job.output
    cluster.check_views()


def test_a_spare_node_takes_the_place_of_a_lost_one(
    slurm: SlurmCluster, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(slurm.network, tmp_path)
    job = start(slurm, cluster, tmp_path, "--nnodes=2")
    first = cluster.until_step(10, size=2)
    leader = cluster.until_said(r"(h\d) leads the hosts", job)[1]
    slurm.network[leader].power_off()
    cluster.until_step(first.step, iteration=1, size=2)
    cluster.go()
    cluster.until_said(f"weights {weights}", job)
    # srun itself ends with the code of the lost task, once Slurm has given up the node.
    cluster.wait(job)
    assert leader not in {step.host for step in cluster.steps() if step.iteration > 0}
    cluster.check_views()


def test_a_signal_from_slurm_leads_to_a_joint_save(slurm: SlurmCluster, tmp_path: Path) -> None:
    cluster = Cluster(slurm.network, tmp_path)
    job = start(slurm, cluster, tmp_path)
    cluster.until_step(10, size=3)
    slurm.ask("scancel", "--signal=TERM", "1.0")
    assert cluster.wait(job) == [143]
    # Slurm signals the launchers and their workers: either may be the first to tell the job.
    assert re.search(r"job stopped (as told|by SIGTERM): saved, exit code 143", job.output)
    assert "stopping after step" in job.output
    assert "CheckpointError" not in job.output
