"""`JobCallback`: a fit of Lightning's Trainer whose checkpoints an `outlast.Job` makes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import outlast
from outlast.elastic.loader_position import LoaderPosition, has_no_state
from outlast.inprocess import CallWrapper
from outlast.integrations.lightning.log_files import LogFiles
from outlast.integrations.lightning.states import CallbackStates, LoopStates, states_of

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
            it, the position in the `DataLoader` of the fit is saved.
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
        self._handlers: dict[int, Any] = {}  # the job's, by signal
        self._global_step = 0
        self._logs: LogFiles | None = None

    # ------------------------------------------------------------------------- begin and end

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Continues the logs of an earlier fit: before `ModelCheckpoint` asks for their folder.
        Becomes the first callback: others use in `on_fit_start` what was restored.
        """
        if stage == "fit":
            trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
            self._logs = LogFiles(trainer, self._path)
            self._logs.continue_versions()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the newest checkpoint; without one, saves the initial state."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={trainer.ckpt_path!r}): JobCallback continues at the newest "
                f"checkpoint in {os.fspath(self._path)!r}. Leave ckpt_path out"
            )
        if not trainer.optimizers:
            raise ValueError("JobCallback needs an optimizer: configure_optimizers returned none")
        callbacks = CallbackStates(trainer)
        loops = LoopStates(trainer, lambda: self._count_step(trainer))
        self.job = outlast.Job(
            self._path,
            model=trainer.strategy.model,  # in DDP
            optimizer=trainer.optimizers[0],
            loader=_position_of(trainer) if self._loader is None else self._loader,
            states={**states_of(trainer, loops, callbacks), **self._states},
            **self._options,
        )
        self.job.leave_epochs_to_framework()
        step = self.job.restore()
        if self._logs is not None:
            self._logs.begin(step)
        loops.resume(callbacks, bool(self.job.restored_from))
        self._global_step = trainer.global_step
        self._handlers = {each: signal.getsignal(each) for each in signal.valid_signals()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the job after this hook of the others, which may put averages into the module."""
        trainer.strategy.on_train_end = lambda: self._close(None)

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
        self._put_handlers_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks that the loader that trains is the one saved."""
        self._put_handlers_back()
        loaders = trainer.fit_loop._combined_loader
        used = [] if loaders is None else loaders.flattened
        if self._loader is not None and all(each is not self._loader for each in used):
            raise ValueError(
                f"JobCallback saves the position of a {type(self._loader).__name__}, but the fit "
                f"trains with {', '.join(type(each).__name__ for each in used)}: pass the same "
                "object to JobCallback(loader=...) and to trainer.fit"
            )

    def _put_handlers_back(self) -> None:
        """Installs the job's signal handlers again: Lightning puts its own in front of those that
        it finds after `on_fit_start`. The one for SIGTERM broadcasts to the other ranks from within
        the signal handler, in the middle of any step: the other ranks are in another collective,
        and the job hangs or fails. On Slurm, the one for the requeue signal saves there too.
        """
        if threading.current_thread() is not threading.main_thread():
            return  # Lightning installs handlers in the main thread only
        for number, handler in self._handlers.items():
            # `None`: not installed from Python, and so not replaced by Lightning either.
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    # --------------------------------------------------------------------------------- steps

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets `ReduceLROnPlateau` step at the end of an epoch that was resumed: Lightning would
        leave this out, because its checkpoints need not have the metrics.
        """
        trainer.fit_loop.restarting = False
        self.on_validation_start()

    def on_validation_start(self, *_: Any) -> None:
        """Ends the copy of a save: from here on, callbacks such as `WeightAveraging` may write."""
        if self.job is not None:
            self.job.end_copy()

    def _count_step(self, trainer: Trainer) -> None:
        """Counts a step of the optimizer, not each batch: a checkpoint has no half gradients."""
        if self.job is not None and trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            if self._logs is not None:
                self._logs.completed(self.job.steps + 1)
            self.job.step()

    # --------------------------------------------------------------------------------- pings

    def _ping(self, *_: Any, **__: Any) -> None:
        if self._call is not None:
            self._call.ping()

    on_train_batch_end = on_validation_batch_start = _ping

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._ping()
        if trainer.fit_loop._skip_backward:  # an SWA would use gradients from before a restart
            pl_module.zero_grad()


def _position_of(trainer: Trainer) -> LoaderPosition:
    """The position in the loader that the program, or its data module, has yet to return. If the
    fit has several loaders, or makes new ones for each epoch, it uses them unchanged.
    """
    loop = trainer.fit_loop
    position = LoaderPosition(lambda: trainer.current_epoch, trainer.world_size)
    load_states = loop._load_combined_loader_states

    def replace_loader() -> None:
        combined = loop._combined_loader
        found = [] if combined is None else combined.flattened
        renewed = trainer.reload_dataloaders_every_n_epochs
        if combined is not None and len(found) == 1 and not renewed and has_no_state(found[0]):
            combined.flattened = [position.of(found[0])]
        load_states()

    # Lightning calls this when it has the loader, before it iterates it.
    loop._load_combined_loader_states = replace_loader
    return position


def _save_nothing(filepath: Any, *_: Any, **__: Any) -> None:
    log.warning("%s is not saved: a fault has ended the fit, and a save needs all ranks", filepath)
