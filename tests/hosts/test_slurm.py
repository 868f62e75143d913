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
EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
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


@pytest.mark.exhaustive
def test_all_that_outlast_run_needs_comes_from_srun(
    slurm: SlurmCluster, tmp_path: Path, weights: str
) -> None:
    cluster = Cluster(slurm.network, tmp_path)
    job = start(slurm, cluster, tmp_path)
    cluster.until_step(10, size=3)
    cluster.go()
    assert cluster.wait(job) == [0]
    assert f"weights {weights}" in job.output
    assert {(s.rank, s.host) for s in cluster.steps()} == {(0, "h1"), (1, "h2"), (2, "h3")}
    cluster.check_views()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_allowed")
def test_ranks_follow_the_switches_and_then_the_tasks(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    switches = {"s10": "h1", "s9": "h2,h3"}
    with (
        Network(["c0", "h1", "h2", "h3"]) as network,
        SlurmCluster(network, tmp_path / "slurm", switches) as slurm,
    ):
        cluster = Cluster(network, tmp_path)
        job = start(slurm, cluster, tmp_path)
        cluster.until_said("where this host is at top/s9/1/h2", job)
        cluster.until_step(10, size=3)
        cluster.go()
        assert cluster.wait(job) == [0]
        found = {(step.rank, step.host) for step in cluster.steps()}
        assert found == {(0, "h2"), (1, "h3"), (2, "h1")}


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


@pytest.mark.exhaustive
def test_a_node_leaves_a_batch_job_and_gets_no_other_one(
    slurm: SlurmCluster, tmp_path: Path, weights: str
) -> None:
    """With the scripts in `examples/slurm`."""
    cluster = Cluster(slurm.network, tmp_path)
    slurm.env |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    token, log = tmp_path / ".outlast-token", tmp_path / "sbatch.log"
    token.write_text("a secret of this test only")
    token.chmod(0o600)
    options = ["--host-timeout=4", "--standby=0", str(TRAIN), *cluster.training_options()]
    script = [str(EXAMPLES / "train.sbatch"), *options, "--pause=0.2", "--hold-at=115"]
    command = ["sbatch", "--wait", "--nodes=3", f"--output={log}", *script]
    job = cluster.adopt("c0", slurm.controller.start(command, env=slurm.env, cwd=tmp_path), log)
    cluster.until_step(10, size=2)
    node = cluster.host_of(1)
    assert f"host {node} (" in slurm.ask(str(EXAMPLES / "leave.sh"), "1", node, "fan")
    assert re.search(r"State=\w+\+DRAIN", found := slurm.ask("scontrol", "show", "node", node)), (
        found
    )
    assert "Reason=fan" in found
    cluster.until_said("this host has left the job", job)
    cluster.go()
    assert cluster.wait(job) == [0], cluster.output()
    assert f"weights {weights}" in job.output
    cluster.check_views()
    assert {step.host for step in cluster.steps() if step.iteration > 0}.isdisjoint({node})


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
