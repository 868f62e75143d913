"""`Job`: saves the state of a training run as one checkpoint, and restores it at any world size.

Every rank creates a `Job`. It saves on schedule, and on a signal: then all ranks save after the
same step, and exit with a code that tells a scheduler to restart the job.

    Job(...)    opens the folder of the checkpoints           async_checkpoint/checkpointer.py
                divides the state into parts                  training_state.py, parts.py
    restore     sees what all ranks have, and loads the best  restoring.py, live/choice.py
                notes what a fault must not lose              live/recorder.py
    step        counts the step                               training_state.py, epochs.py
                notes it                                      live/recorder.py
                checks it                                     silent_faults/job_checks.py
                runs what belongs to it, and when the body    iteration_end.py, iteration.py
                of the loop has ended, stops or saves         saves.py
    __exit__    makes the last save, or keeps what there is   ending.py
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, SupportsFloat, TypeVar

from torch.optim import Optimizer

from outlast.async_checkpoint import Checkpointer, Retention, SaveHandle
from outlast.coordination.training_step import report_step
from outlast.elastic.job.counters import StepEvents
from outlast.elastic.job.ending import Ending
from outlast.elastic.job.fallback import Fallback
from outlast.elastic.job.iteration_end import IterationEnd
from outlast.elastic.job.model_parts import restore_modes
from outlast.elastic.job.models import Models, Optimizers, by_name, check_models
from outlast.elastic.job.progress import JobProgress
from outlast.elastic.job.restoring import Restoring
from outlast.elastic.job.same_on_all_ranks import (
    SameParameters,
    check_equal_models,
    check_nothing_to_restore,
)
from outlast.elastic.job.saves import Saves, check_interval
from outlast.elastic.job.training_state import TrainingState, check_stateful
from outlast.elastic.silent_faults.job_checks import Check, JobChecks, TrustedRestore, check_of
from outlast.elastic.stop_signals import PREEMPTED, SIGNALS, StopSignals
from outlast.inprocess.running_call import long_phase, running_call
from outlast.system.arguments import (
    Duration,
    as_int,
    as_number,
    as_timedelta,
    check_options,
    options_of,
)

T = TypeVar("T")


class Job(JobProgress):
    """Saves and restores the state of a training run as a unit.

    A checkpoint contains the model's parameters and buffers, the optimizer, the position in the
    data, the objects of `states`, the random generators of each rank, and counters. A job of any
    world size can load it; sharded tensors (FSDP2, DTensor) are resharded.

    Args:
        path: the folder of the checkpoints, as for `Checkpointer`.
        model: the module, or several by name, `{"g": generator, "d": discriminator}`: of these, a
            checkpoint has `g.layer.weight`. Some may have no optimizer: a teacher, an EMA.
        optimizer: its optimizer, or several by name.
        loader: an `ElasticLoader`, or any object with `state_dict` and `load_state_dict`.
        states: more objects with these two methods, by name: a scheduler, a scaler, an EMA.
        every: steps between two saves, or time; `None` saves only at the end of the `with` block
            and when the job is told to stop.
        keep: which checkpoints to keep, or how many of the newest.
        overlap: whether to copy the optimizer's tensors, which include the parameters, during the
            next forward and backward pass; or other optimizers, as for `Checkpointer`.
        random: whether to save the random generators (Python, NumPy, torch) of each rank. A rank
            that did not exist before keeps its own.
        signals: the signals on which to save and exit, by default SIGTERM, SIGINT, SIGUSR1 and
            SIGHUP (unless it is ignored, as under `nohup`). A second SIGINT has its usual effect.
        grace: how long the last save may take, and is tried again, after a request to stop; at the
            end of the training it is tried again for ten minutes.
        fallback: a second folder, or URL, that all ranks share: if the last save keeps failing, it
            is made in a folder in it that is named after `path`, where `restore` finds it.
        exit_code: the exit code of a job that was told to stop.
        min_ranks: the smallest number of ranks with which a restart in place may continue. By
            default all ranks are needed: the job ends with an error if a lost rank is not replaced.
            (A new job may have any number of ranks.)
        checks: `ReplicaCheck`, `StragglerCheck`, or another `FiniteCheck` than the default one.
        live: whether to continue after a restart in place from the state that the surviving ranks
            have, if it is newer than the newest checkpoint. "auto": if it is possible; a log line
            of level INFO says why it is not. True: it is an error if it is not possible. False:
            never, and nothing is noted after a step. On an accelerator, the host waits for the
            gradients before each step of an optimizer.
        options: passed to `Checkpointer`: `group`, `max_in_flight`, `on_failure`, `threads`,
            `linger`, `timeout`, `events`, `replicas`, `replica_bandwidth`.

    Attributes:
        checkpointer: the `Checkpointer` of the job.
        rank: the rank of this process.
        module: the module that is saved: the one inside DDP, `ConsistentDDP` and `torch.compile`; a
            `ModuleDict` of several.
        model, optimizer, loader, states: as given.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: Models,
        optimizer: Optimizers,
        loader: Any = None,
        states: Mapping[str, Any] | None = None,
        every: int | datetime.timedelta | None = 100,
        keep: Retention | int | None = None,
        overlap: Optimizer | Iterable[Optimizer] | bool = True,
        random: bool = True,
        signals: Iterable[int] = SIGNALS,
        grace: Duration = datetime.timedelta(seconds=30),
        fallback: str | os.PathLike[str] | None = None,
        exit_code: int = PREEMPTED,
        min_ranks: int | None = None,
        checks: Check | Iterable[Check] = (),
        live: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        check_options("Job", options, options_of(Checkpointer) | options_of(Job))
        every, self._path = check_interval(every), os.fspath(path)
        check_stateful(loader, states or {})
        check_models(model, optimizer, states or {})
        if min_ranks is not None:
            min_ranks = as_int("min_ranks", min_ranks, at_least=1)
        grace = as_timedelta("grace", grace, allow_zero=True)
        if live not in (True, False, "auto"):
            raise ValueError(f"live must be True, False or 'auto', not {live!r}")
        self._group, self._call = options.get("group"), running_call()
        if live is True and self._call is None:
            raise ValueError("live=True: without inprocess.Wrapper, no rank survives a fault")
        if self._call is not None:
            self._call.require_ranks(min_ranks)
        # The folder of the checkpoints, which other ranks open at the same time.
        self._checks = JobChecks(check_of(checks))
        options["keep"] = self._checks.retention(2 if keep is None else keep)
        overlap = list(by_name(optimizer).values()) if overlap is True else overlap
        self.checkpointer = Checkpointer(path, overlap=overlap, **options)
        self.rank, world_size = self.checkpointer.rank, self.checkpointer.world_size
        # The state, and what must be the same of it on all ranks.
        self.model: Any = model  # of the type that was given
        self.optimizer: Any = optimizer
        self.loader, self.states = loader, dict(states or {})
        self._training = TrainingState(
            model,
            optimizer,
            loader,
            self.states,
            self.rank,
            world_size,
            random=random,
            max_skips=self._checks.max_skips,
        )
        self.module, self._skipped = self._training.module, self._training.skipped
        self._parameters = SameParameters(self._training, self.checkpointer)
        # What restores it, and what saves it.
        second = None if fallback is None else Fallback(fallback, self.checkpointer, self._group)
        finite = partial(self._checks.must_be_finite, self.module)
        self._restoring = Restoring(
            self._training,
            self.checkpointer,
            self.checkpointer.ledger,
            self._group,
            self._call if live else None,
            required=live is True,
            fallback=second,
            create=lambda group: Checkpointer(path, **{**options, "group": group}),
            finite=finite,
        )
        self._step_events = StepEvents(self.checkpointer.emitter)
        self._saves = Saves(self._training, self.checkpointer, finite, every)
        self._may_save = False  # restored, or there is nothing to restore
        # Last: a constructor that raises leaves no handlers.
        self._stop = StopSignals(
            self.checkpointer, signals=signals, grace=grace, exit_code=exit_code
        )
        self._ending = Ending(
            self._call,
            self.checkpointer,
            self._checks,
            self._saves,
            self._restoring,
            self._stop,
            second,
        )
        self._end = IterationEnd(
            self._training, self._restoring, self._saves, self._stop, self._ending, self.rank
        )

    def restore(self, step: int | None = None) -> int:
        """Continues from the newest state: after a restart in place, that of the ranks which have
        survived; otherwise the newest valid checkpoint, or that of `step`. Call it on all ranks,
        before the first step. `restored_from` says which it was.

        Without a checkpoint, saves the initial state and waits for that save: after a fault before
        the first scheduled save, survivors, which have continued training, return to it.

        Returns:
            The number of steps before the restored state; 0 if there is none.

        Raises:
            CheckpointMismatch: if the checkpoint does not fit; names what differs.
            CheckpointError: as `Checkpointer.restore`; or if a state could not be loaded, here or
                on another rank: names it. Everything is then as it was before.
            ValueError: if the samples would come in another order; everything is then as before. If
                the optimizer's parameters are not the same on all ranks, as with pipeline stages,
                or the model is not, and there is no checkpoint yet. With `live=True`, if the state
                of the ranks cannot be continued from. If an object of `states` has
                a value that a checkpoint cannot give back: names both.
            SystemExit: if the job was told to stop before a restart in place, after a state that
                was in memory only has been saved.
        """
        self._training.check_savable()
        known = self._restoring.look(step, self._parameters)
        trusted = TrustedRestore(self.checkpointer, step, known)
        # With a step, from a checkpoint: survivors have a state from after a silent fault.
        found = self._restoring.restore(trusted.step)
        self._training.files.begin(is_restored=found is not None)
        if self._call is not None:
            restore_modes(self.module, self._call)
        self._may_save = True
        if trusted.skip is not None:
            self._skipped.leave_out(trusted.skip, self.checkpointer.emitter, self.rank)
        if found is None:
            check_equal_models(self.module, self.checkpointer.ledger, self._group)
            with long_phase(self.checkpointer.session.writer.timeout_s or None):
                self._saves.save().wait()
        # From now on, a fault finds this state in memory.
        self._restoring.begin()
        self.module.zero_grad()  # a backward pass that a fault interrupted may have left gradients
        save_is_due = found is not None and self._saves.restored()
        trusted.finish(self._saves.save)
        self._start_checks(self._training.counters.clean_step)
        if self._restoring.from_survivors:
            timeout_s = self.checkpointer.session.writer.timeout_s
            self._checks.compare_now(timeout_s, required=True)  # before DDP copies a flip
        # What follows each step begins after this one: saves, stops, functions, epochs.
        steps = self.steps
        self._saves.schedule.start(steps)
        self._step_events.begin(steps)
        self._stop.begin(steps, self._end.save_for_stop)
        self._end.restored(save_is_due=save_is_due)
        self._training.epochs.restored()
        if self._restoring.from_survivors and not self._training.iteration.rest:
            self._training.epochs.warn_if_unused()
        self._end.say_rest()
        return self.steps

    def epochs(self, n: int) -> Iterator[int]:
        """The epochs that are left of `n`: `for epoch in job.epochs(n)`.

        An epoch is over when the loop comes back for the next one. A job that continues gets the
        epoch of the restored step again; if all its batches are done, only the code of its end
        runs: on the state of that step, with the same random numbers. A program that leaves the
        loop with `break` (early stopping), and then ends without an error, is complete: started
        again, it gets no epoch, unless it asks for more than before.

        Raises:
            ValueError: if `n` is negative.
        """
        return self._end.epochs(self._training.epochs.loop(n))

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of a loader that are left of the present epoch: those that the loop had not
        taken at the restored step. An epoch may have several such loops, one after another; one
        within another is an evaluation, and always whole.

        Sets the epoch of a loader, sampler or data set with `set_epoch`. A loader with a state, as
        `ElasticLoader` has, is given to `Job`, too, and continues from its own position. Any other
        `DataLoader` draws the same order again, and skips the indices of what is done; with another
        number of ranks, only if it has a `DistributedSampler` and batches as large over all ranks
        (or a batch sampler with an attribute `resizable_batch`, the samples of such a batch). An
        `IterableDataset`, or any other iterable, is read again up to there.

        Raises:
            ValueError: outside of a loop over `epochs`; if a loader has a position that the job
                does not save; if the loader is not the one of the restored step.
        """
        return self._end.batches(self._training.epochs.batches(loader))

    def step(self, samples: int | None = None, loss: Any = None) -> None:
        """Call it after each step of the optimizer. Calls the functions of `after_steps`; then, or
        in a loop over `batches` when that comes back for the next one, saves on schedule, and saves
        and ends the process if any rank was told to stop.

        Args:
            samples: how many this step had, over all ranks; without them, `samples` of the job is
                unknown, unless an `ElasticLoader` or a `ShardedStream` counts them.
            loss: the loss of this rank, a number or a tensor, for `FiniteCheck`.

        Raises:
            NonFinite: if the loss or a parameter is infinite or NaN: see `FiniteCheck`. With
                `"skip"`, a `SkipBatches`.
            ValueError: at the first step, if there are checkpoints and `restore` was not called; or
                if batches may have to be left out, and the job does not know them. In a loop over
                `batches` within another one.
            SystemExit: after the last save, if the job was told to stop.
            CheckpointError: if an earlier save failed.
        """
        self._check_restored()
        self._end.check_step()
        self._training.stepped(samples)
        steps = self.steps
        self._parameters.compare_lengths()
        self._end.counted(sys._getframe(1))
        self._skipped.check_known()
        self._step_events.completed(steps)
        self._training.counters.clean_step = self._checks.clean_step(steps)
        # From here on, a fault loses nothing of this step.
        self._restoring.completed()
        report_step(steps, completed=True)
        self._checks.completed(steps, loss)
        # Here, or where the loop over `batches` comes back: the stop, or the save.
        self._end.stepped()

    def after_steps(self, n: int, function: Callable[[], object]) -> None:
        """Makes `function` a part of each n-th step: an evaluation, the best model, a row of a log.
        Call it before `restore`, on all ranks; several are called in this order.

        `step` calls it without arguments, on all ranks, when the step is counted. A checkpoint of
        the step has its effects. If a fault or a kill comes before all functions of a step have
        ended, on any rank, `restore` calls them again first, from the same state and with the same
        random numbers: what they use, such as the model, must be there when `restore` is called.

        Raises:
            ValueError: after `restore`, or if `n` is less than 1.
        """
        self._end.add(n, function, is_restored=self._may_save)

    def save(self, metric: SupportsFloat | None = None) -> SaveHandle:
        """Saves now, in the background; in a function of `after_steps`, once the step's functions
        have ended (in a loop over `batches`, the loop's body); at the end of an epoch, after its
        `batches`, once the loop over `epochs` comes back. Call it on all ranks.

        Args:
            metric: of this step, to keep the best checkpoints: see `Retention`. A number, or a
                tensor of one element.

        Raises:
            TypeError: if `metric` is not a number.
            ValueError: between an optimizer's step and `step`; or as `step`, before `restore`.
        """
        self._check_restored()
        number = None if metric is None else as_number("metric", metric)
        return self._end.save(number, sys._getframe(1))

    def close(self) -> None:
        """Waits for background saves, and releases threads and signal handlers.

        Raises:
            CheckpointError: if a save failed.
        """
        self._step_events.write()
        self._stop.close(failed=True)
        self._end.close()
        try:
            self._ending.close()
        finally:
            self._training.files.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._step_events.write()  # first: a restart may interrupt the rest
        self._stop.close(failed=True)  # this rank begins no more steps
        try:
            if kind is None:
                self._end.leave()
                self._ending.complete()
                self._skipped.say_at_end(self.rank)
            else:
                self._ending.fail(kind)
        finally:
            self._end.close()
            self._ending.leave()
            self._training.files.close()

    def _check_restored(self) -> None:
        if self._may_save:
            return
        check_nothing_to_restore(self.checkpointer, self._path, self.steps)
        self._parameters.check()
        self._start_checks()
        self._may_save = True

    def _start_checks(self, clean: int | None = None) -> None:
        go_back = partial(self._skipped.go_back, self.checkpointer)
        ledger = self.checkpointer.ledger
        self._checks.start(self.module, self.checkpointer, ledger, self.steps, go_back, clean)
