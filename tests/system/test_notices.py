"""Where a notice goes: to the program's handlers, or to stderr if it has none."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from outlast.system.notices import notice


@pytest.mark.parametrize(
    ("configuration", "shown", "expected"),
    [
        ("", True, "restored step 3\n"),
        ("", False, ""),
        ("logging.getLogger('outlast').setLevel(logging.ERROR)", True, ""),
        ("logging.disable()", True, ""),
        ("logging.getLogger('outlast').setLevel(logging.INFO)", True, "restored step 3\n"),
        ("logging.basicConfig(level=logging.INFO)", True, "INFO:outlast.x:restored step 3\n"),
        ("logging.basicConfig(level=logging.INFO)", False, "INFO:outlast.x:restored step 3\n"),
        ("logging.basicConfig()", True, ""),
    ],
)
def test_a_notice_on_stderr(configuration: str, shown: bool, expected: str) -> None:
    program = f"""
import logging
from outlast.system.notices import notice
{configuration}
notice(logging.getLogger("outlast.x"), "restored step %d", 3, shown={shown})
assert not logging.getLogger("outlast").handlers
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stderr == expected


def test_a_notice_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    notice(logging.getLogger("outlast.x"), "continuing after step %d", 3)
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.INFO, "continuing after step 3")
