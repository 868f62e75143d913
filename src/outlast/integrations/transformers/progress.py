"""What a `Job` needs of a Trainer: its arguments, its state besides model, optimizer, scheduler."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from outlast.async_checkpoint import Retention
from outlast.elastic.loader_position import LoaderOrder
from outlast.errors import CheckpointMismatch
from outlast.integrations.common import check_all_ranks


class TrainerProgress:
    """The Trainer's state and those of its callbacks: the same on all ranks. `end_of_step` is what
    Trainer passes to `_maybe_log_save_evaluate` after a step, while that has yet to be called;
    `None` in a checkpoint that was made afterwards.
    """

    may_differ = True  # it says whether this is the main process

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] = {}
        self.end_of_step: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Not `asdict`, which copies a long history in Python: it is turned into text at once.
        fields = dataclasses.fields(trainer.state)
        state = {field.name: getattr(trainer.state, field.name) for field in fields}
        exported: dict[str, Any] = dict(self._loaded)  # until they have their states again
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if not self._loaded and isinstance(each, ExportableState):
                exported.setdefault(type(each).__name__, []).append(each.state())
        state["stateful_callbacks"] = exported
        return {"json": json.dumps(state), "end_of_step": json.dumps(self.end_of_step)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Loads the state; that of the callbacks is kept until `restore_callbacks`."""
        self._trainer.state = TrainerState(**json.loads(saved["json"]))
        self._loaded = json.loads(saved["json"])["stateful_callbacks"]
        self.end_of_step = json.loads(saved["end_of_step"])

    def restore_callbacks(self) -> None:
        """Gives the callbacks and the control of the Trainer their states, at its begin."""
        loaded, self._loaded = self._loaded, {}
        trainer = self._trainer
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if states := loaded.get(type(each).__name__):
                saved = states.pop(0)
                control = saved["args"] if each is trainer.control else {}
                vars(each).update({**saved["attributes"], **control})


class Losses:
    """The losses of this rank that the Trainer has not logged yet, and the order of its samples.

    A `Job` saves them as a data loader, that is, rank by rank. The position in the data, which
    Trainer computes from the number of steps, fits another number of ranks if an epoch has as many
    steps as before, and a step as many samples, which are the next ones of an order over all ranks.

    Attributes:
        step_samples: the samples of a step, if there is such an order; else 0.
        epoch_steps: the steps of an epoch. With `dataloader_drop_last`, each rank drops the rest of
            its own batches, so equal steps do not mean as many.
    """

    resizable = True  # so that `load_state_dict` sees the other number, and can say what to do

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None
        self.step_samples = self.epoch_steps = 0
        self.order = LoaderOrder()

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:  # restored, and not handed to the Trainer yet
            return self._loaded
        trainer = self._trainer
        size = trainer.args.world_size
        saved: dict[str, Any] = {"world_size": size, **self._data}
        if hasattr(trainer, "_tr_loss"):
            saved["sum"] = trainer._tr_loss.item()
            saved["total"] = trainer._total_loss_scalar
            saved["logged"] = trainer._globalstep_last_logged
            saved["flos"] = trainer.current_flos
            # Up to the step before: the state of a rank is noted within a step, and at its end.
            ended = trainer.state.global_step - (trainer._progress.end_of_step is not None)
            loader = trainer.callback_handler.train_dataloader
            saved["order"] = self.order.saved(self._batches(ended), loader)
        return saved

    def _batches(self, steps: int) -> int:
        """How many batches of its epoch are done after so many steps."""
        trainer = self._trainer
        steps %= self.epoch_steps or trainer.state.max_steps
        return steps * int(trainer.args.gradient_accumulation_steps)

    def resized(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """One state for another number of ranks: Trainer logs mean losses and summed operations."""
        found = dict(states[0])
        sizes = {"sum": len(states), "total": len(states), "flos": self._trainer.args.world_size}
        for name in sizes.keys() & found.keys():
            found[name] = sum(each[name] for each in states) / sizes[name]
        return found

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Keeps the losses until `restore`; a `CheckpointMismatch` for other ranks and samples."""
        before, now = saved["world_size"], self._trainer.args.world_size
        samples, steps = saved["step_samples"], saved["epoch_steps"]
        fits = samples and {"step_samples": samples, "epoch_steps": steps} == self._data
        if "sum" in saved and before != now and not fits:
            raise CheckpointMismatch(
                f"this training was saved by {before} processes, and there are {now} now, with "
                f"{samples} and {self.step_samples} samples in a step (0: their order is not known "
                f"for all processes) and {steps} and {self.epoch_steps} steps in an epoch: samples "
                "would be repeated and others skipped. Let per_device_train_batch_size x "
                "gradient_accumulation_steps x processes and the steps of an epoch be the same "
                f"as before, or continue with {before} processes; or write the model with "
                "`trainer.save_model()` there, and begin a new training with it, in another "
                "output_dir"
            )
        self._loaded = saved if "sum" in saved else None

    @property
    def _data(self) -> dict[str, int]:
        return {"step_samples": self.step_samples, "epoch_steps": self.epoch_steps}

    def restore(self) -> None:
        """Gives the losses to the Trainer, once it has set its own to zero: the first loss that it
        logs, and the mean of the whole training, are then as without the restart.
        """
        losses, self._loaded = self._loaded, None
        if losses is not None:
            trainer = self._trainer
            trainer._tr_loss += losses["sum"]
            trainer._total_loss_scalar = losses["total"]
            trainer._globalstep_last_logged = losses["logged"]
            trainer.current_flos = losses["flos"]
            trainer._initial_global_step = 0
            if losses["world_size"] == trainer.args.world_size:
                done, loader = self._batches(trainer.state.global_step), trainer.callback_handler
                self.order.restore(losses["order"], done, loader.train_dataloader)


def check_supported(trainer: Trainer) -> None:
    """A `ValueError` for the first argument that contradicts the job's checkpoints, with advice."""
    args = trainer.args
    check_all_ranks(trainer.accelerator.num_processes, "TrainingArguments(use_cpu=True)")
    unsupported = {
        "auto_find_batch_size": "it trains again with a smaller batch: set the batch size",
        "save_only_model": "training could not continue: leave it out",
        "ignore_data_skip": "after a fault, samples of an epoch would be trained on again, and as "
        "many of the last epoch not at all: leave it out",
        "enable_jit_checkpoint": "it handles SIGTERM, as the job does: leave it out",
    }
    for name, reason in unsupported.items():
        if getattr(args, name, False):
            raise ValueError(f"TrainingArguments({name}=True) is not supported: {reason}")
    if not trainer.accelerator.dataloader_config.use_seedable_sampler:
        raise ValueError(
            "accelerator_config with use_seedable_sampler=False is not supported: the samples "
            "would come in another order after a restart. Leave it out"
        )
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={str(args.hub_strategy)!r} uploads checkpoint folders, which are not "
            'made here: use hub_strategy="end"'
        )
    if trainer.model_init is not None:
        raise ValueError("model_init is not supported: pass model=")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("only DDP and single processes are supported, not DeepSpeed or FSDP")


def retention(args: TrainingArguments) -> Retention:
    """What Trainer's rotation keeps: the newest `save_total_limit` checkpoints and the best one."""
    if args.save_total_limit is None or args.save_total_limit <= 0:
        return Retention()
    best = None if args.metric_for_best_model is None else 1
    return Retention(
        last=args.save_total_limit, best=best, mode="max" if args.greater_is_better else "min"
    )


def count_steps(trainer: Trainer, loader: Any) -> int:
    """The optimizer steps of a training on `loader`, for the scheduler, or a `ValueError`."""
    args, per_epoch = trainer.args, steps_of_epoch(trainer, loader)
    if args.max_steps > 0:
        return int(args.max_steps)
    if not per_epoch:
        raise ValueError("the data set has no length: set max_steps in TrainingArguments")
    steps: int = math.ceil(args.num_train_epochs * per_epoch)
    return steps


def steps_of_epoch(trainer: Trainer, loader: Any) -> int:
    """The number of optimizer steps of an epoch; 0 if it is unknown."""
    try:
        steps: int = math.ceil(len(loader) / trainer.args.gradient_accumulation_steps)
    except TypeError:
        return 0
    return max(steps, 1)
