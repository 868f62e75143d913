"""A job that uses Wrapper: the dead are replaced, the survivors stay."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from launch.runs import WORKER, Run
from outlast.coordination.decision import Rules
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import LostRecord
from procs import NET_S


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2, signal.SIGSEGV])
def test_a_dead_worker_is_replaced_and_the_others_stay(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3") as run:
        first = run.start_job(3)
        assert [ready.env["OUTLAST_REPLACEMENT"] for ready in first] == ["0", "0", "0"]
        first[1].kill(number)
        second = run.ready(1)
        assert second.pid != first[1].pid
        same = {"RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"}
        assert {n: second.env[n] for n in same} == {n: first[1].env[n] for n in same}
        assert second.env["OUTLAST_REPLACEMENT"] == "1"
        assert run.complete(first[0], second, first[2]) == 0
    outside = number in (signal.SIGKILL, signal.SIGTERM)
    how = f"was killed by {number.name}{' from outside' if outside else ''}"
    how = "exited with code 3" if number is signal.SIGUSR2 else how
    assert f"rank 1 (pid {first[1].pid}) {how}: replacement 1 of 3" in run.words
    assert run.words[-3] == "failures:"
    assert run.words[-2].startswith(f"  rank 1 (pid {first[1].pid}, host ")
    assert run.words[-2].endswith(f"{how}: replaced")
    assert run.verdict == "job completed"


def test_rank_0_is_replaced_like_any_other(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = run.start_job(2)
        first[0].kill()
        second = run.ready(0)
        assert run.complete(second, first[1]) == 0


def test_survivors_go_on_smaller_when_the_budget_is_spent(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3", "--max-restarts=1") as run:
        first = run.start_job(3)
        first[1].kill()
        second = run.ready(1)
        second.kill()
        run.until_said(
            f"rank 1 (pid {second.pid}) was killed by SIGKILL from outside: not replaced"
        )
        first[0].kill()
        run.until_said(
            f"rank 0 (pid {first[0].pid}) was killed by SIGKILL from outside: not replaced"
        )
        assert run.complete(first[2]) == 0
    assert [line.rpartition(": ")[2] for line in run.words[-4:-1]] == ["replaced", "lost", "lost"]


def test_no_replacement_at_all(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=0") as run:
        first = run.start_job(2)
        first[0].fail()
        run.until_said("not replaced, all 0 replacements are used")
        assert run.complete(first[1]) == 0


def test_exit_code_0_is_the_end_of_a_rank_and_no_death(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = run.start_job(2)
        assert run.complete(*first) == 0
    first_line, _ = run.words
    pids = [ready.pid for ready in first]
    assert first_line == f"started 2 ranks: rank 0 is pid {pids[0]}, rank 1 is pid {pids[1]}"
    assert run.verdict == "job completed"


def test_all_workers_dead_fails_the_job_with_the_first_ones_code(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=0") as run:
        first = run.start_job(2)
        first[1].kill()
        run.until_said("not replaced")
        first[0].fail()
        assert run.wait() == 128 + signal.SIGKILL
    start = next(n for n, line in enumerate(run.words) if line.startswith("job failed"))
    assert run.words[start].startswith("job failed, exit code 137, after ")
    assert run.words[start + 1].startswith(f"first cause: rank 1 (pid {first[1].pid}, host ")


ALL_DIE = """
import datetime, os, signal
import torch.distributed as dist
from outlast.inprocess import CallWrapper, Compose, Wrapper
from outlast.inprocess.rank_assignment import AwaitReplacements, ShiftRanks

@Wrapper(
    rank_assignment=Compose(ShiftRanks(), AwaitReplacements(datetime.timedelta(seconds=100)))
)
def train(call: CallWrapper):
    if os.environ["OUTLAST_REPLACEMENT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.init_process_group("gloo")
    dist.barrier()  # before a rank closes its connections, the other has made all of its own
    dist.destroy_process_group()
    return os.environ["WORLD_SIZE"]

print("world size", train(), flush=True)
"""


@pytest.mark.slow
def test_a_job_whose_workers_have_all_died_goes_on(tmp_path: Path) -> None:
    # The joiners find no live member: they decide among themselves.
    with Run(tmp_path, ALL_DIE, "--nproc-per-node=2", "--max-restarts=2") as run:
        assert run.wait() == 0
    assert run.out.count("world size 2") == 2


def test_nothing_is_replaced_after_an_abort(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("aborted")
        first[0].fail()
        run.until_said("the ranks end the job")
        first[1].kill()
        assert run.wait() == 3


@pytest.mark.parametrize(("completed", "code"), [([0], 0), ([0, 1], 3)])
def test_a_failure_counts_unless_the_worker_was_lost_before_completion(
    tmp_path: Path, completed: list[int], code: int
) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("completed", by=[first[rank] for rank in completed])
        first[1].fail()
        run.until_said("not replaced, the job is completed")
        first[0].succeed()
        assert run.wait() == code


def test_the_end_of_a_job_does_not_wait_for_a_back_off(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--backoff=60") as run:
        first = run.start_job(2)
        first[1].kill()
        run.ready(1).kill()
        run.until_said("rank 1 died soon after its start again: replaced in 60 s")
        run.set_job("completed")
        first[0].succeed()
        assert run.wait(net_s=45) == 0
    assert run.words[-2].endswith("was killed by SIGKILL from outside: lost")


def test_the_wait_of_a_back_off_ends(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--backoff=0.05") as run:
        first = run.start_job(2)
        first[1].kill()
        run.ready(1).kill()
        run.until_said("replaced in 0.05 s")
        third = run.ready(1)
        assert third.env["OUTLAST_REPLACEMENT"] == "2"
        assert run.complete(first[0], third) == 0


def test_two_that_die_in_the_same_moment_are_both_replaced(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=3") as run:
        first = run.start_job(3)
        first[0].kill()
        first[2].kill()
        assert run.complete(run.ready(0), first[1], run.ready(2)) == 0


def test_members_learn_which_ranks_are_given_up(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=1") as run:
        first = [run.ready(rank) for rank in range(2)]
        store = run.store()
        store.put("call/claim/1", b"its token")
        run.set_job("running", prefix="call/")
        first[1].kill()
        second = run.ready(1)
        assert store.read("outlast/gone") is None
        membership = MembershipProtocol(Link("call/"), 2, Rules(await_size=2))
        members, perform = frozenset({0, 1}), perform_on(store)
        for rank in members:
            drive(membership.register(rank, str(rank)), perform)
        drive(membership.report_lost(LostRecord(1, "killed"), 0), perform)
        drive(membership.leave(0, 0, members, {}), perform)  # the restart is held
        assert drive(membership.decision(1), perform) is None
        second.kill()
        store.wait_for("call/decision/1/1", NET_S)
        assert store.read("outlast/gone") == b"[1]\n"
        decision = drive(membership.decision(1), perform)
        assert decision is not None
        assert decision.view.expected == {0}
        assert run.complete(first[0]) == 0


def test_progress_makes_room_for_further_replacements(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=1") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("running", prefix="call/")
        first[1].kill()
        second = run.ready(1)
        membership, perform = MembershipProtocol(Link("call/"), 2), perform_on(run.store())
        drive(membership.note_progress(1), perform)
        second.kill()
        third = run.ready(1)
        third.kill()
        run.until_said(
            "not replaced, all 1 replacements are used (--max-restarts: 1 without a further "
            "training step)"
        )
        assert run.complete(first[0]) == 0
    assert run.err.count("replacement 1 of 1") == 2


def test_replacements_count_for_a_time(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2", "--max-restarts=1/1h") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("running", prefix="call/")
        first[1].kill()
        second = run.ready(1)
        membership, perform = MembershipProtocol(Link("call/"), 2), perform_on(run.store())
        drive(membership.note_progress(1), perform)
        second.kill()
        run.until_said("replacements are used (--max-restarts: 1 within 60 min 0 s)")
        assert run.complete(first[0]) == 0


def test_no_replacement_for_a_job_that_was_told_to_stop(tmp_path: Path) -> None:
    with Run(tmp_path, WORKER, "--nproc-per-node=2") as run:
        first = [run.ready(rank) for rank in range(2)]
        run.set_job("running", prefix="call/")
        run.store().put("call/stop", b'{"reason": "a signal", "exit_code": 143, "done": ""}')
        first[1].kill()
        run.until_said("not replaced, the job was told to stop")
        first[0].succeed()
        assert run.wait() == 143
    assert run.verdict.startswith("job stopped as told: NOT saved"), "no rank left with 143"
