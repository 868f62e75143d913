"""The page of a rank's progress, as `outlast top` reads it in another process."""

from __future__ import annotations

import os
import subprocess
import sys

from outlast.inprocess.monitor.shared_page import SharedPage
from outlast.metrics.progress_page import read_progress

READS = """
import sys
from outlast.metrics.progress_page import read_progress
page = read_progress(int(sys.argv[1]))
print(page.iteration, page.pings, page.step, page.progress)
"""


def test_another_process_reads_the_page() -> None:
    page = SharedPage()
    try:
        page.iteration, page.pings, page.step, page.progress = 3, 70, 1234, 56.5
        command = [sys.executable, "-c", READS, str(os.getpid())]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert result.stdout.split() == ["3", "70", "1234", "56.5"]
    finally:
        page.close()
    assert read_progress(os.getpid()) is None


def test_a_process_that_has_ended_has_none() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert read_progress(ended.pid) is None
