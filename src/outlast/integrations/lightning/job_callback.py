"""`JobCallback`: a fit of Lightning's Trainer whose checkpoints an `outlast.Job` makes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import outlast
from outlast.inprocess import CallWrapper
from outlast.integrations.lightning.signal_handlers import SignalHandlers
from outlast.integrations.lightning.states import states_of

log = logging.getLogger("outlast.integrations")


class JobCallback(Callback):
    """Saves and restores a fit through an `outlast.Job`: the module, the optimizers, the
    schedulers, the loops, the callbacks, the position in the data and the random generators.

    Create it with its Trainer, inside the wrapped function: a restart needs new ones of both. The
    fit continues at the newest valid checkpoint; `fit(ckpt_path=...)` is not used with it.

    After the first exception or interrupt that ends a fit, `trainer.save_checkpoint` does nothing:
    it waits for all ranks, and the others are not there.

    Args:
        path: the folder of the checkpoints, as for `Job`.
        loader: the `ElasticLoader` that the fit trains with, or another one with a state. Without
            it, a fit that continues trains the batches that are left of its epoch on data from the
            beginning of the epoch.
        call: the handle of the wrapped function, for a ping in each batch.
        states: more objects with `state_dict` and `load_state_dict`, by name.
        options: passed to `Job`: `every`, `keep`, `min_ranks`, ...

    Attributes:
        job: the `Job` of the current fit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        loader: Any = None,
        call: CallWrapper | None = None,
        states: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.job: outlast.Job | None = None
        self._path, self._loader, self._call = path, loader, call
        self._states, self._options = dict(states or {}), options
        self._handlers = SignalHandlers()
        self._global_step = 0
        self._due = False  # a step was made that `job.step` has not counted yet

    # ------------------------------------------------------------------------- begin and end

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the newest checkpoint; without one, saves the initial state."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): JobCallback continues at the newest "
                f"checkpoint in {os.fspath(self._path)!r}. Leave ckpt_path out"
            )
        if not trainer.optimizers:
            raise ValueError("JobCallback needs an optimizer: configure_optimizers returned none")
        self.job = outlast.Job(
            self._path,
            model=pl_module,
            optimizer=trainer.optimizers[0],
            loader=self._loader,
            states={**states_of(trainer, self), **self._states},
            **self._options,
        )
        self.job.restore()
        self._global_step, self._due = trainer.global_step, False
        self._handlers.remember()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the last step, and waits for background saves."""
        self._count_step()
        self._close(None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Closes the job of a fit that had nothing left to train."""
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the job without a save: neither this rank nor the others could complete one."""
        trainer.save_checkpoint = _save_nothing
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        job, self.job = self.job, None
        if job is not None:
            job.__exit__(None if error is None else type(error), error, None)

    # ------------------------------------------------------------------------------- signals

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Puts the job's signal handlers back: Lightning has replaced them since `on_fit_start`."""
        self._handlers.put_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_sanity_check_start`; checks that the loader that trains is the one saved."""
        self._handlers.put_back()
        loaders = trainer.fit_loop._combined_loader
        used = [] if loaders is None else loaders.flattened
        if self._loader is not None and all(each is not self._loader for each in used):
            raise ValueError(
                f"JobCallback saves the position of a {type(self._loader).__name__}, but the fit "
                f"trains with {', '.join(type(each).__name__ for each in used)}: pass the same "
                "object to JobCallback(loader=...) and to trainer.fit"
            )

    # --------------------------------------------------------------------------------- steps

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Counts a step of the optimizer. A step before a validation is counted after it, and that
        of an epoch's last batch when the epoch has ended: a fit that is resumed would leave out
        the validation and the hooks between a checkpoint and the next batch.
        """
        self._ping()
        # Not after each batch: gradients that are being accumulated are in no checkpoint.
        if trainer.global_step != self._global_step:
            self._global_step, self._due = trainer.global_step, True
        loop = trainer.fit_loop
        if not trainer.is_last_batch and not loop.epoch_loop._should_check_val_fx(
            loop._data_fetcher
        ):
            self._count_step()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the step before a validation within an epoch."""
        if not trainer.sanity_checking and not trainer.is_last_batch:
            self._count_step()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts the last step of the epoch before."""
        self._count_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets `ReduceLROnPlateau` step at the end of an epoch that was resumed: Lightning would
        leave this out, because a checkpoint need not have the metrics. Here the epoch's validation
        comes after the checkpoint.
        """
        trainer.fit_loop.restarting = False

    def _count_step(self) -> None:
        if self._due and self.job is not None:
            self._due = False
            self.job.step()

    # --------------------------------------------------------------------------------- pings

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Pings."""
        self._ping()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Pings."""
        self._ping()

    def _ping(self) -> None:
        if self._call is not None:
            self._call.ping()


def _save_nothing(filepath: Any, *_: Any, **__: Any) -> None:
    log.warning("%s is not saved: a fault has ended the fit, and a save needs all ranks", filepath)
