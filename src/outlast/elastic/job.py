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
import random
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from outlast.async_checkpoint import Checkpointer, Retention, SaveHandle
from outlast.async_checkpoint.ledger import connect_ledger
from outlast.async_checkpoint.step import least
from outlast.elastic.backup import Backup
from outlast.elastic.consistent import ConsistentDDP
from outlast.elastic.preemption import Signals, StopAgreement
from outlast.errors import CheckpointError

__all__ = ["Job"]

log = logging.getLogger("outlast.elastic")

TOLD_TO_STOP = 143  # 128 + SIGTERM: schedulers take it for "ended because it was told to"
_OPTIONAL = ("random.", "states.", "parts.")
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
        if isinstance(every, int) and every < 1:
            raise ValueError(f"every={every} must be at least 1")
        if isinstance(every, datetime.timedelta) and every <= datetime.timedelta():
            raise ValueError(f"every={every} must be longer than nothing")
        self.states = dict(states or {})
        for name, state in {"loader": loader, **self.states}.items():
            lacks = [m for m in ("state_dict", "load_state_dict") if not hasattr(state, m)]
            if state is not None and lacks:
                raise ValueError(
                    f"{name!r} ({type(state).__name__}) has no {' and no '.join(lacks)}"
                )
        self.model = model
        self.module = _inner(model)
        self.optimizer = optimizer
        self.loader = loader
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0
        self._every = every
        self._random = random
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
        self._ledger = connect_ledger("job", self._group)
        self._stop: StopAgreement | None = None
        self._signals: Signals | None = None
        self._began = time.monotonic()
        self._due: int | None = None
        self._due_from = 0
        self._due_since = self._began
        self._last_saved = -1

    @property
    def rank(self) -> int:
        """Of this replica."""
        return self.checkpointer.rank

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
        before = Backup(self._state())
        self._prepare_optimizer()
        state = self._state()
        try:
            # The checkpoint of the beginning has none of what a survivor has (`_apply`).
            optional = (*_OPTIONAL, "optimizer.state.") if self.optimizer.state else _OPTIONAL
            found = self.checkpointer.restore(state, step=step, optional=optional)
            if found is not None:
                self._apply_together(state)
        except Exception:
            self._put_back(before)
            raise
        if found is None:
            self._put_back(before)
            self.save().wait()
        self.module.zero_grad()  # a pass that a fault has ended may have left some
        self._last_saved = self.steps
        self._due, self._due_from, self._due_since = None, self.steps, time.monotonic()
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
        elif self._is_due():
            self.save()

    def save(self, metric: float | None = None) -> SaveHandle:
        """Saves now, in the background. Called on all ranks."""
        if self._last_saved == self.steps:
            self.checkpointer.wait()  # `step` has just done so: this one replaces it
        if isinstance(self.model, ConsistentDDP):
            self.model.average_statistics()
        handle = self.checkpointer.save(self.steps, self._state(), metric=metric)
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

    def _is_due(self) -> bool:
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return self.steps % self._every == 0
        if self._due is None or self.steps >= self._due:
            self._due = self._agreed_step()
        if self.steps < self._due:
            return False
        self._due = None
        self._due_from, self._due_since = self.steps, time.monotonic()
        return True

    def _agreed_step(self) -> int:
        """This step, if the time is over; else that at which it will be, as far as one can tell
        from the steps so far, or to look again: a few slow steps say little about many. The first
        rank that gets here says it, and all go by that.
        """
        assert isinstance(self._every, datetime.timedelta)
        done = self.steps - self._due_from
        spent = max(time.monotonic() - self._due_since, 1e-6)
        left = max(self._every.total_seconds() - spent, 0.0)
        ahead = min(round(left * done / spent), 3 * done)
        name = f"due/{self._due_from}/{self.steps}"
        return int(self._ledger.agree(name, str(self.steps + ahead)))

    def _prepare_optimizer(self) -> None:
        """Sharded state cannot be filled in where there is none: torch makes it, by a step of no
        length, which counts as one.
        """
        if not self.optimizer.state and any(
            isinstance(p, DTensor) for p in self.module.parameters()
        ):
            get_optimizer_state_dict(self.module, self.optimizer)

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counters": {
                "steps": self.steps,
                "samples": self.samples,
                "seconds": self.seconds + time.monotonic() - self._began,
            },
        }
        if self.loader is not None:
            state["loader"] = self.loader.state_dict()
        if self.states:
            state["states"] = {name: each.state_dict() for name, each in self.states.items()}
        if self._random:
            state["random"] = {str(self.rank): _random_states()}
        if isinstance(self.model, ConsistentDDP):
            state["parts"] = self.model.parts_state_dict()
        return state

    def _apply_together(self, state: dict[str, Any]) -> None:
        """Raises on all ranks, if one cannot: the others would wait for it in a collective."""
        nobody = 1 << 62
        error: Exception | None = None
        try:
            self._apply(state)
        except Exception as e:  # noqa: BLE001 - raised below, when the others know
            error = e
        first = least(nobody if error is None else self.rank, self._group)
        if error is not None:
            raise error
        if first != nobody:
            raise CheckpointError(f"rank {first} could not load its state: its own error says why")

    def _apply(self, state: dict[str, Any]) -> None:
        if self.loader is not None:
            self.loader.load_state_dict(state["loader"])
        for name, each in self.states.items():
            try:
                each.load_state_dict(state["states"][name])
            except Exception as e:
                raise CheckpointError(f"the state {name!r} could not be loaded: {e}") from e
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["counters"]["steps"] == 0:
            self.optimizer.state.clear()
        if self._random:
            _set_random_states(state["random"][str(self.rank)])
        if isinstance(self.model, ConsistentDDP):
            self.model.load_parts_state_dict(state["parts"])
        self._set_counters(state["counters"])

    def _put_back(self, before: Backup) -> None:
        state = before.put_back()
        named = [(name, each, state["states"][name]) for name, each in self.states.items()]
        for name in ("loader", "module", "optimizer"):
            each = getattr(self, name)
            if each is not None:
                named.append((name, each, state["model" if name == "module" else name]))
        for name, each, content in named:
            try:
                each.load_state_dict(content)
            except Exception:
                log.exception("the state %r could not be put back", name)
        if isinstance(self.model, ConsistentDDP):
            self.model.load_parts_state_dict(state["parts"])
        if self._random:
            _set_random_states(state["random"][str(self.rank)])
        self._set_counters(state["counters"])

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        self.steps, self.samples = int(counters["steps"]), int(counters["samples"])
        self.seconds = float(counters["seconds"])
        self._began = time.monotonic()


def _inner(model: nn.Module) -> nn.Module:
    if isinstance(model, DistributedDataParallel | ConsistentDDP):
        inner: nn.Module = model.module
        return inner
    return model


def _random_states() -> dict[str, torch.Tensor]:
    """All generators as tensors: nothing of them is pickled."""
    version, numbers, gauss = random.getstate()
    states = {
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss]).double(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.random.get_state()
        states["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        states["numpy_gauss"] = torch.tensor([cached], dtype=torch.float64)
    return states


def _set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    version, *numbers = states["python"].tolist()
    gauss = float(states["python_gauss"])
    random.setstate((version, tuple(numbers), None if gauss != gauss else gauss))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        *keys, position, has_gauss = states["numpy"].tolist()
        cached = float(states["numpy_gauss"])
        numpy.random.set_state(("MT19937", keys, position, has_gauss, cached))
