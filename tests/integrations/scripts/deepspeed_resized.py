"""Trains with DeepSpeed, on as many samples with any number of ranks, and saves at the end.

outlast run deepspeed_resized.py STAGE STEPS

EXPORT: also saves DeepSpeed's own files, into that folder. UNIVERSAL: begins with the universal
checkpoint in that folder. STOPPED: is told to stop in the step after this one, and fails in it.
"""

import os
import signal
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from outlast import inprocess
from outlast.integrations.deepspeed import DeepSpeedCheckpoints, reset

STAGE, STEPS = int(sys.argv[1]), int(sys.argv[2])
STOPPED = int(os.environ.get("STOPPED", "-1"))
EXPORT, UNIVERSAL = os.environ.get("EXPORT"), os.environ.get("UNIVERSAL")


@inprocess.Wrapper()
def train(call: inprocess.CallWrapper) -> None:
    reset()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 12 // ranks,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": STAGE},
        "checkpoint": {"load_universal": bool(UNIVERSAL)},
    }
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=config,
        dist_init_required=False,
    )
    checkpoints = DeepSpeedCheckpoints(engine, "checkpoints")
    state = checkpoints.restore()
    if state is None and UNIVERSAL:
        engine.load_checkpoint(UNIVERSAL)
    for step in range(engine.global_steps, STEPS):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 16, generator=generator)
        targets = torch.randint(4, (12,), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(inputs[rank::ranks]), targets[rank::ranks])
        if step == STOPPED and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            raise RuntimeError("a fault after the request to stop")
        engine.backward(loss)
        engine.step()
        print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
        state = {**(state or {}), "told": step + 1}
        checkpoints.step(client_state=state)
    checkpoints.save(client_state=state)
    if EXPORT:
        engine.save_checkpoint(EXPORT)
    checkpoints.close()
    weights = [p.detach().double().sum().item() for p in module.parameters()]
    print(f"steps {engine.global_steps}, state {state}, weights {weights}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
