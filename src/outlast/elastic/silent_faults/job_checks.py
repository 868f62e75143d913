"""The checks of a `Job`: what they do with its steps and its checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from outlast.async_checkpoint import Checkpointer, CheckpointInfo, Retention, SaveHandle
from outlast.async_checkpoint.trust import (
    Trusted,
    limit_trust,
    newest_finite,
    remove_distrusted,
)
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.silent_faults.comparison import Result
from outlast.elastic.silent_faults.finite_check import (
    FiniteCheck,
    RunningFiniteCheck,
    parameters_to_check,
)
from outlast.elastic.silent_faults.replica_check import ReplicaCheck, RunningReplicaCheck
from outlast.elastic.silent_faults.straggler_check import RunningStragglerCheck, StragglerCheck
from outlast.elastic.wrapped_modules import plain_name
from outlast.errors import CheckpointError

log = logging.getLogger("outlast.elastic")

_SAVES_S = 60.0

Check: TypeAlias = FiniteCheck | ReplicaCheck | StragglerCheck
_Running: TypeAlias = RunningReplicaCheck | RunningStragglerCheck


def check_of(checks: Check | Iterable[Check]) -> tuple[Check, ...]:
    """Checks the argument `checks` of `Job`, and adds a `FiniteCheck` if there is none."""
    found: tuple[Any, ...] = (checks,) if isinstance(checks, Check) else tuple(checks)
    for each in found:
        if not isinstance(each, Check):
            raise TypeError(
                f"checks must be FiniteCheck, ReplicaCheck and StragglerCheck, not {each!r}"
            )
    if len({type(each) for each in found}) < len(found):
        raise ValueError("checks has two of one kind")
    if not any(isinstance(each, FiniteCheck) for each in found):
        return (FiniteCheck(), *found)
    return found


class JobChecks:
    """The checks of one `Job` on one rank. They begin at the first step, or at a restore."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self._checks = checks
        self._running: list[_Running] = []
        self._replicas: RunningReplicaCheck | None = None
        self._finite: RunningFiniteCheck | None = None
        self._must_be_finite: dict[str, torch.Tensor] | None = None
        self._starts = 0

    def retention(self, keep: Retention | int) -> Retention:
        """What a job keeps: if ranks that differ are excluded, also the newest checkpoint from
        before any difference, and that before each comparison that has no result yet.
        """
        kept = Retention.of(keep)
        if not any(isinstance(check, ReplicaCheck) and check.excludes for check in self._checks):
            return kept
        return _KeepsVerified(**vars(kept), clean_steps=self._clean_steps)

    @property
    def max_skips(self) -> int | None:
        """As `FiniteCheck.max_skips`; `None` if no batches are left out."""
        check = self._finite_check
        return check.max_skips if check.on_non_finite == "skip" else None

    @property
    def _finite_check(self) -> FiniteCheck:
        return next(each for each in self._checks if isinstance(each, FiniteCheck))

    def must_be_finite(self, module: nn.Module) -> Collection[str]:
        """The names of the parameters that must be finite in a checkpoint of a job."""
        return [f"model.{plain_name(name)}" for name in self._finite_parameters(module)]

    def clean_step(self, step: int) -> int:
        """The last step after which replicas were known to be equal; `step` if not compared."""
        return step if self._replicas is None else self._replicas.known_clean_step

    def start(
        self,
        module: nn.Module,
        checkpointer: Checkpointer,
        ledger: CallLedger,
        step: int,
        go_back: Callable[[CallLedger, int, str], NoReturn],
        clean_step: int | None = None,
    ) -> None:
        """Starts the checks, or starts them anew, after `step` steps, on all ranks; for `go_back`,
        see `RunningFiniteCheck`. The replicas were equal after `clean_step`, by default now.
        """
        self.close()
        # Records of the checks before a restore, of the same step too, must not be taken for these.
        self._starts += 1
        for check in self._checks:
            own = ledger.child(f"{type(check).__name__}/{step}/{self._starts}")
            emitter = checkpointer.emitter
            if isinstance(check, FiniteCheck):
                found, newest = self._finite_parameters(module), partial(_newest, checkpointer)
                self._finite = RunningFiniteCheck(check, found, own, emitter, step, newest, go_back)
            elif isinstance(check, StragglerCheck):
                self._running.append(RunningStragglerCheck(check, module, own, emitter, step))
            else:
                distrust = _distrust(checkpointer) if check.excludes else None
                clean = step if clean_step is None else min(clean_step, step)
                # The ranks may know different clean steps: they agree on one of them.
                clean = int(own.agree("clean step", str(clean)))
                self._replicas = RunningReplicaCheck(
                    check, module, own, emitter, step, distrust, clean
                )
                self._running.append(self._replicas)

    def completed(self, step: int, loss: torch.Tensor | float | None = None) -> None:
        if self._finite is not None:
            self._finite.step(step, loss)
        for check in self._running:
            check.step(step)

    def compare_now(self, timeout_s: float, *, required: bool = False) -> None:
        """Looks at all parameters, compares the replicas, and waits for the result at most
        `timeout_s` seconds; raises what the checks raise. Call it on all ranks after the same step.
        `required`, right after `start`, which has looked: the loss of the store is raised, too.
        """
        if self._finite is not None and not required:
            self._finite.check_all()
        if self._running and self._replicas is not None:
            self._replicas.compare_now(timeout_s, required=required)

    def close(self) -> None:
        running = [*self._running, *([] if self._finite is None else [self._finite])]
        self._finite, self._running = None, []
        for check in running:
            check.close()

    def _finite_parameters(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Those of the first call: a frozen parameter that is not finite then need not be."""
        if self._must_be_finite is None:
            ignored = self._finite_check.on_non_finite == "ignore"
            self._must_be_finite = {} if ignored else parameters_to_check(module)
        return self._must_be_finite

    def _clean_steps(self) -> list[int]:
        return [] if self._replicas is None else self._replicas.clean_steps


class TrustedRestore:
    """A restore in a folder whose newest checkpoints may be wrong. `found` is what can be trusted,
    if not all. `step` is the one to restore: the given one, or `None` for the newest. `skip`: which
    batches to leave out after that (`elastic.job.skipped`).
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None, found: Trusted | None) -> None:
        self._checkpointer, self._found = checkpointer, found
        self.step = step if self._found is None else self._found.step
        self.skip = None if self._found is None else self._found.skip

    def finish(self, save: Callable[[], SaveHandle]) -> None:
        """Makes the restored state the newest one, in memory too, and deletes the later ones. A
        fault in between is harmless: the limit is removed last.
        """
        if self._found is None:
            return
        save().wait()
        if self._checkpointer.rank == 0:
            removed = remove_distrusted(self._checkpointer, self._found.limit)
            log.warning(
                "restored step %d, from before %s; deleted the checkpoints of later steps: %s",
                self._found.step,
                self._found.fault,
                ", ".join(map(str, removed)) or "none",
            )


def _newest(checkpointer: Checkpointer) -> int | None:
    """The newest checkpoint to continue from, after saves in progress: they would be dropped."""
    try:
        checkpointer.wait(_SAVES_S)
    except (CheckpointError, TimeoutError) as e:
        log.debug("a save before the parameters became infinite or NaN: %s", e)
    return newest_finite(checkpointer)


def _distrust(checkpointer: Checkpointer) -> Callable[[Result], None]:
    def limit(result: Result) -> None:
        ranks = sorted(rank for each in result.differences for rank in each.ranks)
        why = f"after step {result.first}, the parameters of ranks {ranks} differed"
        try:
            limit_trust(checkpointer, result.clean_step, why)
        except OSError as e:
            log.error("%s, but that could not be noted beside the checkpoints: %s", why, e)

    return limit


@dataclasses.dataclass(frozen=True)
class _KeepsVerified(Retention):
    """Another retention, and the newest checkpoint up to each of the steps from `clean_steps`."""

    clean_steps: Callable[[], Iterable[int]] = list

    def removable(
        self, checkpoints: Sequence[CheckpointInfo], committed: int
    ) -> list[CheckpointInfo]:
        verified = {
            max((c.step for c in checkpoints if c.step <= clean), default=None)
            for clean in self.clean_steps()
        }
        found = super().removable(checkpoints, committed)
        return [info for info in found if info.step not in verified]
