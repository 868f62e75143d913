"""Trains with torchtitan's checkpoint interface, optimizers and schedulers.

    outlast run --nproc-per-node 2 torchtitan_training.py

torchtitan's `Trainer` needs a GPU: its attention has no backward pass on CPUs. The loop below calls
the checkpoint manager as `Trainer.train` does, with torchtitan's own containers.
"""

import datetime
import hashlib
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import outlast.inprocess as inprocess
from outlast.integrations.torchtitan import OutlastCheckpointManager

STEPS = 16


class Trainer:
    """What torchtitan's Trainer saves of itself."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": 8 * self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class Position(Trainer):
    """The position in the data."""


@inprocess.Wrapper(soft_timeout=inprocess.Adaptive(initial=20))
def train(call: inprocess.CallWrapper) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer_config = default_adamw(lr=1e-2)
    optimizer_config.implementation = "for-loop"
    optimizers = optimizer_config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=4).build(
        optimizers=optimizers, training_steps=STEPS
    )
    trainer, position = Trainer(), Position()
    config = OutlastCheckpointManager.Config(
        enable=True, interval=4, keep_latest_k=2, last_save_model_only=False
    )
    checkpoints = config.build(
        dataloader=position,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder="outputs",
    )
    checkpoints.after_step = call.ping
    checkpoints.load(step=-1)
    while trainer.step < STEPS:
        trainer.step += 1
        position.step += 1
        generator = torch.Generator().manual_seed(1000 * position.step + dist.get_rank())
        inputs = torch.randn(8, 8, generator=generator)
        targets = torch.randint(4, (8,), generator=generator)
        optimizers.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        checkpoints.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        print(f"step {trainer.step}: loss {loss.item()!r}", flush=True)
        if trainer.step == int(os.environ.get("STOP_AT", "-1")) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.save(trainer.step, last_step=trainer.step == STEPS)
    checkpoints.close()
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.to_local().detach().numpy().tobytes())
    print(f"step {STEPS + 1}: loss {weights.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
