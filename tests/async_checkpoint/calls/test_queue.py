"""`AsyncCallsQueue` in one process, with both kinds of background process."""

from __future__ import annotations

import datetime
import gc
import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_checkpoint.calls import work
from async_checkpoint.calls.work import Gate
from outlast.async_checkpoint import AsyncCallsQueue, AsyncRequest, FailurePolicy
from outlast.errors import AsyncCallError

KINDS = {"fork": False, "persistent": True}
Make = Callable[..., AsyncCallsQueue]


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    queues: list[AsyncCallsQueue] = []

    def make(**options: Any) -> AsyncCallsQueue:
        # Normal priority: other work on this machine would delay the test.
        queues.append(AsyncCallsQueue(KINDS[request.param], **{"nice": 0, **options}))
        return queues[-1]

    yield make
    for queue in queues:
        queue.abort()


def request_of(
    fn: Callable[..., Any] | None, *args: Any, then: Callable[[], Any] | None = None
) -> AsyncRequest:
    return AsyncRequest(fn, args, [] if then is None else [then])


def test_calls_are_finalized_once_in_order(make: Make, tmp_path: Path) -> None:
    queue, finalized = make(), []
    for i in range(3):
        request = request_of(work.write, tmp_path / str(i), str(i))
        request.add_finalize_fn(lambda i=i: finalized.append((i, (tmp_path / str(i)).read_text())))
        request.add_finalize_fn(lambda i=i: finalized.append((i, "second")))
        assert queue.schedule_async_request(request) == i
    assert queue.get_num_unfinalized_calls() == 3
    assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1, 2]
    assert finalized == [(i, text) for i in range(3) for text in (str(i), "second")]
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.get_num_unfinalized_calls() == 0
    queue.close()
    assert len(finalized) == 6


def test_keyword_arguments_arrive(make: Make, tmp_path: Path) -> None:
    queue = make()
    kwargs = {"path": tmp_path / "a", "text": "b"}
    queue.schedule_async_request(AsyncRequest(work.write, (), [], kwargs))
    queue.close()
    assert (tmp_path / "a").read_text() == "b"


def test_a_look_does_not_wait_and_the_arguments_are_as_they_were(
    make: Make, tmp_path: Path
) -> None:
    queue, gate, values = make(), Gate(tmp_path), ["as", "scheduled"]
    queue.schedule_async_request(request_of(work.wait_then_write, gate, tmp_path / "out", values))
    values[:] = ["changed", "later"]
    gate.arrived()
    assert queue.maybe_finalize_async_calls() == []
    assert queue.maybe_finalize_async_calls(no_dist=False) == []
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=False) == [0]
    assert (tmp_path / "out").read_text() == "as scheduled"


def test_a_tensor_is_as_it_was(make: Make, tmp_path: Path) -> None:
    # Large: computing with it needs a thread pool, which does not exist after a fork.
    torch.ones(1 << 21).sum()
    queue, tensor = make(), torch.ones(1 << 21)
    queue.schedule_async_request(request_of(work.total, tensor, tmp_path / "out"))
    tensor.zero_()
    queue.close()
    assert float((tmp_path / "out").read_text()) == 1 << 21


@pytest.mark.parametrize("how", work.CAUSES)
def test_a_failed_call_is_raised_and_not_finalized_and_later_ones_go_on(
    make: Make, tmp_path: Path, how: str
) -> None:
    queue, finalized = make(), []
    queue.schedule_async_request(request_of(work.end_by, how, then=lambda: finalized.append(0)))
    queue.schedule_async_request(
        request_of(work.write, tmp_path / "x", "", then=lambda: finalized.append(1))
    )
    with pytest.raises(AsyncCallError) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    text = str(caught.value)
    assert "background call 0 (async_checkpoint.calls.work.end_by) failed on rank 0 on " in text
    assert work.CAUSES[how] in text
    assert ("in end_by" in text) == (how not in ("os._exit", "kill")), "the remote traceback"
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert finalized == [1]
    assert (tmp_path / "x").exists()
    queue.close()


def test_exit_code_0_is_success(make: Make) -> None:
    queue = make()
    queue.schedule_async_request(request_of(work.end_by, "exit 0"))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_close_raises_what_failed_and_finalizes_the_rest(make: Make, tmp_path: Path) -> None:
    queue, finalized = make(), []
    queue.schedule_async_request(request_of(work.end_by, "exception"))
    queue.schedule_async_request(
        request_of(work.write, tmp_path / "x", "", then=lambda: finalized.append(1))
    )
    with pytest.raises(AsyncCallError, match="full of ideas"):
        queue.close()
    assert finalized == [1]
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.schedule_async_request(request_of(None))


def test_a_finalize_function_that_raises(make: Make, tmp_path: Path) -> None:
    queue, ran = make(), []

    def bad() -> None:
        raise KeyError("nowhere")

    first = request_of(work.write, tmp_path / "x", "", then=bad)
    first.add_finalize_fn(lambda: ran.append("behind it"))
    queue.schedule_async_request(first)
    queue.schedule_async_request(request_of(None, then=lambda: ran.append("later call")))
    with pytest.raises(AsyncCallError, match=r"finalize function .*bad of background call 0") as e:
        queue.maybe_finalize_async_calls(blocking=True)
    assert isinstance(e.value.__cause__, KeyError)
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert ran == ["later call"]


def test_no_function_is_a_call_too(make: Make) -> None:
    queue, ran = make(), []
    assert queue.schedule_async_request(request_of(None, then=lambda: ran.append(0))) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert ran == [0]


def test_functions_added_after_scheduling_are_not_called(make: Make) -> None:
    queue, ran = make(), []
    request = request_of(None)
    queue.schedule_async_request(request)
    request.add_finalize_fn(lambda: ran.append("late"))
    queue.close()
    assert ran == []


def test_back_pressure_waits_for_the_oldest(make: Make, tmp_path: Path) -> None:
    queue, finalized = make(max_unfinalized=1), []
    for i in range(4):
        queue.schedule_async_request(
            request_of(work.write, tmp_path / str(i), "", then=lambda i=i: finalized.append(i))
        )
        assert queue.get_num_unfinalized_calls() == 1
        assert finalized == list(range(i))
    queue.close()


def test_a_failure_that_scheduling_meets_is_raised_at_the_next_check(make: Make) -> None:
    queue = make(max_unfinalized=1)
    queue.schedule_async_request(request_of(work.end_by, "exception"))
    assert queue.schedule_async_request(request_of(None)) == 1
    with pytest.raises(AsyncCallError, match="background call 0"):
        queue.maybe_finalize_async_calls()
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]


def test_a_policy_lets_failures_pass_but_not_for_ever(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    policy = FailurePolicy(max_in_a_row=2)
    queue = make(on_failure=policy)
    hows = ["exception", "exit", "exit 0", "exit", "exit", "exception"]
    for how in hows:
        queue.schedule_async_request(request_of(work.end_by, how))
    with caplog.at_level(logging.WARNING), pytest.raises(AsyncCallError, match="ideas"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert (policy.failures, policy.in_a_row) == (5, 3)
    assert len(caplog.records) == 4
    assert "failure 2 of at most 2 in a row" in caplog.text
    queue.close()


def test_close_has_a_time_limit(make: Make, tmp_path: Path) -> None:
    queue, gate, ran = make(), Gate(tmp_path), []
    queue.schedule_async_request(request_of(None, then=lambda: ran.append(0)))
    request = request_of(
        work.wait_then_write, gate, tmp_path / "out", [], then=lambda: ran.append(1)
    )
    queue.schedule_async_request(request)
    pid = gate.arrived()
    with pytest.raises(AsyncCallError, match=r"call 1 .* not finished within the 0:00:00\.0"):
        queue.close(timeout=datetime.timedelta(milliseconds=10))
    assert ran == [0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_abort_in_another_thread_ends_a_check_that_waits(make: Make, tmp_path: Path) -> None:
    queue, gate = make(), Gate(tmp_path)
    for _ in range(2):
        queue.schedule_async_request(request_of(work.wait_then_write, gate, tmp_path / "o", []))
    gate.arrived()
    timer = threading.Timer(0.2, queue.abort)
    timer.start()
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == []
    timer.join()


def test_abort_kills_and_drops(make: Make, tmp_path: Path) -> None:
    queue, gate, ran = make(), Gate(tmp_path), []
    for _ in range(2):
        queue.schedule_async_request(
            request_of(work.wait_then_write, gate, tmp_path / "o", [], then=lambda: ran.append(1))
        )
    gate.arrived()
    reporter = queue._reporter
    assert reporter is not None
    queue.abort()
    queue.abort()
    queue.close()
    assert reporter.join(60.0)
    assert queue.get_num_unfinalized_calls() == 0
    assert queue.maybe_finalize_async_calls() == []
    assert ran == []
    assert not (tmp_path / "o").exists()


def test_a_block_that_raises_aborts_and_one_that_does_not_closes(
    make: Make, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with pytest.raises(KeyError), make() as queue:
        queue.schedule_async_request(request_of(work.wait_then_write, gate, tmp_path / "o", []))
        gate.arrived()
        raise KeyError
    with make() as queue:
        queue.schedule_async_request(request_of(work.write, tmp_path / "p", "1"))
    assert (tmp_path / "p").read_text() == "1"


def test_a_blocking_wait_can_be_interrupted(make: Make, tmp_path: Path) -> None:
    queue, gate = make(), Gate(tmp_path)
    queue.schedule_async_request(request_of(work.wait_then_write, gate, tmp_path / "o", []))

    interrupted = threading.Event()

    def take(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def interrupt() -> None:
        gate.arrived()
        # Python checks for signals, then waits in C: a signal that arrives in between is handled
        # only with the next one.
        while not interrupted.wait(0.5):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, take)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        queue.maybe_finalize_async_calls(blocking=True)
        pytest.fail("not interrupted")
    thread.join()
    signal.signal(signal.SIGINT, before)
    gate.open()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]


def test_a_queue_that_nobody_closed_leaves_nothing(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    gate = Gate(tmp_path)
    queue = AsyncCallsQueue(KINDS[request.node.callspec.params["make"]])
    queue.schedule_async_request(request_of(work.wait_then_write, gate, tmp_path / "o", []))
    gate.arrived()
    with caplog.at_level(logging.WARNING):
        del queue
        gc.collect()
    assert "call" in caplog.text
    assert "never closed" in caplog.text


def test_the_background_is_quiet(make: Make, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        queue = make(nice=12)
        queue.schedule_async_request(request_of(work.facts, tmp_path / "facts"))
        queue.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    found = json.loads((tmp_path / "facts").read_text())
    assert found["pid"] != os.getpid() == found["parent"]
    assert found["nice"] >= 12
    assert not found["inherited"]
    assert found["interrupt"]
    assert found["threads"] in (1, None)


def test_nothing_starts_before_the_first_call(make: Make) -> None:
    threads = threading.active_count()
    queue = make()
    assert queue.maybe_finalize_async_calls(blocking=True) == []
    assert queue.get_num_unfinalized_calls() == 0
    assert threading.active_count() == threads
    queue.close()


@pytest.mark.parametrize(
    "options", [{"max_unfinalized": 0}, {"on_failure": "ignore"}, {"on_failure": None}]
)
def test_misuse_is_told(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make(**options)


def test_a_policy_is_not_negative() -> None:
    with pytest.raises(ValueError, match="max_in_a_row"):
        FailurePolicy(-1)
