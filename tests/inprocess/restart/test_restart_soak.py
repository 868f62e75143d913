"""R4: hundreds of restarts leak no resources, nor does the end of the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inprocess.job_output import errors, events
from procs import Job

MEMORY_BYTES = 32 << 20
"""What allocators may keep; a leak of one group per iteration exceeds it."""


@pytest.mark.parametrize("restarts", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_restarts_leave_nothing_behind(ranks: Callable[..., Job], restarts: int) -> None:
    with ranks("soak", "many_restarts", str(restarts)) as job:
        job.start_all()
        assert job.wait_all(150) == {0: 0, 1: 0}, errors(job)[-4000:]
        for rank in (0, 1):
            early, middle, late = events(job, rank, "held")
            for name in ("threads", "descriptors", "children", "handlers"):
                assert late[name] == early[name], name
            assert late["native_threads"] <= min(early["native_threads"], middle["native_threads"])
            assert late["resident"] - early["resident"] < MEMORY_BYTES
            (ended,) = events(job, rank, "ended")
            before, after = ended["threads"]
            assert after == before
            assert ended["children"] == 0
            assert ended["handler"]
            before, after = ended["descriptors"]
            assert after <= before + 10  # libuv's own, never closed: see conftest.py
