"""Under `outlast run` a restart waits for replacements that are on their way."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from inprocess.job_output import errors, events, full, said, views
from outlast.coordination.membership import MembershipProtocol
from outlast.coordination.ops import Link, drive, perform_on
from outlast.coordination.records import SizeRecord
from outlast.coordination.stores.torch_store import TorchStore
from procs import NET_S, Job

Ranks = Callable[..., Job]
UNDER_OUTLAST_RUN = {"OUTLAST_AGENT": "1"}
REPLACEMENT = {"OUTLAST_REPLACEMENT": "1", **UNDER_OUTLAST_RUN}


class Launcher:
    """What the launcher says to the members of the call."""

    def __init__(self, job: Job) -> None:
        limit = datetime.timedelta(seconds=NET_S)
        store: Any = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=limit)
        self._perform = perform_on(TorchStore(store, "the job's store"))
        self._membership = MembershipProtocol(Link("outlast/0/0/"), 3)

    def give_up(self, *ranks: int) -> None:
        drive(self._membership.give_up(frozenset(ranks)), self._perform)

    def size(self) -> SizeRecord:
        """What the members need, once they have said so."""
        while (size := drive(self._membership.size(), self._perform)) is None:
            time.sleep(0.005)
        return size

    def until_lost(self, member: int) -> None:
        """Waits until the survivors know of the loss."""
        while member not in {r.member for r in drive(self._membership.ledger(), self._perform)}:
            time.sleep(0.005)


def start(job: Job) -> None:
    job.start_all()
    for rank in range(3):
        job.wait_for_line(rank, said("ready", iteration=0))


def kill_rank_1(job: Job) -> Launcher:
    start(job)
    launcher = Launcher(job)
    job.kill(1)
    launcher.until_lost(1)
    return launcher


@pytest.mark.slow
def test_the_restart_waits_for_the_replacement_and_says_so(ranks: Ranks) -> None:
    with ranks("joins", "held", nprocs=3, env=UNDER_OUTLAST_RUN) as job:
        launcher = kill_rank_1(job)
        launcher.give_up()  # no rank is given up: this wakes them, and they wait on
        assert launcher.size().ranks == 2
        while "the restart waits for replacements of the ranks 1, for another " not in job.errors(
            0
        ):
            time.sleep(0.05)
        job.start(1, env=REPLACEMENT)
        assert job.wait_all() == {0: 0, 1: 0, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(3)}
        assert events(job, 1, "entered")[-1]["rank"] == 1


def test_the_launcher_says_that_no_replacement_comes(ranks: Ranks) -> None:
    with ranks("joins", "held", nprocs=3, env=UNDER_OUTLAST_RUN) as job:
        kill_rank_1(job).give_up(1)
        assert job.wait_all() == {0: 0, 1: -9, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}


def test_a_restart_without_a_loss_does_not_wait(ranks: Ranks) -> None:
    """Nor one that comes after a rank was given up."""
    with ranks("joins", "held", "raises", nprocs=3, env=UNDER_OUTLAST_RUN) as job:
        kill_rank_1(job).give_up(1)
        assert job.wait_all() == {0: 0, 1: -9, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2), 2: full(2)}


def test_elsewhere_the_survivors_continue_at_once(ranks: Ranks) -> None:
    with ranks("joins", "held", nprocs=3) as job:
        start(job)
        job.kill(1)  # nothing else looks at the store, which ends with the job
        assert job.wait_all() == {0: 0, 1: -9, 2: 0}, errors(job)
        assert views(job) == {0: full(3), 1: full(2)}
