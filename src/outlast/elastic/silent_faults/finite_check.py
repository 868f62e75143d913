"""`FiniteCheck`: ends a job whose parameters or loss are no longer finite numbers, or has it go
back and leave out the batches that led there.

The parameters tell: a NaN stays in them. (Gradients do not: a scaler of mixed precision skips such
steps.) Each step looks at one slice of the parameters, of at most 128 KiB or 1/`every` of them, by
a sum: infinities and NaN stay in it. On the CPU the training thread does it, which costs less than
handing the slice to another thread. On a device the sum is enqueued, and read when it is there:
nothing is synchronized. As soon as a loss is NaN, so is almost every parameter, whatever the slice.

Who was first: the gradients of all ranks are averaged, so all have NaN after the same step. What
tells is a rank's own gradients, before they are averaged: those of the first parameter, which the
whole backward pass leads to, and of the last matrix, into which the results of the forward pass go,
are summed; the sums are read only if parameters are not finite. The loss tells too, if the program
passes it. A rank that finds something publishes it, and waits for what other ranks have found at
the same step; one that is waiting for this rank in a collective will not answer.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outlast.async_checkpoint.finite import is_finite, total
from outlast.async_checkpoint.subclasses import parts
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.stores.store import KeyTimeout
from outlast.elastic.silent_faults.digests import flat_bytes
from outlast.elastic.silent_faults.exchange import Running, Startable
from outlast.elastic.silent_faults.layout import element_slices
from outlast.elastic.tensors import local
from outlast.errors import NonFinite, StoreError
from outlast.events.emitter import Emitter
from outlast.events.types import NonFiniteFound
from outlast.system.arguments import as_int
from outlast.system.devices import on_accelerator
from outlast.system.streams import Event, current_stream, recorded, to_host
from outlast.system.units import listed

log = logging.getLogger("outlast.elastic")

_GRADIENT_ELEMENTS = 1 << 16
_HUGE = 1e15
_OTHERS_S = 5.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one rank found after `step`: values that were finite after `since`. See `order`."""

    step: int
    since: int
    rank: int
    host: str
    origin: str  # "loss", "gradients" or "parameters"
    names: list[str]
    loss: str = ""
    ranks: int = 1  # how many have found the same
    huge: str = ""

    @property
    def order(self) -> tuple[int, int, int]:
        """A loss is computed before the gradients, and these before the parameters."""
        return self.step, ("loss", "gradients", "parameters").index(self.origin), self.rank


def describe(finding: Finding) -> str:
    """A finding in a sentence."""
    huge = f"; its {finding.huge}" if finding.huge else ""
    where, names = f"rank {finding.rank} on {finding.host}", listed(finding.names)
    if finding.origin == "loss":
        more = f", and so are values of {names}" if names else ""
        return f"after step {finding.step}: the loss of {where} is {finding.loss}{more}{huge}"
    if finding.origin == "gradients":
        return (
            f"after step {finding.step}: values of {names} are not finite, first in the gradients "
            f"of {where}{huge}"
        )
    if finding.ranks > 1:  # it came with the gradients, which all ranks have averaged
        where += f" and {finding.ranks - 1} more"
    since = "" if finding.since >= finding.step - 1 else f"; they were after step {finding.since}"
    return f"after step {finding.step}: values of {names} on {where} are not finite{since}{huge}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiniteCheck(Startable["RunningFiniteCheck"]):
    """Looks for parameters, and losses, that are not finite. A `Job` has it by default.

    Attributes:
        every: all parameters are looked at within so many steps.
        on_non_finite: `"stop"`: every rank that finds some raises `NonFinite`, which no restart
            follows, and `Job.restore` passes over checkpoints with such parameters. `"skip"`: every
            rank that finds some raises `SkipBatches`; after the restart, `Job.restore` loads the
            newest checkpoint with finite parameters, and the batches from there to the finding are
            left out. It needs a `Job`, and an `ElasticLoader` or `Job.batches`. `"report"`: the
            event and the message in the log, once. `"ignore"`: nothing is looked at, and retention
            does not know which checkpoints are finite.
        max_skips: with `"skip"`, how often in a row batches are left out: without having made a
            later step than the one of the finding before. After that, the job ends with
            `NonFinite`.
    """

    every: int = 100
    on_non_finite: str = "stop"
    max_skips: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_int("every", self.every, at_least=1))
        object.__setattr__(self, "max_skips", as_int("max_skips", self.max_skips, at_least=1))
        if self.on_non_finite not in ("stop", "skip", "report", "ignore"):
            raise ValueError(
                "on_non_finite must be 'stop', 'skip', 'report' or 'ignore', not "
                f"{self.on_non_finite!r}"
            )

    def _run(
        self, module: nn.Module, ledger: CallLedger, emitter: Emitter, step: int
    ) -> RunningFiniteCheck:
        if self.on_non_finite == "skip":  # the batches have to be known
            raise ValueError("on_non_finite='skip' needs a Job: pass the check to Job(checks=...)")
        return RunningFiniteCheck(self, parameters_to_check(module), ledger, emitter, step)


def parameters_to_check(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters that must be finite, by name: not a mask (no gradient, not finite now)."""
    return {
        name: parameter
        for whole, wrapper in module.named_parameters()
        for name, parameter in parts(wrapper, whole)
        if not parameter.is_meta
        and (parameter.is_floating_point() or parameter.is_complex())
        and (parameter.requires_grad or is_finite(local(parameter)))
    }


@dataclasses.dataclass(frozen=True)
class _Look:
    """The sums of a slice after `step`, on their way from the device until `ready`."""

    step: int
    number: int
    sums: torch.Tensor
    ready: Event


class RunningFiniteCheck(Running):
    """The check of one rank.

    `newest_finite` returns the step of the newest checkpoint that training can continue from.
    `go_back`, for `"skip"`, is called with this step and what was found: it raises `NonFinite`.
    """

    def __init__(
        self,
        check: FiniteCheck,
        parameters: dict[str, torch.Tensor],
        ledger: CallLedger,
        emitter: Emitter,
        step: int,
        newest_finite: Callable[[], int | None] = lambda: None,
        go_back: Callable[[CallLedger, int, str], NoReturn] | None = None,
    ) -> None:
        self._parameters, self._newest_finite = parameters, newest_finite
        self._ledger, self._emitter = ledger, emitter
        self._go_back = go_back if check.on_non_finite == "skip" else None
        self._ends_job = check.on_non_finite in ("stop", "skip")
        self._step = step
        self._reported: set[str] = set()
        self._slices = element_slices(list(parameters.values()), check.every)
        self._views: list[tuple[list[int], list[torch.Tensor]]] = [([], [])] * len(self._slices)
        self._known = [step] * len(self._slices)  # the last step after which each was finite
        self._looks: deque[_Look] = deque()
        self._losses: deque[_Look] = deque()
        self._gradient: torch.Tensor | None = None  # of this step, summed
        self._gradients: deque[tuple[int, torch.Tensor]] = deque(maxlen=len(self._slices) + 2)
        self._off = check.on_non_finite == "ignore" or not parameters
        trained = [p for p in parameters.values() if p.requires_grad and p.is_leaf]
        last = [p for p in trained if p.ndim > 1][-1:]
        hooked = [] if self._off else [p for p in trained[:1] if p not in set(last)] + last
        # A restart may interrupt the end of this check: a parameter must not hold it.
        note = weakref.WeakMethod(self._note_gradient)

        def hook(gradient: torch.Tensor) -> None:
            if (noted := note()) is not None:
                noted(gradient)

        self._hooks = [p.register_hook(hook) for p in hooked]
        self.check_all()

    def step(self, step: int | None = None, loss: torch.Tensor | float | None = None) -> None:
        """Call it after each step of the optimizer, with the number of steps so far, and with this
        rank's loss.

        Raises:
            NonFinite: with `"stop"` or `"skip"`, if a parameter or a loss is not finite.
        """
        self._step = self._step + 1 if step is None else step
        if self._off:
            return
        gradient, self._gradient = self._gradient, None
        if gradient is not None:
            self._gradients.append((self._step, gradient))
        while self._losses and self._losses[0].ready.query():
            self._judge_first_loss()
        if loss is not None:
            self._look_at_loss(loss)
        if "parameters" in self._reported:
            return
        number = self._step % len(self._slices)
        sums = [total(part) for part in self._parts(number)]
        if any(map(on_accelerator, sums)):
            self._looks.append(_on_its_way(self._step, number, sums))
        else:
            self._judge(self._step, number, [each.item() for each in sums])
        while self._looks and self._looks[0].ready.query():
            look = self._looks.popleft()
            self._judge(look.step, look.number, look.sums.tolist())

    def check_all(self) -> None:
        """Looks at all parameters and the losses so far, and waits for it. Raises as `step`."""
        while self._losses and not self._off:
            self._losses[0].ready.synchronize()
            self._judge_first_loss()
        if not self._off and "parameters" not in self._reported:
            self._look_closely(self._step)

    def close(self) -> None:
        self._off = True
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -------------------------------------------------------------------------- private

    def _judge(self, step: int, number: int, sums: list[float]) -> None:
        if all(map(math.isfinite, sums)):
            self._known[number] = step
        else:
            self._look_closely(step)

    def _parts(self, number: int) -> list[torch.Tensor]:
        """A slice's tensors, as they are now; made once, while the parameters stay in place."""
        elements = self._slices[number]
        where, parts = self._views[number]
        now = [0 if isinstance(p, DTensor) else p.data_ptr() for p, _, _ in elements]
        if where != now or 0 in now:
            own = [(local(p), begin, end) for p, begin, end in elements]
            parts = [
                t if (a, b) == (0, t.numel()) else flat_bytes(t).view(t.dtype)[a:b]
                for t, a, b in own
            ]
            copied = any(not p.is_contiguous() for p, _, _ in elements)
            self._views[number] = [] if copied else now, parts
        return parts

    def _note_gradient(self, gradient: torch.Tensor) -> None:
        if gradient.layout is torch.sparse_coo:
            gradient = gradient._values()
        if gradient.layout is not torch.strided:
            return
        # With gradient accumulation there are several of one step.
        found = total(gradient.detach().reshape(-1)[:_GRADIENT_ELEMENTS])
        self._gradient = found if self._gradient is None else self._gradient + found

    def _look_at_loss(self, loss: torch.Tensor | float) -> None:
        """On a device, a copy of it is enqueued, and read when it is there: to wait for it would be
        to wait for the whole step, and the next one may write to the same tensor.
        """
        if isinstance(loss, torch.Tensor) and on_accelerator(loss):
            self._losses.append(_on_its_way(self._step, loss.numel(), [loss.detach().reshape(-1)]))
        else:
            self._judge_loss(self._step, torch.as_tensor(loss).detach())

    def _judge_first_loss(self) -> None:
        look = self._losses.popleft()
        self._judge_loss(look.step, look.sums)

    def _judge_loss(self, step: int, values: torch.Tensor) -> None:
        if not is_finite(values) and "loss" not in self._reported:
            text = f"{values.item():g}" if values.numel() == 1 else "not finite"
            self._report("loss", step, step - 1, [], loss=text)

    def _look_closely(self, step: int) -> None:
        """Looks at every value. A sum that is not finite may have overflowed."""
        tensors = {name: local(p) for name, p in self._parameters.items()}
        names = [name for name, tensor in tensors.items() if not is_finite(tensor)]
        if not names:
            self._known = [self._step] * len(self._slices)
            return
        wrong_numbers = {id(self._parameters[name]) for name in names}
        since = min(
            known
            for known, parts in zip(self._known, self._slices, strict=True)
            if any(id(parameter) in wrong_numbers for parameter, _, _ in parts)
        )
        # GradScaler skips steps with such gradients: only those since the parameters were finite.
        wrong = [at for at, sums in self._gradients if since < at <= step and not is_finite(sums)]
        if wrong:
            self._report("gradients", wrong[0], wrong[0] - 1, names)
        else:
            self._report("parameters", step, since, names)

    def _huge(self) -> str:
        """The greatest finite parameter, if it looks like a flipped bit that ruins the loss."""
        most, which = _HUGE, ""
        for name, parameter in self._parameters.items():
            tensor = local(parameter)
            greatest = tensor.abs().max().item() if tensor.numel() else 0.0
            if most < greatest < math.inf:
                most, which = greatest, name
        return f"{which} has a value of {most:.1e}" if which else ""

    def _report(self, origin: str, step: int, since: int, names: list[str], loss: str = "") -> None:
        rank, host = self._ledger.rank, socket.gethostname()
        finding = Finding(step, since, rank, host, origin, names, loss, huge=self._huge())
        if self._ends_job:
            finding = self._first_of_all(finding)
        text = describe(finding)
        self._reported.add("loss" if finding.origin == "loss" else "parameters")
        if finding.rank == self._ledger.rank:
            self._emitter.emit(
                NonFiniteFound(
                    step=finding.step,
                    since=finding.since,
                    first=finding.rank,
                    first_host=finding.host,
                    origin=finding.origin,
                    parameters=finding.names,
                )
            )
        if not self._ends_job:
            log.error("%s", text)
            return
        newest = self._newest_finite()
        if newest is not None:
            text += f"; the newest checkpoint with finite parameters is that of step {newest}"
            if self._go_back is not None and newest < self._step:
                self._go_back(self._ledger, newest, text)
        raise NonFinite(text)

    def _first_of_all(self, finding: Finding) -> Finding:
        """The first of the findings of all ranks that have one."""
        verdicts = self._ledger.round(0)
        try:
            verdicts.finish(msgspec.json.encode(finding))
            try:
                verdicts.await_verdict(_OTHERS_S)
            except KeyTimeout:
                log.debug("not all ranks have found something that is not finite")
            parts = verdicts.parts_so_far()
        except StoreError as e:
            log.debug("what other ranks have found is not known: %s", e)
            return finding
        found = [msgspec.json.decode(part, type=Finding) for part in parts if part]
        first = min([*found, finding], key=lambda each: each.order)
        names = next((each.names for each in [first, *found] if each.names), [])
        same = sum(each.order[:2] == first.order[:2] for each in found)
        return dataclasses.replace(first, names=names, ranks=same)


def _on_its_way(step: int, number: int, sums: list[torch.Tensor]) -> _Look:
    device = next(each.device for each in sums if on_accelerator(each))
    together = to_host(torch.stack([each.float().to(device) for each in sums]))
    return _Look(step, number, together, recorded(current_stream(device)))
