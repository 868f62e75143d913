"""The options of `outlast run`, and the job specification made from them."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import outlast
from outlast.launch.cli import app
from outlast.launch.commands.shared import with_options_of
from outlast.launch.config.from_options import job_from_options, parse_std
from outlast.launch.config.job_spec import JobSpec, Std, has_wrapper
from outlast.launch.config.options import RunOptions
from outlast.launch.config.slurm import SlurmStep, in_step
from procs import NET_S

HOSTS = {"nnodes": "2", "rdzv_endpoint": "a:1"}
STATIC = {"nnodes": "2", "master_addr": "a"}


def parsed(*words: str) -> RunOptions:
    """The options as `outlast run` gets them for a command line."""
    got: list[RunOptions] = []
    sub = typer.Typer()
    settings: dict[str, Any] = {
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
    sub.command(context_settings=settings)(with_options_of(RunOptions, got.append))
    result = CliRunner().invoke(sub, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return got[0]


def job(**options: Any) -> JobSpec:
    return job_from_options(RunOptions(**{"script": __file__, **options}))


def test_both_spellings() -> None:
    dashes = parsed("--nproc-per-node", "4", "--max-restarts=2", "--log-dir", "d", "s.py")
    scores = parsed("--nproc_per_node", "4", "--max_restarts=2", "--log_dir", "d", "s.py")
    assert dashes == scores
    assert (dashes.nproc_per_node, dashes.max_restarts, dashes.log_dir) == ("4", "2", Path("d"))


def test_what_follows_the_script_is_the_scripts() -> None:
    options = parsed("-m", "a_module", "--nproc_per_node", "3", "--", "-m", "--tee=1")
    assert (options.script, options.module, options.nproc_per_node) == ("a_module", True, "1")
    assert options.args == ["--nproc_per_node", "3", "--", "-m", "--tee=1"]


def test_a_torchrun_command_line() -> None:
    options = parsed(
        *("--nnodes=1:1", "--node_rank=0", "--nproc_per_node=8", "--standalone"),
        *("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:29400", "--rdzv_id=run7"),
        *("--monitor_interval=5", "--start_method=fork", "--local_addr=localhost"),
        *("--role=trainer", "-t", "3", "s.py"),
    )
    made = job_from_options(dataclasses.replace(options, script=__file__))
    assert (made.nproc, made.run_id, made.role) == (8, "run7", "trainer")
    assert (made.master_addr, made.master_port) == ("localhost", 29400)


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, ("127.0.0.1", 0)),
        ({"master_addr": "localhost", "master_port": 5}, ("localhost", 5)),
        ({"local_addr": "localhost"}, ("localhost", 0)),
        ({"rdzv_endpoint": "[::1]:77"}, ("::1", 77)),
        ({"rdzv_endpoint": "node1"}, ("node1", 0)),
        ({"rdzv_endpoint": "a:1", "master_addr": "b", "master_port": 2}, ("b", 2)),
    ],
)
def test_addresses(options: dict[str, Any], address: tuple[str, int]) -> None:
    made = job(**options)
    assert (made.master_addr, made.master_port) == address


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nnodes": "2"}, "--nnodes 2 needs --rdzv-endpoint"),
        ({"nnodes": "0:4"}, "--nnodes 0:4: MIN must be"),
        ({"nnodes": "4:2"}, "--nnodes 4:2: MIN must be"),
        ({"nnodes": ":2"}, "--nnodes :2: must be"),
        ({"nnodes": "x"}, "--nnodes x: must be"),
        ({"node_rank": 1}, "--node-rank 1"),
        ({**HOSTS, "rdzv_endpoint": "a:b"}, "--rdzv-endpoint a:b: must be"),
        ({**HOSTS, "rdzv_endpoint": "a:1,:2"}, "--rdzv-endpoint :2: must be"),
        ({**HOSTS, "rdzv_endpoint": "a:1,b:1,a:1"}, "--rdzv-endpoint a:1,b:1,a:1: a:1 is"),
        ({**HOSTS, "rdzv_backend": "zoo"}, "--rdzv-backend zoo: must be"),
        ({**HOSTS, "rdzv_backend": "etcd-v2"}, "--rdzv-backend etcd-v2: etcd's old API"),
        ({**HOSTS, "rdzv_conf": "join_timeout"}, "--rdzv-conf join_timeout: must be"),
        ({**HOSTS, "rdzv_conf": "join_timeout=soon"}, "--rdzv-conf join_timeout=soon: must be"),
        ({**HOSTS, "rdzv_conf": "cacert=x"}, "--rdzv-conf cacert=x: unknown with c10d"),
        ({**HOSTS, "host_timeout": 0.0}, "--host-timeout 0: must be"),
        ({**STATIC, "nnodes": "2:4"}, "--rdzv-backend static --nnodes 2:4: the number"),
        ({**STATIC, "node_rank": 2}, "--node-rank 2: must be"),
        (
            {**STATIC, "rank_order": "hosts"},
            "--rank-order: with --rdzv-backend static, --node-rank",
        ),
        ({**HOSTS, "rank_order": " "}, "--rank-order: must not be empty"),
        ({"nproc_per_node": "0"}, "--nproc-per-node 0"),
        ({"nproc_per_node": "-1"}, "--nproc-per-node -1"),
        ({"nproc_per_node": "many"}, "--nproc-per-node many"),
        ({"script": "no/such.py"}, "no such script: no/such.py"),
        ({"script": "no-module!", "module": True}, "-m no-module!"),
        ({"module": True, "no_python": True}, "--module and --no-python"),
        ({"chaos": Path("no/plan.json")}, "--chaos no/plan.json: no such file"),
        ({"chaos": Path(__file__), "no_python": True}, "--chaos and --no-python"),
        ({"tee": "4"}, "--tee '4'"),
        ({"redirects": "0:1,9:1"}, "--redirects '0:1,9:1'"),
        ({"redirects": "0:1,1"}, "--redirects '0:1,1'"),
        ({"local_ranks_filter": "a"}, "--local-ranks-filter a"),
        ({"run_id": "../x"}, "--run-id '../x'"),
        ({"run_id": ""}, "--run-id ''"),
        ({"rdzv_endpoint": "host:port"}, "--rdzv-endpoint host:port"),
        ({"grace": float("inf")}, "--grace and --backoff"),
    ],
)
def test_bad_values(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(complaint)):
        job(**options)


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ('{"faults": [', "not JSON: "),
        ("[]", "plan: Expected `object`, got `array`"),
        ('{"faults": [{"rank": 0, "kind": "hang"}, {"rank": 1, "kind": "fire"}]}', "faults[1]"),
        ('{"faults": [{"rank": 0, "kind": "hang", "stop": 3}]}', "unknown field `stop`"),
        ("{}", "no faults"),
    ],
)
def test_a_wrong_fault_plan_is_refused(tmp_path: Path, plan: str, complaint: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan)
    with pytest.raises(ValueError, match="^" + re.escape(f"--chaos {path}: ")) as error:
        job(chaos=path)
    assert complaint in str(error.value)


def test_what_is_refused_is_refused_before_anything_starts(tmp_path: Path) -> None:
    path, script = tmp_path / "plan.json", tmp_path / "script.py"
    path.write_text("{}")
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    command = [sys.executable, "-m", "outlast.launch", "run", f"--chaos={path}", str(script)]
    env = {**os.environ, "COLUMNS": "500"}  # so that the path is not wrapped
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "plan.json" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_plan_is_read_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"faults": [{"rank": 0, "kind": "hang"}]}')
    code = (
        "import sys; from pathlib import Path\n"
        "from outlast.launch.config.from_options import job_from_options\n"
        "from outlast.launch.config.options import RunOptions\n"
        "job_from_options(RunOptions(script='-', no_python=False, chaos=Path(sys.argv[1])))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    (tmp_path / "-").touch()
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=tmp_path, check=True)


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"outlast {version('outlast')}\n")
    assert outlast.__version__ == version("outlast")


def test_the_version_costs_an_import_nothing() -> None:
    code = "import sys, outlast; sys.exit('importlib.metadata' in sys.modules)"
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-restarts=-1", __file__],
        ["--grace=-1", __file__],
        ["--master-port=65536", __file__],
        ["--nproc-per-node=x", __file__],
        ["--no-such-option", __file__],
        [],
    ],
)
def test_bad_command_lines_end_with_2(words: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", *words])
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_nproc_by_devices() -> None:
    assert job(nproc_per_node="cpu").nproc == len(os.sched_getaffinity(0))
    assert job(nproc_per_node="auto").nproc >= 1


def test_commands_of_workers() -> None:
    def command(chaos: bool = False, **options: Any) -> list[str]:
        return job(args=["--a"], **options).program.command("py", chaos)

    assert command() == ["py", "-u", __file__, "--a"]
    assert command(script="m.n", module=True) == ["py", "-u", "-m", "m.n", "--a"]
    assert command(script="prog", no_python=True) == ["prog", "--a"]
    bootstrap = ["py", "-u", "-m", "outlast.chaos.bootstrap"]
    assert command(chaos=True) == [*bootstrap, __file__, "--a"]
    assert command(chaos=True, script="m", module=True) == [*bootstrap, "-m", "m", "--a"]


def test_streams() -> None:
    assert parse_std("3", 2) == {0: Std.ALL, 1: Std.ALL}
    assert parse_std("=1", 1) == {0: Std.OUT}  # as argparse reads `-r=1`
    assert parse_std("1:2", 3) == {0: Std.NONE, 1: Std.ERR, 2: Std.NONE}


def test_the_help_is_quick_because_it_imports_little() -> None:
    code = (
        "import sys, json\n"
        "from outlast.launch.cli import app\n"
        "for words in (['--help'], ['run', '--help'], ['report', '--help']):\n"
        "    app(words, standalone_mode=False)\n"
        "slow = ('torch', 'numpy', 'outlast.inprocess', 'outlast.chaos', 'outlast.coordination')\n"
        "print(json.dumps([name for name in slow if name in sys.modules]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_environment_is_read_in_one_module() -> None:
    folder = Path(sys.modules[JobSpec.__module__].__file__ or "").parents[1]
    readers = {
        path.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"environment.py"}


def test_many_hosts() -> None:
    made = job(
        nnodes="2:4", rdzv_endpoint="a:1,[::1]:2,c", rdzv_conf="last_call_timeout=3", node_rank=7
    )
    assert made.hosts is not None
    assert (made.hosts.minimum, made.hosts.maximum, made.hosts.backend) == (2, 4, "c10d")
    assert made.hosts.endpoints == (("a", 1), ("::1", 2), ("c", 29400))
    assert (made.hosts.last_call_s, made.hosts.join_s, made.hosts.place) == (3.0, 600.0, -1)
    assert made.run_id == "none"


def test_static_rendezvous_is_that_of_torchruns_older_command_lines() -> None:
    made = job(**STATIC, node_rank=1, rdzv_conf="timeout=9")
    assert made.hosts is not None
    assert (made.hosts.backend, made.hosts.endpoints) == ("static", (("a", 29500),))
    assert (made.hosts.place, made.hosts.join_s) == (1, 9.0)


def test_hosts_compare_what_must_be_equal() -> None:
    one = dict(job(**HOSTS, args=["--lr", "0.1"], local_addr="10.0.0.1", run_id="x").settings)
    other = dict(job(**HOSTS, args=["--lr", "0.2"], local_addr="10.0.0.2", run_id="x").settings)
    assert {name for name in one if one[name] != other[name]} == {"command line of the script"}
    assert one["command line of the script"] == "--lr 0.1"


def test_hosts_compare_whether_they_have_an_order_and_not_which() -> None:
    one, other = (dict(job(**HOSTS, rank_order=given).settings) for given in ("echo a", "echo b"))
    none = dict(job(**HOSTS).settings)
    assert one == other
    assert {name for name in one if one[name] != none[name]} == {"--rank-order"}


def test_a_slurm_step_completes_the_options() -> None:
    step = SlurmStep(("n1", "n2", "n3", "n4"), "7.0", "n2")
    options = in_step(RunOptions(script=__file__), step)
    assert (options.nnodes, options.run_id) == ("4", "7.0")
    assert options.rdzv_endpoint == step.endpoints
    ranged = in_step(RunOptions(script=__file__, nnodes="2:4", run_id="x"), step)
    assert (ranged.nnodes, ranged.run_id, ranged.rdzv_endpoint) == ("2:4", "x", step.endpoints)
    for given in ({"nnodes": "1"}, {"rdzv_endpoint": "a:1"}, {"standalone": True}):
        alone = RunOptions(script=__file__, **given)  # type: ignore[arg-type]
        assert in_step(alone, step) is alone


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from outlast import inprocess\n@inprocess.Wrapper()\ndef f(): ...", True),
        ("from outlast.inprocess import Wrapper\n@Wrapper\ndef f(): ...", True),
        ("from outlast.inprocess import Wrapper\nWrapper(soft_timeout=9)(f)()", True),
        ("import outlast.inprocess as ip\n@ip.Wrapper()\ndef f(): ...", True),
        ("from outlast.compat.nvrx.inprocess import Wrapper as W\nW()(f)()", False),
        ("import outlast\n# no Wrapper here\n# @inprocess.Wrapper()", False),
        ("import outlast, gym\nenv = gym.Wrapper(env)", False),
        ("from outlast import inprocess\n@inprocess.Wrapper(enabled=False)\ndef f(): ...", False),
        ("import outlast\ndef", False),
        ("class Wrapper: ...\nWrapper()", False),
    ],
)
def test_whether_a_script_has_a_wrapped_function(source: str, found: bool) -> None:
    assert has_wrapper(source) is found


def test_a_system_without_proc_is_refused_in_one_line() -> None:
    own_mounts = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    hide = "mount -t tmpfs none /proc"
    if subprocess.run([*own_mounts, hide], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    command = f'{hide} && exec "$0" -m outlast.launch run "$1"'
    told = subprocess.run(
        [*own_mounts, command, sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=NET_S,
    )
    assert told.returncode == 2
    assert "/proc is not mounted" in told.stderr
    assert "Traceback" not in told.stderr


@pytest.mark.parametrize(
    ("text", "limit"),
    [("0", (0, math.inf)), ("3/1h", (3, 3600.0)), ("2/90", (2, 90.0)), ("1/1.5min", (1, 90.0))],
)
def test_a_limit_of_restarts(text: str, limit: tuple[int, float]) -> None:
    found = job(max_restarts=text)
    assert (found.max_restarts, found.restart_window_s) == limit


@pytest.mark.parametrize("text", ["", "x", "3/", "3/0", "3/1y", "-1", "3/-1"])
def test_a_limit_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=f"--max-restarts {text}: must be a number of faults"):
        job(max_restarts=text)
