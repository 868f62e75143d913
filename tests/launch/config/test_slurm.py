"""What Slurm's variables say about a job step."""

from __future__ import annotations

import re

import pytest

from outlast.launch.config.slurm import host_names, slurm_step

# As srun of Slurm 22.05 sets them for `srun -N3`.
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "h[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURMD_NODENAME": "h2",
}


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("login", ["login"]),
        ("h[1-3]", ["h1", "h2", "h3"]),
        ("gpu[001-003,7],login", ["gpu001", "gpu002", "gpu003", "gpu7", "login"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a,b[1,3],c.example.org", ["a", "b1", "b3", "c.example.org"]),
    ],
)
def test_the_names_of_nodes(nodelist: str, names: list[str]) -> None:
    assert list(host_names(nodelist)) == names


@pytest.mark.parametrize("nodelist", ["h[1-]", "h[a-b]", "h[]"])
def test_what_is_no_list_of_nodes_is_named(nodelist: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(nodelist))):
        list(host_names(nodelist))


def test_a_step_of_three_nodes() -> None:
    step = slurm_step(STEP)
    assert step is not None
    assert (step.nnodes, step.run_id, step.node) == ("3", "7.2", "h2")
    hosts, ports = zip(*(each.split(":") for each in step.endpoints.split(",")), strict=True)
    assert hosts == ("h1", "h2", "h3")
    assert len(set(ports)) == 1
    assert 15000 <= int(ports[0]) < 30000
    # The same on every node, and another port for another step.
    assert slurm_step({**STEP, "SLURM_PROCID": "0", "SLURMD_NODENAME": "h1"}).endpoints == (  # type: ignore[union-attr]
        step.endpoints
    )
    assert slurm_step({**STEP, "SLURM_STEP_ID": "3"}).endpoints != step.endpoints  # type: ignore[union-attr]


def test_a_large_step_has_three_endpoints() -> None:
    many = {"SLURM_STEP_NODELIST": "h[001-512]", "SLURM_STEP_NUM_TASKS": "512"}
    step = slurm_step({**STEP, **many})
    assert step is not None
    assert step.nnodes == "512"
    assert [each.split(":")[0] for each in step.endpoints.split(",")] == ["h001", "h002", "h003"]


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_PROCID"])
def test_outside_of_a_step_slurm_says_nothing(missing: str) -> None:
    assert slurm_step({k: v for k, v in STEP.items() if k != missing}) is None


def test_a_step_of_one_node_is_a_job_on_one_host() -> None:
    one = {"SLURM_STEP_NODELIST": "h1", "SLURM_STEP_NUM_TASKS": "8"}
    assert slurm_step({**STEP, **one}) is None


def test_several_tasks_on_a_node_are_refused() -> None:
    with pytest.raises(ValueError, match="srun --ntasks-per-node=1"):
        slurm_step({**STEP, "SLURM_STEP_NUM_TASKS": "24"})
