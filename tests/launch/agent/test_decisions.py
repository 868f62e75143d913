"""The rules of the launcher, without a process."""

from __future__ import annotations

import dataclasses
import math
import signal

import pytest

from outlast.events.fault_record import FaultRecord
from outlast.events.restart_causes import RestartCount
from outlast.launch.agent.death_log import (
    Death,
    Raised,
    failure_times,
    first_cause,
    restart_counts,
)
from outlast.launch.agent.decisions import (
    Decision,
    JobRecord,
    JobState,
    decide,
    faults_that_count,
    limit_text,
)
from outlast.launch.agent.last_lines import Ending, summary
from outlast.system.error_text import exit_text

PLAIN = JobRecord()
RUNNING = JobRecord(JobState.RUNNING)
STOPPING = JobRecord(JobState.RUNNING, prefix="outlast/0/0/", stopping=True)
COMPLETED = JobRecord(JobState.COMPLETED)
ABORTED = JobRecord(JobState.ABORTED)


@pytest.mark.parametrize(
    ("code", "job", "used", "limit", "decision"),
    [
        (0, PLAIN, 0, None, Decision.DONE),
        (0, RUNNING, 0, None, Decision.DONE),
        (1, PLAIN, 0, None, Decision.FATAL),  # torchrun's default is no restart
        (1, PLAIN, 0, 1, Decision.RESTARTED),
        (-9, PLAIN, 1, 1, Decision.FATAL),
        (-9, RUNNING, 0, None, Decision.REPLACED),
        (1, RUNNING, 2, None, Decision.REPLACED),
        (1, RUNNING, 3, None, Decision.LOST),
        (143, RUNNING, 0, 5, Decision.STOPPED),
        (-15, RUNNING, 0, 5, Decision.REPLACED),
        (143, STOPPING, 0, 5, Decision.STOPPED),
        (-9, STOPPING, 0, 5, Decision.LOST),
        (1, RUNNING, 0, 0, Decision.LOST),
        (1, RUNNING, 4, 5, Decision.REPLACED),
        (93, PLAIN, 0, 5, Decision.FATAL),
        (93, RUNNING, 0, 5, Decision.LOST),
        (93, ABORTED, 0, 5, Decision.FAILED),
        (1, ABORTED, 0, 5, Decision.FAILED),
        (1, dataclasses.replace(COMPLETED, completed_by=frozenset({"7"})), 0, 5, Decision.FAILED),
        (1, dataclasses.replace(COMPLETED, completed_by=frozenset({"8"})), 0, 5, Decision.LOST),
    ],
)
def test_what_follows(
    code: int, job: JobRecord, used: int, limit: int | None, decision: Decision
) -> None:
    assert decide(code, "7", job, used, limit) is decision


@pytest.mark.parametrize(
    ("code", "job", "used", "limit", "decision"),
    [
        (1, RUNNING, 0, None, Decision.FATAL),
        (93, RUNNING, 0, None, Decision.FATAL),
        (1, RUNNING, 0, 1, Decision.REPLACED),
        (1, RUNNING, 1, 1, Decision.FATAL),
        (-9, RUNNING, 0, None, Decision.REPLACED),
        (143, RUNNING, 0, None, Decision.STOPPED),
        (1, STOPPING, 0, None, Decision.LOST),
        (0, RUNNING, 0, None, Decision.DONE),
    ],
)
def test_what_follows_before_the_call_that_others_have_reached(
    code: int, job: JobRecord, used: int, limit: int | None, decision: Decision
) -> None:
    assert decide(code, "7", job, used, limit, wrapped=True, early=True) is decision


@pytest.mark.parametrize(
    ("value", "record"),
    [
        (None, PLAIN),
        (b'{"call": 0, "state": "running"}', RUNNING),
        (b'{"call": 3, "state": "completed"}', COMPLETED),
        (b'{"call": 0, "state": "aborted"}', ABORTED),
        (
            b'{"call": 0, "state": "aborted", "reporter": "node1:5"}',
            JobRecord(JobState.ABORTED, reporter="node1:5"),
        ),
        (b"", RUNNING),
        (b"\xff", RUNNING),
        (b"[]", RUNNING),
        (b'{"state": "of another version"}', RUNNING),
    ],
)
def test_the_record_in_the_store(value: bytes | None, record: JobRecord) -> None:
    assert JobRecord.parse(value) == record


def death(rank: int, when: float, decision: Decision, code: int = 1) -> Death:
    return Death(rank=rank, pid=100 + rank, exit_code=code, when=when, decision=decision)


def test_a_job_that_stopped_ends_with_the_code_of_its_stop() -> None:
    lost, stopped = death(0, 1, Decision.LOST, -9), death(1, 2, Decision.STOPPED, 143)
    assert first_cause([lost, stopped], STOPPING) is stopped
    assert first_cause([lost, stopped], ABORTED) is lost


def test_the_first_cause_is_the_earliest_failure_without_recovery() -> None:
    replaced = death(0, 1, Decision.REPLACED)
    late, early = death(1, 3, Decision.FATAL), death(2, 2, Decision.FATAL)
    assert first_cause([replaced, late, early], PLAIN) is early
    assert first_cause([replaced], RUNNING) is None
    assert first_cause([], PLAIN) is None


def test_a_lost_rank_fails_a_job_that_did_not_complete() -> None:
    lost = death(0, 1, Decision.LOST)
    assert first_cause([lost], RUNNING) is lost
    assert first_cause([lost], ABORTED) is lost
    assert first_cause([lost], COMPLETED) is None


@pytest.mark.parametrize(
    ("code", "received", "expected"),
    [(None, None, 0), (3, None, 3), (-9, None, 137), (3, signal.SIGTERM, 143)],
)
def test_exit_codes(code: int | None, received: signal.Signals | None, expected: int) -> None:
    cause = None if code is None else death(0, 1, Decision.FATAL, code)
    assert Ending(cause, received, False, 1.0).exit_code == expected


def test_exits_in_words() -> None:
    assert exit_text(3) == "exited with code 3"
    assert exit_text(-11) == "was killed by SIGSEGV"
    assert exit_text(-40) == "was killed by SIGRTMIN+6"


def test_an_undisturbed_run_ends_with_one_line() -> None:
    assert summary([], Ending(None, None, False, 12.5), "here") == ["job completed after 12.50 s"]


def test_a_job_that_stopped_as_told_did_not_fail() -> None:
    deaths = [death(rank, rank, Decision.STOPPED, 143) for rank in range(2)]
    asked = Ending(first_cause(deaths, RUNNING), None, True, 12.5)
    assert not asked.failed
    assert summary(deaths, asked, "here") == [
        "job stopped as told: saved, exit code 143, after 12.50 s"
    ]
    by_signal = Ending(None, signal.SIGTERM, True, 12.5)
    assert summary([], by_signal, "here") == [
        "job stopped by SIGTERM: saved, exit code 143, after 12.50 s"
    ]
    prevented = "job stopped as told: NOT saved, a fault prevented the last save, exit code 143, "
    assert summary(deaths, dataclasses.replace(asked, unsaved=True), "here") == [
        f"{prevented}after 12.50 s"
    ]
    killed = dataclasses.replace(by_signal, saved=False)
    assert summary([], killed, "here") == ["job ended by SIGTERM, exit code 143, after 12.50 s"]
    assert summary([], dataclasses.replace(killed, unsaved=True), "here") == [
        "job ended by SIGTERM: NOT saved, exit code 143, after 12.50 s"
    ]


def test_a_host_that_joined_late_tells_its_own_time_as_such() -> None:
    late = Ending(None, None, False, 12.5, joined_late=True)
    assert summary([], late, "here") == ["job completed; this host took part for 12.50 s"]
    joined = dataclasses.replace(late, restarts=(RestartCount("new ranks joined"),))
    assert summary([], joined, "here") == [
        "job completed after 1 restart: 1 x new ranks joined; this host took part for 12.50 s"
    ]
    stopped = dataclasses.replace(late, received=signal.SIGTERM, saved=True)
    assert summary([], stopped, "here") == [
        "job stopped by SIGTERM: saved, exit code 143; this host took part for 12.50 s"
    ]
    stopped = dataclasses.replace(joined, received=signal.SIGTERM, saved=True)
    assert summary([], stopped, "here") == [
        "job stopped by SIGTERM: saved, exit code 143, after 1 restart: 1 x new ranks joined; "
        "this host took part for 12.50 s"
    ]


def test_the_last_lines_name_broken_links() -> None:
    """The ranks saw only a hang."""
    hang = RestartCount("no progress", 1, (2,))
    link = "host b and host c do not reach each other: b leaves the job until they do"
    assert summary(
        [], Ending(None, None, False, 12.5, restarts=(hang,), links=(link,)), "here"
    ) == [
        "broken links between hosts, as they were found:",
        f"  {link}",
        "job completed after 12.50 s and 1 restart: 1 x no progress (rank 2)",
    ]


def test_the_last_lines_say_how_a_rank_died() -> None:
    job = dataclasses.replace(RUNNING, restarts=(RestartCount("died", 2, (1, 3)),))
    killed = [death(2, 1, Decision.REPLACED, -9), death(5, 3, Decision.LOST, -9)]
    assert restart_counts(killed, job) == (RestartCount("killed by SIGKILL", 2, (1, 3)),)
    assert restart_counts([*killed, death(7, 2, Decision.REPLACED, 1)], job) == job.restarts
    assert restart_counts([], job) == job.restarts, "they died on other hosts"


def test_last_lines_of_a_failure() -> None:
    deaths = [
        death(2, 1, Decision.REPLACED, -9),
        Death(
            rank=1,
            pid=8,
            exit_code=1,
            when=2,
            decision=Decision.FATAL,
            last_output="Traceback:\n  boom",
            source="traceback",
        ),
    ]
    ending = Ending(first_cause(deaths, PLAIN), None, False, 12.5)
    assert ending.failed
    assert summary(deaths, ending, "here") == [
        "other failures:",
        "  rank 2 (pid 102, host here) was killed by SIGKILL: replaced",
        "job failed, exit code 1, after 12.50 s",
        "first cause: rank 1 (pid 8, host here) exited with code 1",
        "traceback:",
        "  Traceback:",
        "    boom",
    ]


MISTAKE = FaultRecord(
    iteration=2,
    member=1,
    rank=1,
    host="b",
    pid=7,
    interruption="EXCEPTION",
    cause="KeyError: 1",
    where="train.py:16 in step",
)
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 16, in step
    {}[1]
KeyError: 1"""


def test_the_cause_of_the_ranks_is_the_first_cause() -> None:
    """Not the exit codes that follow from it; their output was on the console."""
    output = f"restart of iteration 1\n{TRACEBACK}\nrank 1 on b: KeyError: 1\nthe job ends after"
    deaths = [
        dataclasses.replace(death(rank, 1, Decision.FAILED, 93), last_output=output, shown=True)
        for rank in (0, 1)
    ]
    ending = Ending(deaths[0], None, False, 12.5, fault=MISTAKE)
    failed = "job failed, exit code 93, after 12.50 s"
    cause = "first cause: KeyError at train.py:16 (rank 1): 1"
    assert summary(deaths, ending, "here") == [failed, cause]
    # On many hosts, this console has not shown it.
    ending = dataclasses.replace(
        ending, cause=dataclasses.replace(deaths[0], host="b", host_id="2", source="stderr")
    )
    assert summary(deaths, ending, "here")[1:4] == [
        "first cause: KeyError at train.py:16 (rank 1, host b): 1",
        "last lines on stderr:",
        "  Traceback (most recent call last):",
    ]


def test_of_a_dead_process_the_launcher_knows_more_than_the_ranks() -> None:
    killed = dataclasses.replace(death(1, 1, Decision.LOST, -9), killer="outside")
    ended = dataclasses.replace(MISTAKE, interruption="TERMINATED", cause="process 7 ended")
    ending = Ending(killed, None, False, 12.5, fault=ended)
    assert ending.first_cause("here") == (
        "rank 1 (pid 101, host here) was killed by SIGKILL from outside"
    )


def test_the_rank_of_an_exit_is_named_and_not_the_one_that_ended_the_job() -> None:
    exit_ = dataclasses.replace(MISTAKE, interruption="BASE_EXCEPTION", cause="SystemExit: 5")
    reporter = dataclasses.replace(death(0, 1, Decision.FAILED, 93), last_output="SystemExit: 5")
    ending = Ending(reporter, None, False, 12.5, fault=exit_)
    assert ending.first_cause("here") == "SystemExit at train.py:16 (rank 1): 5"


@pytest.mark.parametrize(("shown", "lines"), [(True, 2), (False, 7)])
def test_an_exception_is_shown_once(shown: bool, lines: int) -> None:
    output = TRACEBACK.replace("\n", "\n[rank1]: ")
    failed = dataclasses.replace(
        death(1, 1, Decision.FATAL, 1), last_output=output, source="stderr", shown=shown
    )
    found = summary([failed], Ending(failed, None, False, 12.5), "here")
    assert found[1] == "first cause: KeyError at train.py:16 (rank 1, pid 101, host here): 1"
    assert len(found) == lines
    assert failed.how == "failed with KeyError at train.py:16: 1"
    assert failed.event().message == "KeyError: 1"


def test_the_error_of_all_ranks_is_told_once() -> None:
    told = "outlast.errors.RestartAbort: step 9 is not saved"
    about = "outlast.errors.RestartAbort: rank 0 ended the job: RestartAbort: step 9 is not saved"
    first, other, third = (
        dataclasses.replace(
            death(rank, rank, Decision.FAILED, 1), last_output=f"{each}\n", shown=True
        )
        for rank, each in enumerate((told, about, "KeyError: 9"))
    )
    found = summary([first, other, third], Ending(first, None, False, 1.0), "here")
    assert found == [
        "other failures:",
        "  rank 1 (pid 101, host here) failed with the same error: failed",
        "  rank 2 (pid 102, host here) failed with KeyError: 9: failed",
        "job failed, exit code 1, after 1.00 s",
        "first cause: RestartAbort (rank 0, pid 100, host here): step 9 is not saved",
    ]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("KeyError", "KeyError at t.py:1 (rank 1)"),
        ("a.b.MyError: a: b", "MyError at t.py:1 (rank 1): a: b"),
        ("health_check: MyError: a", "health_check: MyError at t.py:1 (rank 1): a"),
        ("no progress for 3 s; it hangs", "no progress for 3 s; it hangs at t.py:1 (rank 1)"),
    ],
)
def test_the_place_and_the_rank_come_before_the_message(error: str, told: str) -> None:
    assert Raised(error, "t.py:1").told(" (rank 1)") == told


def test_a_breakpoint_says_how_to_debug() -> None:
    left = dataclasses.replace(MISTAKE, cause="BdbQuit")
    ended = death(1, 1, Decision.FAILED, 93)
    found = summary([ended], Ending(ended, None, False, 1.0, fault=left), "here")
    assert found[2].endswith(": debug a single process with `python SCRIPT`")


def test_a_typo_is_shown_once_in_the_last_lines() -> None:
    equal = "Traceback (most recent call last):\n  boom\nKeyError: 1"
    chained = (
        f"{equal}\n\nDuring handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n  bang\nNameError: los"
    )
    ended = death(1, 2, Decision.FAILED, 93)
    first = dataclasses.replace(
        death(0, 1, Decision.FAILED, 93),
        last_output=f"restart of iteration 0\n{chained}\nrestart of iteration 1\n{chained}\nend",
        source="stderr",
    )
    assert summary([first, ended], Ending(first, None, False, 12.5), "here") == [
        "job failed, exit code 93, after 12.50 s",
        "first cause: NameError (rank 0, pid 100, host here): los",
        "last lines on stderr:",
        *(f"  {line}" for line in [*chained.splitlines(), "end"]),
    ]


@pytest.mark.parametrize(
    ("code", "used", "limit", "decision"),
    [
        (-9, 0, None, Decision.REPLACED),
        (-9, 3, None, Decision.FATAL),
        (-9, 0, 0, Decision.FATAL),
        (1, 0, None, Decision.FATAL),  # an error comes again
        (1, 0, 1, Decision.RESTARTED),
    ],
)
def test_a_worker_that_has_not_reached_the_wrapped_function(
    code: int, used: int, limit: int | None, decision: Decision
) -> None:
    assert decide(code, "7", PLAIN, used, limit, wrapped=True) is decision


def test_when_workers_failed_whose_ends_were_seen_together() -> None:
    # An error file gives the time; without one, the time is now at the latest.
    assert failure_times([(1, None), (1, 5.0), (1, 99.0)], now=10.0) == [10.0, 5.0, 10.0]
    # A killed worker did not fail because of its peers: it counts as the first.
    assert failure_times([(1, 5.0), (-9, None)], now=10.0) == [5.0, 5.0]
    assert failure_times([(1, 5.0), (-6, None)], now=10.0) == [5.0, 10.0]


def test_faults_count_until_there_is_progress() -> None:
    faults = [("", 0.0), ("", 5.0), ("call/0", 9.0), ("call/3", 10.0), ("call/3", 20.0)]
    counts = [faults_that_count(faults, at, 1e9, math.inf) for at in ("", "call/3", "call/4")]
    assert counts == [2, 2, 0]


def test_faults_count_for_a_time() -> None:
    faults = [("", 0.0), ("call/1", 5.0), ("call/1", 9.0)]
    counts = [faults_that_count(faults, "call/1", now, 5.0) for now in (9.0, 10.0, 10.5, 14.5)]
    assert counts == [2, 2, 1, 0]
    assert limit_text(3, 3600.0) == "--max-restarts: 3 within 60 min 0 s"


def test_a_host_that_has_left_does_not_say_that_the_job_has_failed() -> None:
    killed = death(0, 1, Decision.LOST, -9)
    left = Ending(None, None, False, 12.5, left="outlast drain", leave_exit_code=7)
    assert summary([], left, "here") == [
        "this host has left the job after 12.50 s, exit code 7: outlast drain"
    ]
    by_force = dataclasses.replace(left, cause=killed, left_in_order=False)
    assert not by_force.failed
    lines = summary([killed], by_force, "here")
    assert lines[0] == "failures:"
    assert lines[-1] == "this host has left the job after 12.50 s, exit code 137: outlast drain"
