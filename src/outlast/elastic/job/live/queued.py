"""Work that is queued on an accelerator: which of its results are valid after a fault.

The host runs ahead of a device. When a fault comes, the optimizer's kernels may be queued behind a
collective that waits for a dead rank. The abort ends that with garbage in its output, and what is
queued runs: the parameters are those of no step, and nothing shows it. So no kernel of an optimizer
is queued before its gradients are complete and valid:

    1. the host waits for what the device has been given, the collectives of the gradients included
    2. it makes sure that no restart has begun on any rank (`inprocess.read_lease`)

If 2 finds none, any abort comes later than all of 1. If 2 finds one, the optimizer does not run. To
look at this rank alone would not do: when a peer aborts, this rank's half of a collective may end
with garbage, too, before this rank has heard of the restart. The price: the host does not run ahead
of the device over an optimizer's step, and looks at its memory.

The same before a step of the job is noted, if a collective has begun since: its result may be a
metric in `states`, or have decided that the optimizer makes no step (a `GradScaler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from outlast.inprocess.abort import collectives_begun
from outlast.system import devices
from outlast.system.parallel import ThreadedWait

_DRAIN_S = 30.0  # of the kernels of one step; the device of a dead process may never end them


class DeviceLost(Exception):
    """A device does not complete its work; says which."""


class Queued:
    """The queued work of the devices that have these tensors; nothing for tensors on the CPU.
    `check_running` raises if a restart has begun on any rank.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], check_running: Callable[[], None]) -> None:
        self.devices = sorted(
            {each.device for each in tensors if devices.on_accelerator(each)}, key=str
        )
        self._check_running = check_running
        self._checked: list[tuple[str, int]] | None = None  # the collectives that are known right

    def await_gradients(self) -> None:
        """Called before an optimizer's first write is queued; see the module."""
        if self.devices:
            begun = collectives_begun()
            self._synchronize()
            self._check_running()
            self._checked = begun

    def await_results(self) -> None:
        """Called before a step is noted: of the collectives that have begun since."""
        if self.devices and (self._checked is None or collectives_begun() != self._checked):
            self.await_gradients()

    def drain(self) -> None:
        """Waits for all queued work, after the abort: it writes to the parameters only in steps
        that were checked. A `DeviceLost` if it does not complete; a `RuntimeError` if it fails.
        """
        if not self.devices:
            return
        wait = ThreadedWait(devices.on_this_device(self._synchronize), "outlast-drain")
        if not wait.over.wait(_DRAIN_S):
            names = ", ".join(map(str, self.devices))
            raise DeviceLost(f"{names} did not complete its work within {_DRAIN_S:g} s")
        wait.result()

    def _synchronize(self) -> None:
        for device in self.devices:
            torch.accelerator.synchronize(device)
