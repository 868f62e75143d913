"""`JobTrainer`: Hugging Face's Trainer, whose checkpoints an `outlast.Job` makes."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import has_length

import outlast
from outlast.elastic import random_generators
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.inprocess import CallWrapper
from outlast.integrations.accelerate import declare_order
from outlast.integrations.transformers.progress import (
    Losses,
    TrainerProgress,
    check_supported,
    count_steps,
    retention,
    steps_of_epoch,
)

if TYPE_CHECKING:
    from transformers import Trainer as _Mixed
else:
    _Mixed = object  # Trainer follows in the list of base classes

log = logging.getLogger("outlast.integrations")


class PingCallback(TrainerCallback):
    """Pings at each batch, also of evaluations, so that a rank that hangs is found by its steps."""

    def __init__(self, call: CallWrapper) -> None:
        self._call = call

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._call.ping()

    on_substep_end = on_step_end = on_prediction_step = on_step_begin


class JobTrainerMixin(_Mixed):
    """Mixed into a Trainer: `class MyTrainer(JobTrainerMixin, Trainer)`. It saves and restores
    through an `outlast.Job` what Trainer would keep in `checkpoint-N` folders.

    `train()` continues from the newest valid checkpoint, or from a newer step that ranks have kept
    through a fault; without a checkpoint, it starts from the beginning. Trainer decides when to
    save (`save_strategy`), how many checkpoints to keep (`save_total_limit`), and which one is the
    best (`metric_for_best_model`); saves run in the background.

    Args:
        args, kwargs: passed to Trainer.
        job_path: the folder of the checkpoints; by default `outlast` in the Trainer's `output_dir`.
        job: further arguments for `Job`: `every`, `keep`, `min_ranks`, ...
        call: the handle of the wrapped function, for a ping in each batch.

    Attributes:
        job: the `Job` of the current call of `train`.
    """

    def __init__(
        self: Any,
        *args: Any,
        job_path: str | os.PathLike[str] | None = None,
        job: Mapping[str, Any] | None = None,
        call: CallWrapper | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.job: outlast.Job | None = None
        self._job_options, self._call = dict(job or {}), call
        path = Path(self.args.output_dir, "outlast") if job_path is None else job_path
        self._job_path = os.fspath(path)
        self._progress, self._losses = TrainerProgress(self), Losses(self)
        self._generators: random_generators.Generators = {}
        self._last_step = 0  # of the last call of `_maybe_log_save_evaluate`
        self._epoch_end_follows = self._save_is_due = self._stopped = False
        self._metric: tuple[int, float] | None = None
        if call is not None:
            self.add_callback(PingCallback(call))

    def train(
        self: Any, resume_from_checkpoint: bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Trains from the newest valid checkpoint to the end.

        Raises:
            ValueError: if `resume_from_checkpoint` is a folder or False, or an argument
                unsupported.
        """
        if resume_from_checkpoint not in (None, True):
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: training continues at the "
                f"newest valid checkpoint in {self._job_path!r}. To start over, set another "
                "output_dir"
            )
        check_supported(self)
        self.create_optimizer()
        loader = self.get_train_dataloader()
        self.create_scheduler(num_training_steps=count_steps(self, loader))
        batch = declare_order(loader)
        self._losses.step_samples = batch * self.args.gradient_accumulation_steps
        self._losses.epoch_steps = steps_of_epoch(self, loader)
        self._created_lr_scheduler = False  # else Trainer makes another one
        _make_equal_on_all_ranks(self.model)
        states = {"scheduler": self.lr_scheduler, "progress": self._progress}
        if getattr(self.accelerator, "scaler", None) is not None:
            states["scaler"] = self.accelerator.scaler
        options = {"every": None, "keep": retention(self.args), **self._job_options}
        options["states"] = {**states, **options.get("states", {})}
        with (
            outlast.Job(
                self._job_path,
                model=self.model,
                optimizer=self.optimizer,
                loader=self._losses,
                **options,
            ) as job,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(setattr, self, "job", None)
            self.job = job
            job.leave_epochs_to_framework()
            resumed = job.restore() > 0
            self._watch_begin(resumed)
            if not resumed:
                return super().train(None, *args, **kwargs)
            self._generators = random_generators.capture()
            with tempfile.TemporaryDirectory() as folder:
                # Trainer reads its position in the data from there, and nothing else.
                self.state.save_to_json(os.path.join(folder, "trainer_state.json"))
                return super().train(folder, *args, **kwargs)

    # ------------------------------------------ without a job, a folder is read as by Trainer

    def _load_from_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.job is None:
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        if self.job is None:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self: Any, checkpoint: str | None) -> None:
        if self.job is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self: Any, checkpoint: str | None) -> None:
        if self.job is None:
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:  # after Trainer has skipped the data of earlier steps
            random_generators.set_all(self._generators)

    def _load_best_model(self: Any) -> None:
        if self.job is None:
            super()._load_best_model()
            return
        self._save_with_job()  # the last state: the model is not that of the last step afterwards
        self.job.checkpointer.wait()
        step = self.state.best_global_step
        log.info("loading the best model, of step %d (%s)", step, self.state.best_metric)
        best = {"model": plain_state_dict(self.job.module)}
        self.job.checkpointer.restore(best, step=step, strict=False)

    # ------------------------------------------------------------------------ steps and saves

    def _maybe_log_save_evaluate(
        self: Any, loss: torch.Tensor, norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Trainer calls this after each step, and again at the end of an epoch. The step is counted
        # before: what follows belongs to no step, and is done again after a fault. A checkpoint of
        # the last step of an epoch is made the second time: with the evaluation of the epoch.
        step = self.state.global_step
        if self.job is not None and step > self.job.steps:
            self._progress.end_of_step = {
                "norm": norm.item() if isinstance(norm, torch.Tensor) else norm,
                "ignore_keys": args[3],
                "learning_rate": kwargs.get("learning_rate"),
            }
            self.job.step()
            self._progress.end_of_step = None
        self._epoch_end_follows = self._epoch_ends() and step != self._last_step
        self._last_step = step
        super()._maybe_log_save_evaluate(loss, norm, *args, **kwargs)
        if self.job is not None and self._save_is_due and not self._epoch_end_follows:
            self._save_with_job()

    def _epoch_ends(self: Any) -> bool:
        control, epoch = self.control, float(self.state.epoch or 0.0)
        stop: bool = control.should_epoch_stop or control.should_training_stop
        return stop or epoch.is_integer()

    def _watch_begin(self: Any, resumed: bool) -> None:
        handler, begin = self.callback_handler, self.callback_handler.on_train_begin

        def on_train_begin(*args: Any, **kwargs: Any) -> Any:
            del handler.on_train_begin
            self.job.watch_ddp(self.model_wrapped)  # Trainer has just wrapped it
            # What was logged for steps that are made again is not shown any more.
            first = self.job.steps + (self._progress.end_of_step is None)
            for each in handler.callbacks:
                if isinstance(each, TensorBoardCallback):
                    each._SummaryWriter = partial(each._SummaryWriter, purge_step=first)
            self.control = begin(*args, **kwargs)
            if resumed:
                self._finish_step()
            return self.control

        handler.on_train_begin = on_train_begin

    def _finish_step(self: Any) -> None:
        """Does what Trainer does after the step that was restored, before it begins the next."""
        self._losses.restore()
        self._progress.restore_callbacks()
        end, self._progress.end_of_step = self._progress.end_of_step, None
        if end is not None:
            random_generators.set_all(self._generators)  # setting up may have drawn numbers
            self._end_step(end)
            self._generators = random_generators.capture()
        self._stopped = self.control.should_training_stop

    def _end_step(self: Any, end: dict[str, Any]) -> None:
        rest = self.model, None, self.state.epoch, end["ignore_keys"], time.time()
        rate = {"learning_rate": end["learning_rate"]}
        self._maybe_log_save_evaluate(self._tr_loss, end["norm"], *rest, **rate)
        if self._epoch_ends():
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            self._maybe_log_save_evaluate(self._tr_loss, end["norm"], *rest, **rate)

    def _run_epoch(self: Any, model: nn.Module, epoch: int, *args: Any, **kwargs: Any) -> None:
        if self._stopped:  # by the end of the step that was restored
            return
        loader = kwargs["train_dataloader"] if kwargs else args[0]
        if epoch == 1 and not has_length(loader) and self.is_world_process_zero():
            log.warning(
                "the data set, which has no length, begins again after step %d: after a fault "
                "in this pass or a later one, samples of it are repeated. A data set that "
                "repeats itself without an end continues at the right sample",
                self.state.global_step,
            )
        with self._losses.order.epoch(loader, epoch):
            super()._run_epoch(model, epoch, *args, **kwargs)

    def _save_checkpoint(self: Any, model: nn.Module, trial: Any) -> None:
        if self.job is None:
            super()._save_checkpoint(model, trial)
        elif self._epoch_end_follows:
            self._save_is_due = True
        else:
            self._save_with_job()

    def _save_with_job(self: Any) -> None:
        self._save_is_due = False
        self.store_flos()
        if self.state.best_global_step:
            self.state.best_model_checkpoint = self._job_path
        step, metric = self._metric or (-1, None)
        self.job.save(metric if step == self.state.global_step else None)

    def _determine_best_metric(self: Any, metrics: dict[str, float], trial: Any) -> bool:
        is_best: bool = super()._determine_best_metric(metrics=metrics, trial=trial)
        name = self.args.metric_for_best_model
        if name is not None:
            value = metrics[name if name.startswith("eval_") else f"eval_{name}"]
            self._metric = (self.state.global_step, float(value))
        return is_best

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates, as Trainer does; a rank that computes metrics does not count as hung."""
        phase = contextlib.nullcontext() if self._call is None else self._call.long_phase()
        with phase:
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
        return metrics

    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, as Trainer does; the times at the end of the training include earlier runs."""
        if self.job is not None and logs.get("train_runtime"):
            seconds = self.job.seconds + logs["train_runtime"]
            factor = logs["train_runtime"] / seconds
            logs["train_runtime"] = round(seconds, 4)
            for name in ("train_samples_per_second", "train_steps_per_second"):
                if name in logs:
                    logs[name] = round(logs[name] * factor, 3)
        super().log(logs, *args, **kwargs)


class JobTrainer(JobTrainerMixin, Trainer):
    """Hugging Face's Trainer with `JobTrainerMixin`, which describes the additional arguments."""


def _make_equal_on_all_ranks(model: nn.Module) -> None:
    """Gives all ranks the model of rank 0, as DDP does later: a new head has random weights."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), 0)
