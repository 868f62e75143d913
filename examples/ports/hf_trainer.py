"""Hugging Face's Trainer, on two ranks, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/hf_trainer.py

`outlast.integrations.transformers.JobTrainer` saves and restores what Trainer would keep in its own
checkpoint folders. The model is a tiny GPT-2 with random weights, the text synthetic: nothing is
downloaded.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from outlast import chaos, inprocess
from outlast.integrations.accelerate import reset_state
from outlast.integrations.transformers import JobTrainer


class PrintLosses(TrainerCallback):
    """Prints the losses with all digits, on every rank."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "loss" in logs:
            print(f"step {state.global_step}: loss {logs['loss']!r}", flush=True)
            chaos.step(state.global_step)  # so that a fault plan can name a step


class Text(Dataset[dict[str, torch.Tensor]]):
    """Letters that usually follow each other in the alphabet."""

    def __init__(self, length: int = 512) -> None:
        generator = torch.Generator().manual_seed(1)
        jumps = torch.randint(0, 26, (length, 16), generator=generator)
        steps = torch.where(torch.rand(length, 16, generator=generator) < 0.9, 1, jumps)
        self.ids = steps.cumsum(1) % 26

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@inprocess.Wrapper()
def main(output: Path, max_steps: int) -> None:
    reset_state()
    dist.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir=str(output / "trainer"),
        max_steps=max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=2,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
    )
    config = GPT2Config(vocab_size=26, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    config.bos_token_id = config.eos_token_id = 0
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    trainer = JobTrainer(
        model=model, args=arguments, train_dataset=Text(), job_path=output / "checkpoints"
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(PrintLosses())
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("hf"))
    parser.add_argument("--max-steps", type=int, default=240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.output, options.max_steps)
