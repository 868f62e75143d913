"""The meetings of the ranks before the steps of the optimizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import MemoryStore
from outlast.elastic.job.live import meeting
from outlast.elastic.job.live.meeting import Meeting


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


@pytest.fixture
def meetings() -> list[Meeting]:
    store = MemoryStore()
    return [Meeting(CallLedger(store, "meeting", rank, 2), [optimizer()]) for rank in range(2)]


def test_no_rank_goes_on_before_all_have_come(meetings: list[Meeting]) -> None:
    first, second = meetings
    with ThreadPoolExecutor(1) as pool:
        for step in (1, 2):
            waits = pool.submit(first.attend, step)
            with pytest.raises(TimeoutError):
                waits.result(0.05)
            second.attend(step)
            waits.result()
            second.attend(step)  # by another optimizer in the same step


def test_a_program_whose_ranks_do_not_come_together_goes_on_without(
    meetings: list[Meeting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second rank receives what the first one sends after its step."""
    monkeypatch.setattr(meeting, "_FIRST_S", 0.01)
    first, second = (Meeting(each._ledger, []) for each in meetings)
    for step in range(1, 5):
        first.attend(step)
        second.attend(step)
    assert caplog.messages == 2 * [
        "not all ranks had the gradients of step 3 within 0.01 s, as in earlier steps: they do not "
        "wait for each other any more, and after a fault that comes when only some have made a "
        "step, a checkpoint is loaded"
    ]


def test_an_optimizer_of_one_rank_alone_is_none_of_the_job() -> None:
    own = optimizer()
    meeting = Meeting(CallLedger(MemoryStore(), "meeting", 0, 2), [own])
    assert meeting.is_for(own)
    assert not meeting.is_for(optimizer())
