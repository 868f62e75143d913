"""Hugging Face's Trainer, on two ranks, that survives faults.

    outlast run --nproc-per-node 2 examples/ports/hf_trainer.py

`JobTrainer` saves and restores through an `outlast.Job` what Trainer would keep in its own
checkpoint folders. The model is a tiny GPT-2 with random weights, the text synthetic: nothing is
downloaded.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

import outlast
from outlast import chaos, inprocess


class JobTrainer(Trainer):
    """A Trainer whose checkpoints an `outlast.Job` makes."""

    def train_with(self, job: outlast.Job) -> None:
        """Trains from the job's newest checkpoint to the end."""
        self.job = job
        job.restore()
        if not job.steps:
            self.train()
            return
        self.generator = torch.get_rng_state()
        with tempfile.TemporaryDirectory() as folder:
            self.state.save_to_json(f"{folder}/trainer_state.json")  # the position in the data
            self.train(resume_from_checkpoint=folder)

    # The Trainer's state is one of the job's `states=`.

    def state_dict(self) -> dict[str, Any]:
        return {"json": json.dumps(dataclasses.asdict(self.state))}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.state = TrainerState(**json.loads(saved["json"]))

    # Where Trainer would read or write a checkpoint folder.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.job.step()  # saves in the background when due

    def _load_from_checkpoint(self, *_: Any, **__: Any) -> None:
        pass  # `job.restore` has loaded the model, the optimizer and the scheduler

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # Trainer has skipped the data of earlier steps
            torch.set_rng_state(self.generator)


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
    # accelerate remembers the process group of the previous iteration.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    dist.init_process_group("gloo")
    arguments = TrainingArguments(
        output_dir=str(output / "trainer"),
        max_steps=max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,  # calls `job.step` after every step; the job decides when to save
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    scheduler = get_scheduler("cosine", optimizer, 5, max_steps)
    trainer = JobTrainer(
        model=model, args=arguments, train_dataset=Text(), optimizers=(optimizer, scheduler)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(PrintLosses())
    states = {"scheduler": scheduler, "trainer": trainer}
    with outlast.Job(
        output / "checkpoints", model=model, optimizer=optimizer, states=states, every=10
    ) as job:
        trainer.train_with(job)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("hf"))
    parser.add_argument("--max-steps", type=int, default=240)
    options = parser.parse_args()
    torch.set_num_threads(1)
    main(options.output, options.max_steps)
