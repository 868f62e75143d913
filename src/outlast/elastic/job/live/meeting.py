"""Ranks with the stages of a pipeline meet before each step of the optimizer.

With data parallelism, the exchange of the gradients is a meeting: no rank has them before every
rank has sent its own, so a step that one rank completes can be completed on all. Stages have no
such exchange: the last one has its gradients, and could step, while the first one still computes.
After a fault in that, one part of the model would be a step ahead of another, on all of its
replicas. So no rank writes to its parameters before all ranks have their gradients. Little is lost
by that: the last stage would wait for its next input instead.

Tensor parallelism and HSDP have an exchange for each part. Their ranks are a step apart only if one
is lost between the last collectives of the parts: that is not worth a meeting in each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch.optim import Optimizer

from outlast.coordination.call_ledger import CallFailure, CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.job.models import parameters_of

log = logging.getLogger("outlast.elastic")

_FIRST_S = 10.0  # until a meeting has shown that this program has them
_TIMEOUT_S = 600.0  # a rank may evaluate meanwhile; what hangs is interrupted by `Wrapper`
_ATTEMPTS = 3  # the first step may compile


class Meeting:
    """One rank's part in the meetings of all ranks of `ledger`: one in each step of the job, before
    the first of these optimizers steps.
    """

    def __init__(self, ledger: CallLedger, optimizers: Iterable[Optimizer]) -> None:
        self._ledger, self._attended = ledger, -1
        self._parameters = {id(each) for one in optimizers for each in parameters_of(one)}
        self._limit_s, self._attempts = _FIRST_S, _ATTEMPTS

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether it steps in the steps of the job: a rank may have another one for itself."""
        return any(id(each) in self._parameters for each in parameters_of(optimizer))

    def attend(self, step: int) -> None:
        """Waits, once a step, until all ranks have the gradients of `step`. After some meetings to
        which not all have come, there are no more: in this program, a rank may have to receive what
        another one sends after its step.
        """
        if not self._attempts or step == self._attended:
            return
        self._attended = step
        meeting, limit_s = self._ledger.round(step), self._limit_s
        meeting.finish()
        try:
            verdict = meeting.await_verdict(limit_s)
        except KeyTimeout:
            late = f"not all ranks had the gradients of step {step} within {limit_s:g} s"
            meeting.fail(CallFailure.here(step, "meeting", self._ledger.rank, late))
            verdict = meeting.await_verdict(None)
        meeting.forget()
        if verdict.failure is None:
            self._limit_s = _TIMEOUT_S
            return
        self._attempts -= 1
        if not self._attempts:
            log.warning(
                "%s, as in earlier steps: they do not wait for each other any more, and after a "
                "fault that comes when only some have made a step, a checkpoint is loaded",
                verdict.failure.cause,
            )
