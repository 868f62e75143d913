"""The checks of a host, in real processes, and real faults that they find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from launch.runs import Run, ends
from outlast.errors import HostUnfit
from outlast.launch.config.from_options import job_from_options
from outlast.launch.config.job_spec import HealthSpec
from outlast.launch.config.options import RunOptions
from outlast.launch.health import device_checks
from outlast.launch.health.host_check import check_host
from procs import NET_S

OFF = HealthSpec(level="off", folder="/", free_bytes=0, command="", limit_s=NET_S)


def unfit(**changes: Any) -> str:
    """Why the host is refused, with these checks."""
    with pytest.raises(HostUnfit) as e:
        check_host(dataclasses.replace(OFF, **changes), print)
    return str(e.value)


def test_a_healthy_host_has_its_figures(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "new"
    spec = dataclasses.replace(OFF, level="quick", folder=str(folder), command="exit 0")
    check_host(spec, said.append)
    (line,) = said
    for part in ("memory copied at ", "/dev/shm written at ", f"{folder} written at "):
        assert part in line
    assert line.endswith("the command found it healthy")
    assert list(folder.iterdir()) == []


def test_a_disk_without_room(small_disk: Path) -> None:
    quick = {"level": "quick", "folder": str(small_disk)}
    assert f"{small_disk}: [Errno 28] No space left on device" in unfit(**quick)
    assert list(small_disk.iterdir()) == []
    told = f"{small_disk}: 1.0 MB are free, less than the 2.0 MB of --health-free"
    assert told in unfit(**quick, free_bytes=2_000_000)


def test_a_command_that_fails_is_named_with_its_output() -> None:
    told = unfit(command="echo xid 79 on GPU 3 >&2; exit 7")
    what = "--health-command echo xid 79 on GPU 3 >&2; exit 7"
    assert f"{what}: exit code 7, and its last output: xid 79 on GPU 3. Repair" in told


@pytest.mark.slow
def test_a_check_that_hangs_has_failed_and_nothing_is_left(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    told = unfit(command=f"sleep 1000 & echo $! > {pid}; wait", limit_s=5.0)
    assert "--health-command" in told
    assert "has not ended within 5 s (--health-timeout)" in told
    assert ends(int(pid.read_text()))


def test_what_a_command_leaves_running_is_not_waited_for(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    check_host(dataclasses.replace(OFF, command=f"sleep 1000 & echo $! > {pid}"), print)
    assert ends(int(pid.read_text()))


def test_a_check_that_kills_its_process_has_failed() -> None:
    assert "--health-command kill -9 $PPID: its process was killed by SIGKILL" in unfit(
        command="kill -9 $PPID"
    )


@pytest.mark.slow
def test_the_launcher_starts_no_worker_on_a_host_that_is_not_healthy(tmp_path: Path) -> None:
    with Run(tmp_path, "print('ran')", "--health-command=exit 1") as run:
        assert run.wait() == 69
    assert "ran" not in run.out
    assert "is not healthy, and runs no ranks: --health-command exit 1: exit code 1" in run.err


def test_a_launcher_that_is_killed_leaves_no_check(tmp_path: Path) -> None:
    # Its own output is kept for the error.
    with Run(tmp_path, "", "--health-command=echo begun > /proc/$PPID/fd/2; sleep 1000") as run:
        run.until_said("begun")
        run.process.kill()


@pytest.mark.slow
def test_full_checks_multiply_on_every_device() -> None:
    said: list[str] = []
    check_host(dataclasses.replace(OFF, level="full", folder="/tmp"), said.append)
    for device in device_checks.devices():
        assert f"; {device}: products exact, memory copied at " in said[0]


class Faulty(TorchFunctionMode):
    """A device that computes products of floats wrongly: from the product `first` on, one element
    has another last bit.
    """

    def __init__(self, first: int) -> None:
        self.left = first

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ == "matmul" and result.is_floating_point():
            self.left -= 1
            if self.left < 0:
                result[17, 3] += 1
        return result


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (0, "a product of matrices of torch.float32 is wrong"),
        (2, "3 elements of 4 equal products of torch.float32 differ"),
    ],
)
def test_a_device_that_computes_wrongly(first: int, told: str) -> None:
    with Faulty(first), pytest.raises(RuntimeError, match=told):
        device_checks.check_products("cpu", torch.float32, 512, largest=8)


def test_products_of_bfloat16_are_exact_too() -> None:
    device_checks.check_products("cpu", torch.bfloat16, 256, largest=1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"health_check": "fast"}, "--health-check fast: must be off, quick or full"),
        ({"health_check": "full", "health_timeout": 0.0}, "--health-timeout 0: must be a positive"),
        ({"health_check": "quick", "health_free": -1.0}, "--health-free -1: must be a number of"),
        ({"health_command": " "}, "--health-command: must not be empty"),
        ({"health_interval": 9.0, "nnodes": "2", "rdzv_endpoint": "h"}, "no --health-command"),
        ({"health_interval": 9.0, "health_command": "true"}, "with --nnodes 1 no other host"),
        ({"health_folder": Path("x")}, "--health-folder: no folder is checked without"),
        ({"health_free": 2.0}, "--health-free: no folder is checked without"),
        (
            {"health_folder": Path("x"), "health_command": "true"},
            "--health-folder: no folder is checked without",
        ),
    ],
)
def test_options_are_checked(options: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        job_from_options(RunOptions(script=__file__, **options))


def test_the_folder_is_that_of_the_logs() -> None:
    def folder(**options: Any) -> str:
        spec = job_from_options(RunOptions(script=__file__, health_check="quick", **options)).health
        assert spec is not None
        return spec.folder

    logs, own = Path("/logs"), Path("/checkpoints")
    assert folder(log_dir=logs) == folder(events_dir=logs) == "/logs"
    assert folder(log_dir=logs, health_folder=own) == "/checkpoints"
