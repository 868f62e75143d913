"""A program of a user of Hugging Face's Trainer: `outlast run own_trainer.py PLAN`.

Its points: `step N`, at the begin of step N; `stepped N`, in the callback after the optimizer's
step; `evaluation N`, in an evaluation after step N; `epoch N`, at the end of an epoch after step N.
"""

import json
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from planned_faults import RANK, PlannedFaults, say
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from outlast import inprocess
from outlast.integrations.accelerate import reset_state
from outlast.integrations.transformers import JobTrainer

PLAN = json.loads(sys.argv[1])
reach = PlannedFaults(PLAN, {}).reach


class Watch(TrainerCallback):
    def __init__(self, call: inprocess.CallWrapper) -> None:
        self.iteration = call.iteration
        self.trainer: Any = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        job = self.trainer.job
        say("restored", step=job.steps, source=job.restored_from)

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        reach(f"step {state.global_step + 1}", self.iteration)

    def on_optimizer_step(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        reach(f"stepped {state.global_step + 1}", self.iteration)

    def on_prediction_step(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        reach(f"evaluation {state.global_step}", self.iteration)
        random.random()

    def on_epoch_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        reach(f"epoch {state.global_step}", self.iteration)

    def on_log(self, _: Any, state: Any, *__: Any, logs: Any = None, **___: Any) -> None:
        equal = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        kind = min(equal)
        say("computed", name=f"log {state.global_step} {kind}", value=sorted(equal.items()))


class Text(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 2, (length, 16), generator=generator).cumsum(1) % 26

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    reset_state()
    dist.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir=PLAN["path"],
        num_train_epochs=4,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=3,
        eval_strategy="epoch",
        save_strategy="no",
        metric_for_best_model="loss",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=PLAN.get("report_to", []),
    )
    config = GPT2Config(vocab_size=26, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    random.seed(RANK)
    watch = Watch(call)
    trainer = JobTrainer(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Text(64),
        eval_dataset=Text(16),
        callbacks=[watch, EarlyStoppingCallback(3)],
        call=call,
    )
    trainer.remove_callback(PrinterCallback)
    watch.trainer = trainer
    trainer.train()
    weights = sum(p.double().sum().item() for p in trainer.model.parameters()).hex()
    say("computed", name="weights", value=weights)
    say("computed", name="random", value=random.random())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
