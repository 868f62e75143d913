"""A short part of the torture of hosts, see `torture.hosts`; `make torture` has the long one."""

from __future__ import annotations

import pytest

from torture.calls import why_not
from torture.runner import replay, run_trial

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.slow,
]


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize("name", ["safety", "liveness", "jobs"])
def test_no_history_has_what_is_not_allowed(name: str) -> None:
    seconds_of_faults = 8
    report = run_trial(f"hosts:{name}", 0, 1.0, most=seconds_of_faults)
    found = "\n".join([*report.violations, f"replay: {replay(report, seconds_of_faults)}"])
    assert not report.violations, found
    assert report.tried
