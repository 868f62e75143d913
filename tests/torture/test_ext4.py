"""The journal of a real ext4 is abandoned in the middle of saves; see `ext4`."""

from __future__ import annotations

import pytest

from torture import calls, ext4
from torture.runner import run_trial

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_what_was_committed_survives_the_loss_of_the_journal() -> None:
    if why := calls.why_not() or ext4.why_not():
        pytest.skip(why)
    report = run_trial("ext4:checkpointer", 0, 60.0, most=4)
    assert not report.violations, "\n".join(report.violations)
    assert report.tried
