"""A wrapped function under a plan: bootstrap, observer and restart in place together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outlast.chaos.fired_faults import MarkerDirectory
from procs import Job

TRAIN = """
import datetime, json, os, torch
import torch.distributed as dist
from outlast import inprocess

@inprocess.Wrapper(
    soft_timeout=datetime.timedelta(seconds=2), hard_timeout=datetime.timedelta(seconds=60)
)
def train(call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    value = torch.ones(1)
    for step in range(1, 7):
        call.ping()
        dist.all_reduce(value)
    dist.destroy_process_group()
    return call.iteration

print(json.dumps({"iteration": train()}), flush=True)
"""


@pytest.mark.slow
def test_the_job_survives_every_fault_of_the_plan(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    plan = tmp_path / "plan.json"
    faults = [
        {"rank": 1, "kind": "exception", "iteration": 0, "step": 3},
        {"rank": 1, "kind": "hang_collective", "iteration": 1, "step": 4},
        {"rank": 0, "kind": "hang", "iteration": 2, "step": 5},
        {"rank": 1, "kind": "kill_monitor", "iteration": 3, "step": 2},
    ]
    plan.write_text(json.dumps({"faults": faults}))
    state = tmp_path / "state"
    env = {"OUTLAST_CHAOS": str(plan), "OUTLAST_CHAOS_STATE": str(state)}
    arguments = ["outlast.chaos.bootstrap", str(script)]
    with Job(tmp_path, "-m", nprocs=2, env=env, args=arguments) as job:
        job.start_all()
        assert job.wait_all() == {0: 0, 1: 0}, job.errors(0) + job.errors(1)
        assert job.lines(0) == job.lines(1)
        assert job.lines(0)[0]["iteration"] >= 3
    fired = [(record["rank"], record["kind"]) for record in MarkerDirectory(state).records()]
    assert fired == [(fault["rank"], fault["kind"]) for fault in faults]
