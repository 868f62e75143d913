"""torchft: a replica group of one rank for each process, one lighthouse for all.

A replica that fails leaves the quorum; when it is back, it gets its state from another one. So it
saves nothing to storage here, which favors it.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.recovery.training import Run

_TIMEOUT = datetime.timedelta(seconds=5)


def main() -> None:
    replica = int(os.environ["REPLICA"])
    run = Run(replica)
    model = run.model()
    inner = run.optimizer(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        replica_id=f"replica_{replica}",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        run.loss(ddp, step).backward()
        optimizer.step()
        if manager.current_step() > step:
            run.completed(manager.current_step())


if __name__ == "__main__":
    main()
