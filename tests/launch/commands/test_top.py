"""`outlast top` on a terminal, and its errors."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from metrics.replay import Logs, eventful_run
from outlast.launch.cli import app
from procs import NET_S


def read_until(terminal: int, text: str) -> str:
    """What the program writes to the terminal up to `text`."""
    found, deadline = "", time.monotonic() + NET_S
    while text not in found:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, found
        try:
            found += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the program has closed the terminal
            raise AssertionError(f"{text!r} is not in {found!r}") from None
    return found


def test_q_ends_it_and_the_terminal_is_as_before(tmp_path: Path) -> None:
    logs = Logs(tmp_path / "run")
    # On another host, so that it is not known to have ended.
    logs.write(event for event in eventful_run("elsewhere") if event.time < 140)
    terminal, program = pty.openpty()
    try:
        before = termios.tcgetattr(program)
        command = [sys.executable, "-m", "outlast.launch", "top", str(logs.folder)]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        with subprocess.Popen(
            command, env=env, stdin=program, stdout=program, stderr=program
        ) as process:
            read_until(terminal, "last fault")
            assert termios.tcgetattr(program) != before
            os.write(terminal, b"q")
            assert process.wait(NET_S) == 0
        assert termios.tcgetattr(program) == before
    finally:
        os.close(terminal)
        os.close(program)


def test_a_folder_without_logs_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["top", str(tmp_path)])
    assert result.exit_code == 1
    assert "has no event logs" in result.output


def test_metrics_need_somewhere_to_go(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["metrics", str(tmp_path)])
    assert result.exit_code == 2
    assert "--port or --opentelemetry" in result.output


@pytest.mark.parametrize(
    ("options", "package", "extra"),
    [
        (["--port", "0"], "prometheus_client", "prometheus"),
        (["--opentelemetry"], "opentelemetry.sdk", "opentelemetry"),
    ],
)
def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    result = CliRunner().invoke(app, ["metrics", str(tmp_path), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"pip install 'outlast[{extra}]'" in result.output
