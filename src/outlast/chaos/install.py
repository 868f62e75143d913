"""The injector of the process: an observer of the restart wrapper, of checkpointers and of the
steps of a job, used by `chaos.step`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from outlast.chaos.injector import Injector
from outlast.chaos.plan import Plan, PlannedFault
from outlast.coordination.training_step import observed_steps

_WRITER = "outlast.chaos.storage"

_installed: Injector | None = None
_undo = ExitStack()


def install(plan: Injector | Plan | Sequence[PlannedFault]) -> Injector:
    """Installs a plan for every wrapped function and checkpointer of the process, until
    `uninstall`. Writer processes that run already have no faults.

    Raises:
        RuntimeError: if an injector is already installed.
    """
    global _installed
    # Imported here: a script that only calls `step` needs neither torch nor the wrapper.
    from outlast.async_checkpoint import observers as saves
    from outlast.inprocess.call_wrapper import add_observer, remove_observer

    if _installed is not None:
        raise RuntimeError("an injector is installed already: call uninstall() first")
    injector = plan if isinstance(plan, Injector) else Injector(plan)
    _undo.callback(injector.close)
    injector.start()
    add_observer(injector)
    _undo.callback(remove_observer, injector)
    saves.add_observer(injector)
    _undo.callback(saves.remove_observer, injector)
    _undo.enter_context(observed_steps(injector.trained))
    if injector.writers is not None:
        saves.set_writer_program(_WRITER)
        _undo.callback(saves.set_writer_program, None)
    _installed = injector
    return injector


def uninstall() -> None:
    """Removes the installed injector, if there is one, and ends its threads."""
    global _installed
    _installed = None
    _undo.close()


@contextmanager
def installed(plan: Injector | Plan | Sequence[PlannedFault]) -> Iterator[Injector]:
    """Installs a plan for the duration of a `with` block."""
    injector = install(plan)
    try:
        yield injector
    finally:
        uninstall()


def step(number: int) -> None:
    """Reports the script's own step number to the injector, if one is installed.

    Call it at the start of a step, before the ping. After the first call, pings no longer count as
    steps: a script that resumes at step 50 gets the fault for step 60 at its own step 60.

    Raises:
        ChaosError: a planned exception; other kinds of fault raise other exceptions.
    """
    if _installed is not None:
        _installed.step(number)
