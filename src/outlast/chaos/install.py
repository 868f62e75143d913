"""One injector for the process: observed by the restart wrapper, and reached by `chaos.step`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outlast.chaos.injector import Injector
from outlast.chaos.plan import Plan, PlannedFault

__all__ = ["install", "installed", "step", "uninstall"]

_installed: Injector | None = None


def install(plan: Injector | Plan | Sequence[PlannedFault]) -> Injector:
    """Puts the process under a plan: every wrapped function in it, until `uninstall`.

    Args:
        plan: the faults, or an injector made of them.

    Raises:
        RuntimeError: if there is one already.
    """
    global _installed
    # Only here: a script that merely calls `step` needs neither torch nor the wrapper.
    from outlast.inprocess.observers import add_observer

    if _installed is not None:
        raise RuntimeError("an injector is installed already; uninstall() it first")
    injector = plan if isinstance(plan, Injector) else Injector(plan)
    add_observer(injector)
    _installed = injector
    injector.start_timer()
    return injector


def uninstall() -> None:
    """Takes the process's injector away, if there is one, and ends its thread."""
    global _installed
    from outlast.inprocess.observers import remove_observer

    injector, _installed = _installed, None
    if injector is not None:
        remove_observer(injector)
        injector.close()


@contextmanager
def installed(plan: Injector | Plan | Sequence[PlannedFault]) -> Iterator[Injector]:
    """`install` for the length of a block."""
    injector = install(plan)
    try:
        yield injector
    finally:
        uninstall()


def step(number: int) -> None:
    """Tells the injector the script's own count of steps; does nothing where there is none.

    Call it where a step begins, before the ping. From the first call on, pings are no longer
    counted as steps: a script that resumes at step 50 is hit at its step 60.

    Raises:
        ChaosError: a planned exception; other faults raise what they must.
    """
    if _installed is not None:
        _installed.step(number)
