"""Rank 2 hangs, and the soft timeout of every other rank expires before its own."""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist
from rank import main, scenario, wrapped
from rank_actions import SHORT, collective, finish, join_group, seconds, wait_forever

from outlast.inprocess import CallWrapper

CULPRIT = 2
# The waiting ranks time out first, as can happen when limits follow each rank's pace. They leave it
# to the rank that they wait for to say that it hangs.
PATIENT = SHORT | {"soft_timeout": seconds(5), "hard_timeout": seconds(80)}


@scenario
@wrapped(**(PATIENT if os.environ["RANK"] == str(CULPRIT) else SHORT))
def one_hangs_and_others_time_out(call: CallWrapper) -> int:
    """The others wait in the way that the command line names."""
    join_group()
    if call.iteration == 0:
        call.ping()
        if int(os.environ["RANK"]) == CULPRIT:
            wait_forever()
        _wait(sys.argv[2], call)
    return finish()


@scenario
@wrapped(**SHORT)
def one_is_behind(call: CallWrapper) -> int:
    """All ranks wait inside torch. Rank 2 waits for what rank 3 does not send; or it has begun
    another operation than the rest.
    """
    join_group()
    tp = dist.new_group([1, 2], group_desc="tp")
    rank = dist.get_rank()
    if call.iteration == 0:
        call.ping()
        mine = torch.ones(3, 4)
        if sys.argv[2] == "mixed":
            if rank == CULPRIT:
                dist.barrier()
            else:
                dist.broadcast(mine, 2)
        elif rank == CULPRIT:
            dist.recv(mine, 3)
        elif rank == 1:
            dist.all_reduce(mine, group=tp)
        else:
            dist.all_reduce(mine)
    return finish()


def _wait(how: str, call: CallWrapper) -> None:
    if how == "collective":
        collective()
    elif how == "work":  # the innermost frame is the user's
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        work.wait()
    elif os.environ["RANK"] == "3":  # makes progress, and waits for no other rank
        while True:
            call.ping()
            threading.Event().wait(0.01)
    else:
        dist.recv(torch.ones(1), CULPRIT)


if __name__ == "__main__":
    main()
