"""Calls of a save and of a restore fail; see `failing_calls`."""

from __future__ import annotations

import pytest

from torture.calls import why_not
from torture.runner import run_trial

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.slow,
]


@pytest.mark.parametrize("subject", ["save", "save-replaced", "save-recycled", "restore"])
@pytest.mark.exhaustive
def test_a_failing_call_is_told_and_loses_nothing(subject: str) -> None:
    report = run_trial(f"fail:{subject}", 0, 60.0, most=16)
    assert not report.violations, "\n".join(report.violations[:5])
    assert report.tried
