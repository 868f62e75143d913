"""Where a host is in the network: what its environment, a file or a command says."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.hosts.agents import Hosts, address
from launch.runs import WORKER
from outlast.coordination.replicated.hosts import HostInfo
from outlast.errors import LaunchError
from outlast.launch.config.hosts_spec import HostsSpec
from outlast.launch.config.slurm import switches
from outlast.launch.hosts import rank_order
from outlast.launch.hosts.places import nearness, sort_key
from outlast.launch.hosts.rank_order import own_topology
from procs import NET_S

ME = socket.gethostname()


def host(*topology: str) -> HostInfo:
    return HostInfo(id="/".join(topology), topology=topology)


def own(given: str = "", local_addr: str | None = None) -> tuple[str, ...]:
    spec = HostsSpec(
        minimum=1, maximum=9, backend="c10d", endpoints=(), rank_order=given, local_addr=local_addr
    )
    return own_topology(spec)


@pytest.fixture(autouse=True)
def _no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM", "JOB_COMPLETION", "OUTLAST_TOPOLOGY")):
            monkeypatch.delenv(name)


# ----------------------------------------------------------------------------- the order


def test_hosts_are_in_the_order_of_the_network_and_of_numbers() -> None:
    ordered = [
        host("s0", "s9", "2", "node7"),
        host("s0", "s10", "1", "node3"),
        host("s0", "s10", "10", "node1"),
        host("s0", "s010", "11", "node1"),  # the same switch, as numbers have no width
        host("s0a", "s1", "0", "node0"),
        host("s1"),
        host("s1", "0"),
        host("s1", "9" * 5000),  # from another host: never converted
        host(),
    ]
    for seed in range(20):
        mixed = random.Random(seed).sample(ordered, len(ordered))
        assert sorted(mixed, key=sort_key) == ordered


def test_hosts_of_one_place_keep_their_order() -> None:
    twins = [HostInfo(id=name, topology=("r1", "7")) for name in "cab"]
    assert sorted(twins, key=sort_key) == twins
    unknown = [HostInfo(id=name) for name in "cab"]
    assert sorted(unknown, key=sort_key) == unknown


def test_how_near_two_hosts_are() -> None:
    one = host("s0", "s1", "3", "n3")
    assert nearness(one, host("s0", "s1", "3", "n3")) == 4
    assert nearness(one, host("s0", "s1", "4", "n3")) == 2
    assert nearness(one, host("s1", "s1", "3", "n3")) == 0
    assert nearness(one, host("s0")) == nearness(host("s0"), one) == 1
    assert nearness(host(), host()) == 0


# ----------------------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("variables", "levels"),
    [
        ({}, None),
        # Slurm without a topology plugin names the node alone, whose name may have dots.
        (
            {
                "SLURM_TOPOLOGY_ADDR": "c.example.org",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
                "SLURM_PROCID": "3",
            },
            ("3",),
        ),
        (
            {
                "SLURM_TOPOLOGY_ADDR": "s0.s4.s8.c.example.org",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node",
                "SLURM_PROCID": "12",
            },
            ("s0", "s4", "s8", "12"),
        ),
        ({"JOB_COMPLETION_INDEX": "0"}, ("0",)),
        ({"JOB_COMPLETION_INDEX": "2", "OUTLAST_TOPOLOGY": ""}, ("2",)),  # a pod without the label
        ({"JOB_COMPLETION_INDEX": "2", "OUTLAST_TOPOLOGY": "eu-1/r-3"}, ("eu-1", "r-3", "2")),
        ({"OUTLAST_TOPOLOGY": " rack3.switch 12 "}, ("rack3", "switch", "12")),
        (
            {
                "OUTLAST_TOPOLOGY": "mine",
                "SLURM_TOPOLOGY_ADDR": "s0.n1",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
                "SLURM_PROCID": "1",
            },
            ("mine", "1"),
        ),
    ],
)
def test_what_the_environment_says(
    variables: dict[str, str], levels: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert own() == (() if levels is None else (*levels, ME))


def test_a_node_of_slurm_outside_of_a_step_is_below_no_switch() -> None:
    assert switches({}) == []
    assert switches({"SLURM_TOPOLOGY_ADDR": "n1"}) == []


# ----------------------------------------------------------------------------- a file


@pytest.mark.parametrize("line", [ME, ME.upper(), f"{ME}.example.org", "10.9.8.7"])
def test_the_line_of_this_host_in_a_file(line: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"# the first rack\nother1 slots=8\n\nother2 # spare\n  {line} slots=8\nlast\n")
    assert own(str(file), "10.9.8.7") == ("2", ME)


def test_an_address_of_an_interface_is_found_and_loopback_is_no_host(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    addresses = [
        each.address
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if name != "lo" and each.family == socket.AF_INET
    ]
    if addresses:
        file.write_text(f"other\n127.0.0.1\n{addresses[0]}\n")
        assert own(str(file)) == ("2", ME)
    file.write_text("other\n127.0.0.1\n::1\n")
    with pytest.raises(LaunchError, match="0 of the 3 hosts in this file are this one"):
        own(str(file))


def test_the_number_of_the_scheduler_follows_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "5")
    (tmp_path / "hosts").write_text(f"{ME}\n")
    assert own(str(tmp_path / "hosts")) == ("0", "5", ME)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("other\n", f"on host {ME}, 0 of the 1 hosts in this file are this one"),
        ("", "0 of the 0 hosts"),
        (f"{ME}\nother\n{ME}\n", "2 of the 3 hosts in this file are this one"),
        (f"{ME}.a.org\n{ME}.b.org\n", "2 of the 2 hosts"),
        ("\udcff", "can't decode byte"),
    ],
)
def test_a_file_that_does_not_say_it_is_an_error(text: str, error: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LaunchError, match=error) as caught:
        own(str(file))
    assert str(caught.value).startswith(f"--rank-order {file}: ")


# ----------------------------------------------------------------------------- a command


def test_the_output_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACK", "rack3")
    assert own("echo $RACK.switch12; echo noise >&2") == ("rack3", "switch12", ME)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "4")
    assert own(f"echo {'x' * 300} > /dev/null; echo a") == ("a", "4", ME)  # no name of a file


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("echo r1; exit 3", "the command has ended with exit code 3"),
        ("kill -9 $$", "exit code -9"),
        ("./no-such-file", r"exit code 127 \(no file has this name\)"),
        ("true", "has printed '', and it must print one line for this host"),
        ("echo ' . / '", "must print one line"),
        ("printf 'a\\nb\\n'", "must print one line"),
        ("head -c 257 /dev/zero | tr '\\0' x", "must print one line"),
    ],
)
def test_a_command_that_does_not_say_it_is_an_error(command: str, error: str) -> None:
    with pytest.raises(LaunchError, match=error) as caught:
        own(command)
    assert str(caught.value).startswith(f"--rank-order {command}: on host {ME}, ")


def test_a_command_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_order, "_LIMIT_S", 1.0)
    pids = tmp_path / "pids"
    with pytest.raises(LaunchError, match="has not ended within 1 s"):
        own(f"sleep 600 & echo $! $$ > {pids}; wait")
    for pid in map(int, pids.read_text().split()):
        gone(pid)


def gone(pid: int) -> None:
    """Waits until a process has ended; init may not have reaped it yet."""
    deadline = time.monotonic() + NET_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is alive"
        time.sleep(0.01)


# ----------------------------------------------------------------------------- launchers


@pytest.mark.slow
def test_ranks_follow_a_file_and_not_the_order_of_joining(tmp_path: Path) -> None:
    (tmp_path / "order").write_text("".join(f"{address(number)}\n" for number in (4, 2, 3)))
    with Hosts(tmp_path, WORKER, "--nnodes=3", "--rank-order=order") as hosts:
        two, three, four = hosts.start_all(3)
        workers = [run.ready(rank) for rank, run in enumerate((four, two, three))]
        found = [worker.env["OUTLAST_HOST_ADDR"] for worker in workers]
        assert found == [address(4), address(2), address(3)]
        assert {worker.env["OUTLAST_MASTER_ADDR"] for worker in workers} == {address(4)}
        for worker in workers:
            worker.succeed()
        assert [run.wait() for run in (two, three, four)] == [0, 0, 0]


@pytest.mark.slow
def test_the_nearest_spare_takes_the_place_of_a_lost_host(
    meet: Callable[..., Hosts],
) -> None:
    with meet("--nnodes=2", "--replacement-timeout=300") as hosts:
        place = {2: "r10.s1", 3: "r9.s2", 4: "r1.s2", 5: "r9.s1"}
        runs = [hosts.start(number, f"--rank-order=echo {place[number]}") for number in (2, 3)]
        last, first = runs
        last.until_said("ranks follow the network, where this host is at r10/s1/")
        survivor, lost = last.ready(1), first.ready(0)
        assert lost.env["OUTLAST_HOST_ADDR"] == address(3)
        last.set_job("running")
        far = hosts.start(4, f"--rank-order=echo {place[4]}")
        far.until_said("this one is a spare")
        near = hosts.start(5, f"--rank-order=echo {place[5]}")
        near.until_said("this one is a spare")
        first.process.send_signal(signal.SIGKILL)
        replacement = near.ready(0)
        assert replacement.env["OUTLAST_HOST_ADDR"] == address(5)
        last.set_job("completed")
        for worker in (survivor, replacement):
            worker.succeed()
        assert [run.wait() for run in (last, near, far)] == [0, 0, 0]


@pytest.mark.slow
def test_a_launcher_without_the_order_is_refused_by_the_others(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2") as hosts:
        one = hosts.start(2, "--rank-order=echo r1")
        one.until_said("leads the hosts")
        two = hosts.start(3)
        assert two.wait() == 1
        assert "--rank-order differs between the hosts of this run" in two.err
        one.process.send_signal(signal.SIGTERM)
        assert one.wait() == 143


def test_a_launcher_whose_command_fails_says_why_and_joins_nothing(tmp_path: Path) -> None:
    with Hosts(tmp_path, WORKER, "--nnodes=2") as hosts:
        run = hosts.start(2, "--rank-order=echo no topology here >&2; exit 4")
        assert run.wait() == 1
        assert "no topology here" in run.err
        assert f"on host {ME}, the command has ended with exit code 4" in run.err
        assert "Traceback" not in run.err


def test_a_signal_ends_a_launcher_and_its_command(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with Hosts(tmp_path, WORKER, "--nnodes=2") as hosts:
        run = hosts.start(2, f"--rank-order=echo $$ > {pid}.new; mv {pid}.new {pid}; sleep 600")
        deadline = time.monotonic() + NET_S
        while not pid.exists():
            assert time.monotonic() < deadline, run.err
            time.sleep(0.01)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143
        gone(int(pid.read_text()))
