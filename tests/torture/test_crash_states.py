"""Every legal state of the disk after a power loss is restored; see `crash_states`."""

from __future__ import annotations

import pytest

from torture.calls import why_not
from torture.runner import run_trial

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.slow
@pytest.mark.parametrize(
    "subject",
    [
        "checkpointer-first",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("checkpointer-replaced", "two-ranks", "job", "record", "lightning-last")
        ),
        *(
            pytest.param(name, marks=[pytest.mark.slow, pytest.mark.exhaustive])
            for name in (
                "checkpointer",
                "checkpointer-recycled",
                "states",
                "state-file",
                "lightning-epochs",
            )
        ),
    ],
)
def test_what_was_committed_is_found(subject: str) -> None:
    report = run_trial(f"crash:{subject}", 0, 20.0, most=400)
    assert not report.violations, "\n".join(report.violations[:5])
    assert report.tried
