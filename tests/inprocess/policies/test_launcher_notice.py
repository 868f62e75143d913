"""The record of a job that another version has written is replaced, not read for ever."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.coordination.job_record import JOB_KEY, CallRecord, JobState
from outlast.inprocess.recovery.launcher_notice import LauncherNotice


class Held:
    def __init__(self, value: bytes) -> None:
        self.value = value

    def claim(self, key: str, value: bytes) -> bytes:
        assert key == JOB_KEY
        return self.value

    def compare_set(self, key: str, before: bytes, after: bytes) -> bytes:
        assert key == JOB_KEY
        if self.value == before:
            self.value = after
        return self.value


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "value",
    [b"not JSON", b"[]", b'{"call":0,"state":"running","prefix":"a/0/","more":1}', b'{"call": 0}'],
)
def test_a_record_of_another_form_is_replaced(value: bytes) -> None:
    store: Any = Held(value)
    notice = LauncherNotice(store, 1, "a/1/", process="host/7")
    notice.running()
    assert CallRecord.parse(store.value) == CallRecord(JobState.RUNNING, "a/1/")
    notice.aborted(reports=True)
    assert CallRecord.parse(store.value) == CallRecord(JobState.ABORTED, "a/1/", "host/7")
    notice.running()
    assert CallRecord.parse(store.value).state is JobState.ABORTED
