"""Steps of a restore that all ranks take together, with the same outcome on all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from outlast.coordination import KeyTimeout
from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.errors import CheckpointError, CheckpointMismatch, FolderInUse

T = TypeVar("T")

MISFIT = "misfit"
"""The name of a failure with which the restore ends: the checkpoint is valid, but does not fit."""
BROKEN = "broken"
"""The same for another error, which the rank itself raises."""


class Agreement:
    """One rank's part in the agreement. All ranks take the same steps in the same order. `ledger`
    is used for nothing else; `where`, the directory of the checkpoints, is for errors.
    """

    def __init__(self, ledger: CallLedger, timeout_s: float, where: str) -> None:
        self.rank = ledger.rank
        self.world_size = ledger.world_size
        self._ledger = ledger
        self._timeout = timeout_s
        self._where = where
        self._steps = 0

    def attempt(self, work: Callable[[], T]) -> T | CallFailure:
        """Runs `work` on every rank. Returns what `work` returned on this rank; or, if it failed on
        any rank, the failure of one of them, the same on all ranks.

        Raises:
            BaseException: what `work` raised here, unless it is a `CheckpointError` or `OSError`.
                The other ranks return it as a failure named `BROKEN`.
        """
        index, ledger = self._next(), self._ledger
        result: T | None = None
        try:
            result = work()
        except (CheckpointError, OSError) as e:
            name = MISFIT if isinstance(e, CheckpointMismatch) else ""
            ledger.fail(index, CallFailure.here(index, name, self.rank, str(e)))
        except BaseException as e:
            ledger.fail(index, CallFailure.of(e, index, BROKEN, self.rank))
            raise
        else:
            ledger.finish(index)
        verdict = self._await(lambda: ledger.await_verdict(index, self._timeout))
        ledger.forget(index)
        return result if verdict.failure is None else verdict.failure  # type: ignore[return-value]

    def gather(self, part: Any, work: Callable[[list[Any]], T]) -> T:
        """Runs `work` on rank 0, on the parts of all ranks in rank order; returns its result on
        every rank, or raises `CheckpointError` there if `work` raised that or an `OSError`. Parts
        and result are JSON.
        """
        index, ledger = self._next(), self._ledger
        if self.world_size == 1:
            try:
                return work([part])
            except OSError as e:
                raise CheckpointError(f"rank 0: {e}") from e
        ledger.finish(index, json.dumps(part).encode())
        if self.rank == 0:
            try:
                self._await(lambda: ledger.await_verdict(index, self._timeout))
                answer: dict[str, Any] = {
                    "is": work([json.loads(each) for each in ledger.parts(index)])
                }
            except (CheckpointError, OSError) as e:
                answer = {"error": f"rank 0: {e}", "in_use": isinstance(e, FolderInUse)}
            ledger.conclude(index, json.dumps(answer).encode())
        said = json.loads(self._await(lambda: ledger.await_conclusion(index, self._timeout)))
        ledger.forget(index)
        if "error" in said:
            raise (FolderInUse if said["in_use"] else CheckpointError)(said["error"])
        result: T = said["is"]
        return result

    def exchange(self, part: Any) -> list[Any]:
        """The parts of all ranks in their order, on every rank."""
        return self.gather(part, list)

    def _await(self, wait: Callable[[], T]) -> T:
        try:
            return wait()
        except KeyTimeout as e:
            raise CheckpointError(
                f"rank {self.rank} waits for the other ranks at the checkpointer of "
                f"{self._where}; not all came within {self._timeout:g} s"
            ) from e

    def _next(self) -> int:
        self._steps += 1
        return self._steps
