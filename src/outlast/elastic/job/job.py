"""`Job`: what a training job consists of, saved together and restored at any size.

    with outlast.Job("checkpoints", model=model, optimizer=optimizer, loader=loader) as job:
        job.restore()
        for epoch in range(loader.epoch, 10):
            for images, labels in loader:
                ...
                optimizer.step()
                job.step()

Every rank makes one. It saves when a save is due, and on a signal: then all ranks save after the
same step, and leave with an exit code that a scheduler takes for "start me again".
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from outlast.async_checkpoint import Checkpointer, Retention, SaveHandle
from outlast.coordination.call_ledger import connect_ledger
from outlast.coordination.collectives import least
from outlast.elastic.job import save_schedule
from outlast.elastic.job.contents import Training
from outlast.elastic.job.preemption import Signals, StopAgreement
from outlast.elastic.job.save_schedule import Due
from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
from outlast.errors import CheckpointError

__all__ = ["Job"]

log = logging.getLogger("outlast.elastic")

TOLD_TO_STOP = 143  # 128 + SIGTERM: schedulers take it for "ended because it was told to"
_told: list[str] = []  # why this process is to end, once that is decided


class Job:
    """Binds what makes up the state of a training, and saves it as one.

    What it saves: the model's parameters and buffers (of the module inside DDP or
    `ConsistentDDP`), the optimizer, the position in the data, whatever else is given, the random
    generators of each replica, and counters. It is found again by a job of any size; sharded
    tensors (FSDP2, DTensor) are resharded.

    Args:
        path: of the checkpoints, as for `Checkpointer`.
        model: the module.
        optimizer: its optimizer.
        loader: an `ElasticLoader`, or anything with `state_dict` and `load_state_dict`.
        states: more of what has these two methods, by name: a scheduler, a scaler, an EMA.
        every: steps between two saves, or time; `None` for none but the last, at the end of the
            `with` block or when the job is told to stop.
        keep: which checkpoints stay.
        overlap: whether to copy beside the next forward and backward pass.
        random: whether to save the random generators (Python, NumPy, torch) of each replica. A
            replica that was not there before keeps its own.
        signals: on which to save and end. The second of a kind does what it always does.
        grace: how long the last save may take.
        exit_code: with which the process ends then.
        options: for `Checkpointer`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any = None,
        states: Mapping[str, Any] | None = None,
        every: int | datetime.timedelta | None = 100,
        keep: Retention | None = None,
        overlap: bool = True,
        random: bool = True,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1),
        grace: datetime.timedelta = datetime.timedelta(seconds=30),
        exit_code: int = TOLD_TO_STOP,
        **options: Any,
    ) -> None:
        save_schedule.check(every)
        self._training = Training(model, optimizer, loader, states or {})
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0
        self._numbers = tuple(signals)
        self._grace = grace
        self._exit_code = exit_code
        self._group = options.get("group")
        self.checkpointer = Checkpointer(
            path,
            keep=keep if keep is not None else Retention(last=2),
            overlap=optimizer if overlap else (),
            **options,
        )
        self._training.rank = self.checkpointer.rank
        self._training.world_size = self.checkpointer.world_size
        self._training.random = random
        self._ledger = connect_ledger("job", self._group)
        self._stop: StopAgreement | None = None
        self._signals: Signals | None = None
        self._due = Due(every, self._ledger)
        self._began = time.monotonic()
        self._last_saved = -1

    @property
    def rank(self) -> int:
        """Of this replica."""
        return self.checkpointer.rank

    @property
    def model(self) -> nn.Module:
        """As it was given."""
        return self._training.model

    @property
    def module(self) -> nn.Module:
        """What is saved of it: that inside DDP."""
        return self._training.module

    @property
    def optimizer(self) -> Optimizer:
        """Its optimizer."""
        return self._training.optimizer

    @property
    def loader(self) -> Any:
        """The data."""
        return self._training.loader

    @property
    def states(self) -> dict[str, Any]:
        """What else is saved, by name."""
        return self._training.states

    def restore(self, step: int | None = None) -> int:
        """Loads the newest valid checkpoint, or that of `step`. Called on all ranks, before the
        first step.

        Where there is none, it saves what there is, and waits for that: a process that survives a
        fault has trained on since, and must find back to the beginning as any other.

        Returns:
            How many steps it had done; 0 if there is no checkpoint.

        Raises:
            CheckpointError: as `Checkpointer.restore`; or a state, here or on another rank, could
                not be loaded: names it. Everything is then as it was before.
            ValueError: if the data would come in another order; likewise.
        """
        before, counters = self._training.backup(), self._counters()
        try:
            state, optional = self._training.room()
            state["counters"] = dict(counters)
            found = self.checkpointer.restore(state, step=step, optional=optional)
            if found is not None:
                self._apply_together(state)
        except Exception:
            self._training.put_back(before)
            self._set_counters(counters)
            raise
        if found is None:
            self._training.put_back(before)
            self.save().wait()
        self.module.zero_grad()  # a pass that a fault has ended may have left some
        self._last_saved = self.steps
        self._due.begin(self.steps)
        self._listen()
        if _told:  # decided before a restart in place: the other ranks have left
            raise SystemExit(self._exit_code)
        return self.steps

    def step(self, samples: int | None = None) -> None:
        """A step of the optimizer is complete. Saves when it is time; ends the process, saved, when
        a rank was told to stop.

        Args:
            samples: trained on in this step, over all replicas; for the counter. An
                `ElasticLoader` knows by itself.

        Raises:
            SystemExit: when the job was told to stop, after the save.
            CheckpointError: an earlier save that failed.
        """
        if self._stop is None:
            self._listen()
        self.steps += 1
        trained = self.loader.done() if hasattr(self.loader, "done") else None
        self.samples += samples if samples is not None else trained or 0
        assert self._stop is not None
        if self._stop.ends_after(self.steps, self._grace.total_seconds()):
            self._end()
        elif self._due.comes(self.steps):
            self.save()

    def save(self, metric: float | None = None) -> SaveHandle:
        """Saves now, in the background. Called on all ranks."""
        if self._last_saved == self.steps:
            self.checkpointer.wait()  # `step` has just done so: this one replaces it
        if isinstance(self.model, ConsistentDDP):
            self.model.average_statistics()
        state = {**self._training.state(), "counters": self._counters()}
        handle = self.checkpointer.save(self.steps, state, metric=metric)
        self._last_saved = self.steps
        return handle

    def stop(self, why: str = "stop() was called") -> None:
        """Has all ranks save after the same step, and end. For whoever hears that the machine will
        be taken away; any thread of any rank may call it.
        """
        if self._stop is None:
            raise ValueError("restore() or step() comes first")
        self._stop.request(why)

    def close(self) -> None:
        """Waits for the saves that are under way, and gives everything back.

        Raises:
            CheckpointError: a save that failed.
        """
        self._unlisten()
        _told.clear()
        self.checkpointer.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._unlisten()
        if kind is None and self.steps and self._last_saved != self.steps:
            self.save()
        self.checkpointer.__exit__(kind, error, trace)
        if kind is None or issubclass(kind, SystemExit):
            _told.clear()

    # ------------------------------------------------------------------------------ within

    def _end(self) -> None:
        """The last save, and the end of the process."""
        assert self._stop is not None
        _told.append(self._stop.reason)
        log.warning("stopping after step %d: %s", self.steps, self._stop.reason)
        if self._last_saved != self.steps:
            self.save()
        self.checkpointer.wait(self._grace)
        raise SystemExit(self._exit_code)

    def _listen(self) -> None:
        if self._stop is None:
            self._stop = StopAgreement(self._ledger, self.steps + 1)
            self._signals = Signals(self._numbers, self._stop)

    def _unlisten(self) -> None:
        if self._signals is not None:
            self._signals.close()
            self._signals = None
        if self._stop is not None:
            self._stop.close()
            self._stop = None

    def _apply_together(self, state: dict[str, Any]) -> None:
        """Raises on all ranks, if one cannot: the others would wait for it in a collective."""
        nobody = 1 << 62
        error: Exception | None = None
        try:
            self._training.apply(state, begun=int(state["counters"]["steps"]) > 0)
            self._set_counters(state["counters"])
        except Exception as e:  # noqa: BLE001 - raised below, when the others know
            error = e
        first = least(nobody if error is None else self.rank, self._group)
        if error is not None:
            raise error
        if first != nobody:
            raise CheckpointError(f"rank {first} could not load its state: its own error says why")

    def _counters(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds + time.monotonic() - self._began,
        }

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        self.steps, self.samples = int(counters["steps"]), int(counters["samples"])
        self.seconds = float(counters["seconds"])
        self._began = time.monotonic()
