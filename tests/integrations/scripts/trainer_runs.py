"""Trainings by `JobTrainer` with and without a fault in a step or an evaluation, in one process.

python trainer_runs.py FOLDER: prints one JSON line per scenario, as `lightning_fits.py` does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from outlast.integrations.accelerate import reset_state
from outlast.integrations.transformers import JobTrainer

# Arguments; and where the faults are: before a step, or in the evaluation after one.
SCENARIOS: list[tuple[dict[str, Any], Any]] = [
    # The first logged loss after the fault is the mean of steps before and after the checkpoint.
    ({"save_steps": 2, "logging_steps": 3}, 6),
    ({"save_steps": 2}, 9),  # after the last step of an epoch
    (
        {
            "save_strategy": "epoch",
            "gradient_accumulation_steps": 3,
            "load_best_model_at_end": True,
        },
        ["evaluation", 6],
    ),
]


class FaultError(Exception):
    pass


class Watch(TrainerCallback):
    def __init__(self, fault: Any, lines: list[str]) -> None:
        self.fault, self.lines = fault, lines

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        equal = {k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k}
        self.lines.append(f"{state.global_step} {state.epoch} {sorted(equal.items())}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fault == state.global_step + 1:
            raise FaultError

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.fault == ["evaluation", state.global_step]:
            raise FaultError


class Text(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 2, (length, 16), generator=generator).cumsum(1) % 26

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(path: str, options: dict[str, Any], fault: Any, lines: list[str]) -> None:
    reset_state()
    arguments = TrainingArguments(
        output_dir=path,
        num_train_epochs=3,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        eval_strategy="epoch",
        save_total_limit=2,
        metric_for_best_model="loss",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **options,
    )
    config = GPT2Config(vocab_size=26, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    trainer = JobTrainer(model=model, args=arguments, train_dataset=Text(64), eval_dataset=Text(16))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Watch(fault, lines))
    result = trainer.train()
    folders = sorted(each.name for each in Path(path, "outlast").glob("step-*"))
    best = trainer.state.best_metric, trainer.state.best_global_step
    total = sum(p.double().sum().item() for p in model.parameters()).hex()
    lines.append(f"{total} {result.training_loss!r} {best} {folders}")


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for options, fault in SCENARIOS:
        expected: list[str] = []
        found: list[str] = []
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as path:
            train(path, options, None, expected)
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as path:
            try:
                train(path, options, fault, found)
            except FaultError:
                train(path, options, None, found)
        print(json.dumps([f"{options} {fault}", expected, found]), flush=True)


if __name__ == "__main__":
    main()
