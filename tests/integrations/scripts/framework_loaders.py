"""A program of a user of accelerate or Trainer, with the loaders that these make:
`outlast run framework_loaders.py PLAN`.

Its point `step N` is in front of step N. It tells the epoch and the samples of each step.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from planned_faults import PlannedFaults, say
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from outlast import inprocess
from outlast.integrations.accelerate import make_job, reset_state
from outlast.integrations.transformers import JobTrainer

PLAN = json.loads(sys.argv[1])
KIND = PLAN["kind"]
IS_EXACT = "skip" not in KIND and not PLAN.get("resized")  # else only the samples are the same
ACCUMULATED = 2 if "accumulated" in KIND else 1
EPOCHS, SAMPLES, STEPS = 3, 48, 4
STRATEGIES = "group_by_length", "batch_rebalance", "sequential"
STRATEGY = next((each for each in STRATEGIES if each in KIND), "random")
BY_LENGTH = STRATEGY in STRATEGIES[:2]
reach = PlannedFaults(PLAN, {}).reach


class Numbers(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(()).item() if "workers" in KIND else 1.0
        found = {"x": torch.tensor([range(SAMPLES)[index], noise])}
        # To group by their lengths; Trainer does not give them to the model.
        return {**found, "input_ids": [0] * (1 + index % 7)} if BY_LENGTH else found


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)):
            yield {"x": torch.tensor([index, 1.0])}


class Shuffled(Sampler[int]):
    """An order from a generator of its own, or from the epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5) if KIND.endswith("generator") else None
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = self.generator or torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(SAMPLES, generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES


class Model(nn.Module):
    """Notes which samples it has seen, and the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.2))
        self.samples: list[int] = []
        self.losses: list[str] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.layers(x).square().mean()
        self.samples += [int(number) for number in x[:, 0]]
        self.losses.append(loss.item().hex())
        return {"loss": loss}

    def tell(self, step: int, epoch: int) -> None:
        losses = self.losses if IS_EXACT else []
        say("computed", name=f"step {step}", value=[epoch, self.samples, losses])
        self.samples, self.losses = [], []


class OwnTrainer(JobTrainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Shuffled()


def share() -> int:
    """The samples of a batch: those of a step are the same number for any number of ranks."""
    return SAMPLES // STEPS // ACCUMULATED // dist.get_world_size()


def with_trainer(call: inprocess.CallWrapper, model: Model) -> None:
    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            say("restored", step=trainer.job.steps, source=trainer.job.restored_from)

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            reach(f"step {state.global_step + 1}", call.iteration)

        def on_optimizer_step(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            model.tell(state.global_step + 1, state.global_step // STEPS)

        def on_log(self, _: Any, state: Any, *__: Any, logs: Any, **___: Any) -> None:
            if "loss" in logs and IS_EXACT:
                say("computed", name=f"log {state.global_step}", value=logs["loss"])

    arguments = TrainingArguments(
        output_dir=PLAN["path"],
        num_train_epochs=EPOCHS,
        max_steps=STEPS if "stream" in KIND else -1,
        per_device_train_batch_size=share(),
        train_sampling_strategy=STRATEGY,
        gradient_accumulation_steps=ACCUMULATED,
        dataloader_num_workers=2 if "workers" in KIND else 0,
        dataloader_persistent_workers="workers" in KIND,
        learning_rate=0.01,
        logging_steps=2,
        save_strategy="no",
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
        report_to=[],
    )
    data: Any = Stream() if "stream" in KIND else Numbers()
    trainer: Any = (OwnTrainer if "own" in KIND else JobTrainer)(
        model=model, args=arguments, train_dataset=data, callbacks=[Watch()], call=call
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def with_accelerate(call: inprocess.CallWrapper, model: Model) -> None:
    configuration = DataLoaderConfiguration(
        use_seedable_sampler="generator" not in KIND,
        use_stateful_dataloader="stateful" in KIND,
        split_batches="split" in KIND,
    )
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data: Any = Stream() if "stream" in KIND else Numbers()
    batch = share() * (dist.get_world_size() if "split" in KIND else 1)
    loader = DataLoader(data, batch, shuffle=None if "stream" in KIND else True)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with_state = loader if "stateful" in KIND else None
    with make_job(accelerator, PLAN["path"], loader=with_state, every=100) as job:
        accelerator.load_state()
        say("restored", step=job.steps, source=job.restored_from)
        own_epochs = range(job.steps // STEPS, EPOCHS)
        for epoch in own_epochs if "skip" in KIND else job.epochs(EPOCHS):
            for batch in skipped(job, loader, epoch) if "skip" in KIND else job.batches(loader):
                call.ping()
                reach(f"step {job.steps + 1}", call.iteration)
                accelerator.backward(ddp(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                model.tell(job.steps + 1, epoch)
                job.step()


def skipped(job: Any, loader: Any, epoch: int) -> Any:
    """What is left of the epoch, for a program that counts by itself."""
    left = skip_first_batches(loader, job.steps - epoch * STEPS)
    loader.set_epoch(epoch)  # not that of `left`: it does not reach the sampler
    left.iteration = epoch
    return left


@inprocess.Wrapper()
def main(call: inprocess.CallWrapper) -> None:
    reset_state()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = Model()
    (with_trainer if KIND.startswith("trainer") else with_accelerate)(call, model)
    weights = sum(p.double().sum().item() for p in model.parameters()).hex()
    if IS_EXACT:
        say("computed", name="weights", value=weights)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
