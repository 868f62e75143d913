"""Workers get torchrun's environment variables, and those that outlast adds."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launch.runs import Run
from outlast.launch import environment
from zygote import Zygote

# One write per line: torchrun's workers share a pipe.
PRINTS = """
import json, os, sys
print(json.dumps({"pid": os.getpid(), "rank": int(os.environ["RANK"]), "env": dict(os.environ),
    "argv": sys.argv[1:], "sid": os.getsid(0), "pgid": os.getpgid(0), "name": __name__,
    "stdin": sys.stdin.read(), "flags": sys.stdout.write_through}) + "\\n", end="", flush=True)
"""
# Variables for torchrun's own use, which the workers inherit.
ITS_OWN = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "COLUMNS", "LINES"}
NAMES = ("AGENT", "EVENTS_DIR", "JOB", "READ_LEASE", "REPLACEMENT", "TEST_ID")
OURS = {"TMPDIR", *(f"OUTLAST_{name}" for name in NAMES)}
# They differ between any two runs.
OF_ONE_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_as_torchrun_has_it(tmp_path: Path, nproc: int, zygote: Zygote) -> None:
    (tmp_path / "script.py").write_text(PRINTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={nproc}", "--max-restarts=2", "--role=trainer", "script.py"]
    done = zygote.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    theirs = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            theirs[said["rank"]] = said["env"]
    options = [f"--nproc_per_node={nproc}", "--max_restarts=2", "--role=trainer"]
    with Run(tmp_path, PRINTS, *options) as run:
        for rank in range(nproc):
            ours = run.ready(rank).env
            names = set(theirs[rank]) - ITS_OWN
            assert set(ours) - OURS - set(os.environ) == names - set(os.environ)
            assert {name for name in names if ours[name] != theirs[rank][name]} <= OF_ONE_RUN
        assert run.wait() == 0


def test_an_interface_that_the_user_chose_is_kept(tmp_path: Path) -> None:
    with Run(tmp_path, PRINTS, env={"GLOO_SOCKET_IFNAME": "lo"}) as run:
        assert run.ready(0).env["GLOO_SOCKET_IFNAME"] == "lo"
        assert run.wait() == 0


def test_the_password_of_etcd_is_not_passed_on(tmp_path: Path) -> None:
    with Run(tmp_path, PRINTS, env={"OUTLAST_ETCD_PASSWORD": "secret"}) as run:
        assert "OUTLAST_ETCD_PASSWORD" not in run.ready(0).env
        assert run.wait() == 0


def test_what_outlast_adds(tmp_path: Path) -> None:
    with Run(tmp_path, PRINTS, "--events-dir=e", args=["--x_y", "-m", "--", "a b"]) as run:
        ready = run.ready(0)
        assert run.wait() == 0
    assert ready.env["OUTLAST_AGENT"] == "1"
    assert ready.env["OUTLAST_REPLACEMENT"] == "0"
    (events,) = (tmp_path / "e").iterdir()
    assert ready.env["OUTLAST_EVENTS_DIR"] == str(events)
    assert "OUTLAST_CHAOS" not in ready.env
    assert "OMP_NUM_THREADS" not in set(ready.env) - set(os.environ)
    assert ready.more["argv"] == ["--x_y", "-m", "--", "a b"]
    assert ready.more["sid"] == ready.more["pgid"] == ready.pid
    assert ready.more["stdin"] == ""
    assert ready.more["flags"]


def test_what_the_user_has_set_holds(tmp_path: Path) -> None:
    given = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "RANK": "99"}
    with Run(tmp_path, PRINTS, "--nproc-per-node=2", env=given) as run:
        env = run.ready(1).env
        assert run.wait() == 0
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert env["RANK"] == "1"


@pytest.mark.slow
def test_a_process_group_over_the_launchers_store(tmp_path: Path) -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print(int(x), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    with Run(tmp_path, script, "--nproc-per-node=2") as run:
        assert run.wait() == 0
    assert sorted(run.out.splitlines()) == ["[0] 2", "[1] 2"]


def test_modules_and_programs(tmp_path: Path) -> None:
    with Run(tmp_path, "", "-m", "platform") as run:  # its argument is the unused script
        assert run.wait() == 0
    assert run.out.startswith("[0] Linux")
    with Run(tmp_path, "", "--no-python", "echo", "hello") as run:
        assert run.wait() == 0
    assert run.out == f"[0] hello {run.script}\n"


@pytest.mark.parametrize(
    ("module", "expected"), [("tqdm.utils", []), ("settings", ["all environment variables"])]
)
def test_a_look_for_variables_with_an_own_prefix_is_no_read_of_all(
    module: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a standby process would import neither tqdm nor torch, which imports it."""
    for name in environment.PER_WORKER:  # as in a standby process
        monkeypatch.delenv(name, raising=False)
    code = "import os; list(k for k, v in os.environ.items() if k.startswith('TQDM_'))"
    with environment.recorded_reads() as reads:
        exec(code, {"__name__": module})
    assert reads == expected


def test_a_read_of_the_users_own_interface_keeps_no_standby_from_importing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers have the same one. tqdm, which torch imports, reads all variables."""
    for name in environment.PER_WORKER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    with environment.recorded_reads() as reads:
        exec("import os; dict(os.environ.items())", {"__name__": "tqdm.utils"})
        assert reads == []
        exec("import os; os.environ.get('RANK')", {"__name__": "settings"})
    assert reads == ["RANK"]
