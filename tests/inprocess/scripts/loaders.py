"""Functions that a fault on another rank interrupts in a data loader, and in a debugger."""

from __future__ import annotations

import threading
import time

import torch
from rank import main, say, scenario, wrapped
from rank_actions import SHORT, collective, finish, join_group, rank
from torch.utils.data import DataLoader, Dataset

from outlast.inprocess import CallWrapper


class Slow(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((1000,), float(index))


@scenario
@wrapped()
def loads(call: CallWrapper) -> int:
    """Rank 1 fails in the first three iterations, while the others load batches with workers."""
    join_group()
    for number, _ in enumerate(DataLoader(Slow(), batch_size=4, num_workers=2)):
        call.ping()
        if number == 15:
            break
        if call.iteration < 3 and number == 5 + call.iteration and rank() == 1:
            raise OSError("a planned fault")
        collective()
    return finish()


@scenario
@wrapped(**SHORT)
def is_debugged(call: CallWrapper) -> int:
    """Stays in the debugger for longer than all timeouts."""
    call.ping()
    answer = 41
    threading.Timer(4 * SHORT["hard_timeout"].total_seconds(), say, ["late"]).start()
    breakpoint()
    return answer


main()
