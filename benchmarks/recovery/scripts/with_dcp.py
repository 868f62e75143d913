"""`torch.distributed.checkpoint.async_save`, and a restart of all processes by torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

from benchmarks.recovery.training import Run, group_store, launched_rank, time_limit


def main() -> None:
    run = Run(launched_rank())
    size, limit = int(os.environ["WORLD_SIZE"]), time_limit("timeout")
    dist.init_process_group("gloo", store=group_store(), rank=run.rank, world_size=size, **limit)
    # Of its own: the background thread of a save must not mix its collectives with those of DDP.
    saves = dist.new_group(backend="gloo", **limit)
    model = run.model()
    optimizer = run.optimizer(model)
    step = _restore(run, model, optimizer)
    ddp = DistributedDataParallel(model)
    saving: Any = None
    while True:
        run.loss(ddp, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.completed(step)
        if step % run.every == 0:
            if saving is not None:
                saving.result()
            states = get_state_dict(model, optimizer)
            state = {"model": states[0], "optimizer": states[1], "step": step}
            folder = run.checkpoints / f"step-{step}"
            saving = async_save(state, checkpoint_id=folder, process_group=saves)


def _restore(run: Run, model: Any, optimizer: Any) -> int:
    """Loads the newest complete checkpoint: one with its metadata, which is written last."""
    found = sorted(run.checkpoints.glob("step-*/.metadata"), key=lambda p: _step(p.parent))
    if not found:
        return 0
    states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": states[0], "optimizer": states[1], "step": 0}
    load(state, checkpoint_id=found[-1].parent)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


if __name__ == "__main__":
    main()
