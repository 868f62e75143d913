"""The help of every command is readable on a terminal of 80 columns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import outlast
from outlast.launch.cli import app
from outlast.launch.config.options import RunOptions

COLUMNS = 80
HIDDEN = {
    *("--backoff", "--role", "--master-addr", "--master-port", "--local-addr", "--metrics-host"),
    *("--standalone", "--start-method", "--monitor-interval"),
}


def commands(group: object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


ALL = list(commands(typer.main.get_command(app)))


def help_of(*path: str) -> str:
    done = CliRunner(env={"COLUMNS": str(COLUMNS)}).invoke(app, [*path, "--help"])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_it_fits_and_no_line_is_cut_or_broken_early(path: tuple[str, ...]) -> None:
    lines = help_of(*path).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    assert not [line for line in lines if "…" in line]
    # A line of a paragraph ends because the next word does not fit, or the paragraph is over.
    texts = [line.strip(" │") for line in lines]
    for line, text, following in zip(lines, texts, texts[1:], strict=False):
        if following and text and line.startswith(" ") and not line.startswith(" Usage"):
            word = following.split()[0]
            assert len(line.rstrip()) + 1 + len(word) > COLUMNS - 1, (line, following)


def test_the_list_of_commands_has_whole_sentences() -> None:
    assert "Show a running job." in help_of()
    assert "q ends it before" not in help_of()
    assert "q ends it before" in help_of("top")


def test_rare_options_are_accepted_but_not_listed() -> None:
    shown = help_of("run")
    names = {f"--{name.replace('_', '-')}" for name in RunOptions.__dataclass_fields__}
    listed = set(re.findall(r"--[a-z-]+", shown.partition("─ The job ─")[2]))
    assert names - {"--script", "--args"} - listed == HIDDEN
    for panel in ("The job", "Faults", "Output and events", "Many hosts"):
        assert f"─ {panel} ─" in shown


def test_the_command_itself_uses_the_width_of_the_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "outlast.launch", "run", "--help"],
        env={**os.environ, "COLUMNS": str(COLUMNS)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert max(map(len, done.stdout.splitlines())) <= COLUMNS


def test_a_package_in_an_archive_is_refused(tmp_path: Path) -> None:
    """Launcher and standbys are files that a Python runs."""
    folder = Path(outlast.__file__).parent
    archive = shutil.make_archive(str(tmp_path / "o"), "zip", folder.parent, folder.name)
    done = subprocess.run(
        [sys.executable, "-m", "outlast.launch", "run", "script.py"],
        env={**os.environ, "PYTHONPATH": archive},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"outlast starts programs of its own, and cannot read them in {archive}/outlast: install it"
    ]
