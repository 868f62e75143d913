"""Which faults are equal, what counts as progress, and when the job ends."""

from __future__ import annotations

import bdb
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from outlast.coordination.repeated_faults import (
    FaultHistory,
    RepeatedFaults,
    add_fault,
    signature_of,
)
from outlast.errors import CheckpointError, CheckpointMismatch, FolderInUse, FolderUnusable
from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import describe_restarts
from outlast.inprocess import Wrapper
from outlast.inprocess.environment import Launch
from outlast.inprocess.initialize import RetryController
from outlast.inprocess.interruption.error_kinds import (
    ALWAYS,
    AT_START,
    is_mistake,
    permanence,
)
from outlast.system.arguments import check_int

POLICY = RepeatedFaults(max_equal=3, backoff=1, max_backoff=3)


def fault(cause: str = "ValueError: bad", **changes: Any) -> FaultRecord:
    made = FaultRecord(0, 0, 0, "host", 1, "EXCEPTION", cause, where="train.py:3 in train")
    return dataclasses.replace(made, **changes)


def after(faults: Sequence[FaultRecord | None], policy: RepeatedFaults = POLICY) -> FaultHistory:
    """The history after iterations with these first causes; as read from the store."""
    history = FaultHistory()
    for each in faults:
        assert not history.stop, "the job goes on after it has ended"
        step, pinged = (0, False) if each is None else (each.step, each.pings > 0)
        made = add_fault(history, each, step, pinged, policy)
        history = msgspec.json.decode(msgspec.json.encode(made), type=FaultHistory)
        assert history == made
    return history


def test_without_steps_and_pings_only_a_crash_loop_is_known_to_make_no_progress() -> None:
    assert not after([fault(ran=3600.0)] * 50).stop
    assert not after([fault(), fault(), fault(ran=3600.0), fault()]).stop
    assert after([fault(ran=3600.0), fault(), fault(ran=9.0)]).stop
    assert after([fault(ran=3600.0, pings=7)] * 3).stop
    assert after([fault(ran=3600.0, step=7)] * 3).stop


def test_the_third_equal_fault_ends_the_job_and_the_pause_grows() -> None:
    assert after([fault()]).pause == 0.0
    assert after([fault()] * 2).pause == 1.0
    ended = after([fault()] * 3)
    assert ended.stop == "3 equal faults without progress in between"
    assert ended.cause == fault()
    forever = dataclasses.replace(POLICY, max_equal=100)
    assert [after([fault()] * n, forever).pause for n in (3, 4, 50)] == [2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (fault("ValueError: 3 of 0xab"), fault("ValueError: 44 of 0xcd"), True),
        (
            fault("CheckpointError: .tmp-step-1-609ddd58120000000001 lacks x"),
            fault("CheckpointError: .tmp-step-1-6f9c1da8120000000001 lacks x"),
            True,
        ),
        (fault(rank=0), fault(rank=5, host="another", member=9), True),
        (fault(), fault("TypeError: bad"), False),
        (fault(), fault("ValueError: worse"), False),
        (fault(), fault(where="train.py:4 in train"), False),
        (fault(), fault(interruption="SOFT_TIMEOUT"), False),
    ],
)
def test_which_exceptions_are_equal(one: FaultRecord, other: FaultRecord, equal: bool) -> None:
    assert (signature_of(one) == signature_of(other)) is equal


def test_the_end_of_a_process_is_equal_only_at_the_same_known_place() -> None:
    killed = fault("process 7 ended", interruption="TERMINATED", where="")
    assert not after([killed] * 20).stop  # the launcher limits replacements
    at = dataclasses.replace(killed, pings=9)
    assert after([at] * 3).stop
    assert not after(
        [at, at, dataclasses.replace(at, rank=1), dataclasses.replace(at, pings=4)]
    ).stop
    later = [dataclasses.replace(killed, step=n, pings=9) for n in range(1, 20)]
    assert not after(later).stop


def test_faults_in_turn_are_counted_each_until_there_is_progress() -> None:
    one, two = fault("ValueError: one", step=5), fault("ValueError: two", step=5)
    assert after([one, two, one, two, one]).stop
    further = dataclasses.replace(two, step=6)
    assert not after([one, two, one, further, one, one]).stop


def test_steps_repeated_from_a_checkpoint_are_no_progress() -> None:
    assert after([fault(step=9, pings=n) for n in (9, 4, 4)]).stop
    assert after([fault(step=n) for n in (9, 8, 3)]).stop
    assert not after([fault(step=n) for n in range(1, 50)]).stop


def test_without_steps_the_pings_tell_how_far_it_got() -> None:
    assert after([fault(pings=n) for n in (150, 50, 50)]).stop  # there was a checkpoint at 100
    assert not after([fault(pings=n) for n in (150, 90, 40, 30, 20)]).stop  # at random times
    assert not after([fault(pings=n) for n in range(50)]).stop
    assert not after([fault(), None, fault()]).stop
    assert after([fault(), None, fault(), fault()]).stop  # a process that joins is no progress


def test_errors_in_the_program_end_the_job_only_before_it_has_trained() -> None:
    wrong = fault("NameError: x", permanent=AT_START)
    assert "before the first step or second ping" in after([wrong]).stop
    assert not after([fault(pings=3), wrong]).stop
    assert not after([dataclasses.replace(wrong, step=3)]).stop
    assert after([fault(pings=3), fault("CheckpointMismatch: x", permanent=ALWAYS)]).stop


def test_a_mistake_in_the_program_is_counted_over_any_progress() -> None:
    def mistake(step: int, **changes: Any) -> FaultRecord:
        return fault("KeyError: 'lr'", mistake=True, step=step, rank=step, **changes)

    ended = after([mistake(1), fault(step=2), mistake(3), None, mistake(5)])
    assert ended.cause == mistake(5)
    assert ended.stop == (
        "a mistake in the program that came back, 3 x KeyError at train.py:3: rank 1 after step 1, "
        "rank 3 after step 3, rank 5 after step 5"
    )
    elsewhere = [mistake(n, where=f"train.py:{n} in train") for n in range(1, 20)]
    assert not after(elsewhere).stop
    assert not after([fault(step=n) for n in range(1, 20)]).stop  # of the machine
    patient = dataclasses.replace(POLICY, max_mistakes=None)
    assert not after([mistake(n) for n in range(1, 20)], patient).stop


def test_restarts_are_counted_by_cause() -> None:
    faults = [fault(step=n, rank=n % 3) for n in range(1, 5)]
    faults += [fault("process 7 ended", interruption="TERMINATED", where="", step=6)]
    lost = fault("host h2 is lost", interruption="TERMINATED", where="", step=7)
    assert describe_restarts(after([*faults, None, lost]).restarts) == (
        "7 restarts: 4 x ValueError at train.py:3 (ranks 0, 1, 2), 1 x died (rank 0), "
        "1 x new ranks joined, 1 x host lost"
    )
    assert describe_restarts(after([fault()] * 3).restarts).startswith("2 restarts: ")
    many = after([fault(where=f"a.py:{n} in f", step=n) for n in range(1, 40)])
    assert describe_restarts(many.restarts).endswith(", 24 x other causes")


@pytest.mark.parametrize(
    ("error", "mistaken"),
    [
        *((kind("x"), True) for kind in (KeyError, TypeError, AttributeError, NameError)),
        *((kind("x"), True) for kind in (IndexError, ValueError, AssertionError)),
        *((kind("x"), True) for kind in (ZeroDivisionError, NotImplementedError)),
        *((kind("x"), False) for kind in (RuntimeError, OSError, ConnectionError, MemoryError)),
        *((kind("x"), False) for kind in (EOFError, TimeoutError, CheckpointError, FolderInUse)),
    ],
)
def test_which_exceptions_are_mistakes_in_the_program(error: Exception, mistaken: bool) -> None:
    assert is_mistake(error) is mistaken


def _raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - to look at it
        return error
    raise AssertionError("nothing was raised")


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: check_int("size", "3", at_least=0), ALWAYS),
        (lambda: Wrapper(soft_timeout=-1), ALWAYS),
        (lambda: _raise(CheckpointMismatch("shapes")), ALWAYS),
        (lambda: _raise(FolderUnusable("read-only")), ALWAYS),
        (lambda: _raise(bdb.BdbQuit()), ALWAYS),
        (lambda: _raise(FolderInUse("by another job")), AT_START),
        (lambda: _raise(CheckpointError("damaged")), ""),
        (lambda: _raise(ValueError("of the user")), ""),
        (lambda: _raise(ModuleNotFoundError("of the user")), AT_START),
        (lambda: _raise(UnboundLocalError("of the user")), AT_START),
        (lambda: len(3), AT_START),  # type: ignore[arg-type]
        (lambda: FaultHistory.decode(b"{"), ""),  # a ValueError that this package did not raise
    ],
)
def test_what_a_restart_would_raise_again(function: Callable[[], object], expected: str) -> None:
    assert permanence(_raised(function)) == expected


LAUNCH = Launch(0, 1, None, None, False, 0, 0, "")


def test_the_option_and_what_overrides_it() -> None:
    assert Wrapper().settings.rules(LAUNCH).repeated == RepeatedFaults()
    assert Wrapper(repeated_faults=None).settings.rules(LAUNCH).repeated is None
    controlled = Wrapper(initialize=RetryController(), repeated_faults=POLICY)
    assert controlled.settings.rules(LAUNCH).repeated is None
    for wrong in ({"max_equal": 0}, {"backoff": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RepeatedFaults(**wrong)
    with pytest.raises(TypeError, match="repeated_faults"):
        Wrapper(repeated_faults=3)  # type: ignore[arg-type]
