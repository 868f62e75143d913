"""What a Trainer's job refuses, and the part of its checkpoint that belongs to each rank."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outlast.errors import CheckpointMismatch


def trainer(world_size: int, **more: Any) -> Any:
    return SimpleNamespace(args=SimpleNamespace(world_size=world_size), **more)


def test_another_number_of_processes_is_refused_with_what_to_do() -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    from outlast.integrations.transformers.progress import Losses

    before = Losses(trainer(2)).state_dict()
    Losses(trainer(3)).load_state_dict(before)  # of the start: no data were used yet
    with pytest.raises(
        CheckpointMismatch, match=r"saved by 2 processes, and there are 3 now.*begin"
    ):
        Losses(trainer(3)).load_state_dict({**before, "sum": 1.0})


def test_another_number_of_processes_with_as_many_samples_in_a_step() -> None:
    """Trainer logs the mean of the losses, and the sum of the operations."""
    pytest.importorskip("transformers", reason="make test-ports")
    from outlast.integrations.transformers.progress import Losses

    now = Losses(trainer(4))
    now.step_samples, now.epoch_steps = 24, 12
    before = {"world_size": 2, "step_samples": 24, "epoch_steps": 12, "total": 8.0, "logged": 3}
    found = now.resized([{**before, "sum": each, "flos": 10.0} for each in (1.0, 2.0)])
    assert found == {**before, "sum": 1.5, "flos": 5.0}
    now.load_state_dict(found)
    now.step_samples = 48
    with pytest.raises(CheckpointMismatch, match="with 24 and 48 samples in a step"):
        now.load_state_dict(found)
    # Trainer's position is a number of steps: with dataloader_drop_last, each process drops others.
    now.step_samples, now.epoch_steps = 24, 13
    with pytest.raises(CheckpointMismatch, match="12 and 13 steps in an epoch"):
        now.load_state_dict(found)


@pytest.mark.parametrize(
    ("arguments", "seedable", "error"),
    [
        ({}, False, "use_seedable_sampler=False is not supported"),
        ({"ignore_data_skip": True}, True, "ignore_data_skip=True.* is not supported: after a"),
    ],
)
def test_an_order_of_samples_that_is_not_restored_is_refused(
    arguments: dict[str, bool], seedable: bool, error: str
) -> None:
    pytest.importorskip("transformers", reason="make test-ports")
    from outlast.integrations.transformers.progress import check_supported

    config = SimpleNamespace(use_seedable_sampler=seedable)
    found = trainer(1, accelerator=SimpleNamespace(num_processes=1, dataloader_config=config))
    vars(found.args).update(arguments)
    with pytest.raises(ValueError, match=error):
        check_supported(found)


def test_batches_that_one_process_loads_for_all_are_refused() -> None:
    """accelerate's `skip_first_batches` counts those of each process, and skips too few."""
    pytest.importorskip("transformers", reason="make test-ports")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration
    from torch.utils.data import DataLoader

    from outlast.integrations.accelerate import declare_order, reset_state

    reset_state()
    configuration = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    loader = accelerator.prepare(DataLoader(range(8)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dispatch_batches=True with a data set that has a length"):
        declare_order(loader)


def test_a_sampler_that_draws_another_order_is_refused(tmp_path: Path) -> None:
    """Its order is in no generator that torch knows: another one than that of the steps done."""
    pytest.importorskip("transformers", reason="make test-ports")
    import torch
    from torch.utils.data import Dataset
    from transformers import TrainerCallback, TrainingArguments

    from outlast.integrations.transformers import JobTrainer

    orders = iter(([0, 1, 2, 3], [3, 2, 1, 0]))

    class Data(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.ones(2) * index, "labels": torch.ones(1)}

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": (super().forward(x) - labels).square().mean()}

    class Sampler(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(next(orders))

        def __len__(self) -> int:
            return 4

    class Own(JobTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return Sampler()

    class Fault(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 2:
                raise ArithmeticError("a planned fault")

    def train(*callbacks: Any) -> None:
        args = TrainingArguments(
            str(tmp_path),
            num_train_epochs=1,
            per_device_train_batch_size=1,
            save_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        Own(Model(2, 1), args, train_dataset=Data(), callbacks=list(callbacks)).train()

    with pytest.raises(ArithmeticError):
        train(Fault())
    with pytest.raises(ValueError, match=r"another order than before.*torch\.Generator"):
        train()


def test_a_stream_that_begins_again_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer's own way to skip what is done counts one pass only."""
    pytest.importorskip("transformers", reason="make test-ports")
    import torch
    from torch.utils.data import IterableDataset
    from transformers import TrainingArguments

    from outlast.integrations.transformers import JobTrainer

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return ({"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(4))

    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
            return {"loss": (super().forward(x) - labels).square().mean()}

    for steps, told in ((2, 0), (4, 1)):
        out = str(tmp_path / str(steps))
        args = TrainingArguments(
            out,
            max_steps=steps,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        JobTrainer(Model(2, 1), args, train_dataset=Stream()).train()
        assert caplog.text.count("begins again after step 2") == told, caplog.text
