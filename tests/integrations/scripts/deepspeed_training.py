"""Trains with DeepSpeed (ZeRO stage, folder): each rank prints every loss, and the final weights.

outlast run --nproc-per-node 2 deepspeed_training.py 2 checkpoints
"""

import datetime
import hashlib
import os
import signal
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

import outlast.inprocess as inprocess
from outlast.integrations.deepspeed import DeepSpeedCheckpoints, reset

STAGE, FOLDER, STEPS = int(sys.argv[1]), sys.argv[2], 24


@inprocess.Wrapper(soft_timeout=inprocess.Adaptive(initial=20))
def train(call: inprocess.CallWrapper) -> None:
    reset()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10))
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": STAGE},
        "bf16": {"enabled": STAGE > 0},
    }
    engine, *_ = deepspeed.initialize(
        model=module,
        model_parameters=module.parameters(),
        config=config,
        dist_init_required=False,
    )
    checkpoints = DeepSpeedCheckpoints(engine, FOLDER, keep=2)
    state = checkpoints.restore()
    assert state is None or state["told"] == engine.global_steps, state
    for step in range(engine.global_steps, STEPS):
        call.ping()
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        inputs = torch.randn(8, 16, generator=generator, dtype=torch.float32)
        targets = torch.randint(4, (8,), generator=generator)
        outputs = engine(inputs.to(torch.bfloat16) if STAGE else inputs).float()
        loss = torch.nn.functional.cross_entropy(outputs, targets)
        engine.backward(loss)
        engine.step()
        print(f"step {step + 1}: loss {loss.item()!r}", flush=True)
        if step + 1 == int(os.environ.get("STOP_AT", "-1")) and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        checkpoints.step(client_state={"told": step + 1})
        if (step + 1) % 3 == 0:
            with call.long_phase():
                checkpoints.save(client_state={"told": step + 1})
    checkpoints.close()
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=STAGE == 3):
        weights = [p.detach().float().numpy().tobytes() for p in module.parameters()]
    print(f"step {STEPS + 1}: loss {hashlib.sha256(b''.join(weights)).hexdigest()}", flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
