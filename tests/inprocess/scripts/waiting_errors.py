"""Rank 1 raises, and waits for the others before it lets the exception go; or keeps it."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist
from rank import main, say, scenario, wrapped
from rank_actions import SHORT, collective, finish, join_group, rank

from outlast.inprocess import CallWrapper


@scenario
@wrapped()
def in_a_finally(call: CallWrapper) -> int:
    join_group()
    try:
        if call.iteration == 0:
            if rank() == 1:
                raise ArithmeticError("the real cause")
            collective()
    finally:
        dist.barrier()
    return finish()


@scenario
@wrapped()
def that_all_ranks_catch(call: CallWrapper) -> int:
    """Rank 1 is early at the barrier, by more than the time after which its wait is looked at."""
    join_group()
    with suppress(EOFError):
        try:
            if rank() == 0:
                for _ in range(5):
                    say("late", left=dist.get_world_size())
                    dist.distributed_c10d.time.sleep(0.2)
            raise EOFError("the end of training")
        finally:
            dist.barrier()
    return finish()


@scenario
@wrapped(**SHORT)
def in_a_handler(call: CallWrapper) -> int:
    """It logs, and waits."""
    join_group()
    if call.iteration == 0:
        call.ping()
        try:
            if rank() == 1:
                raise ArithmeticError("the real cause")
            collective()
        except ArithmeticError:
            dist.barrier()
    return finish()


if __name__ == "__main__":
    main()
