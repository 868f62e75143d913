"""The kinds of fault, and which of them need the main thread."""

from __future__ import annotations

import enum


class Kind(str, enum.Enum):
    """A kind of fault; its value is its name in a plan.

    `docs/chaos.md` describes the effect of each kind.
    """

    EXCEPTION = "exception"
    """Raises `ChaosError`."""
    SYSTEM_EXIT = "system_exit"
    """Raises `SystemExit(1)`."""
    SIGKILL = "sigkill"
    """Kills the process at once."""
    SIGTERM = "sigterm"
    """Sends the process SIGTERM, which ends it unless it is handled."""
    SIGSTOP = "sigstop"
    """Stops all threads of the process, until a SIGCONT."""
    SEGFAULT = "segfault"
    """Reads from address 0."""
    ABORT = "abort"
    """Calls abort(), like a failed assertion in native code."""
    OUT_OF_MEMORY = "out_of_memory"
    """Allocates up to a limit that the process sets itself, and raises the `MemoryError`."""
    OOM_KILL = "oom_kill"
    """Allocates up to that limit, then dies of SIGKILL, as from the kernel's OOM killer."""
    HANG_GIL = "hang_gil"
    """Blocks forever in native code with the GIL held: no Python thread runs."""
    HANG = "hang"
    """Blocks forever in `time.sleep`: other threads run, and a signal interrupts it."""
    HANG_COLLECTIVE = "hang_collective"
    """Waits in the process group for a message that no peer sends; the peers hang in their next
    collective."""
    KILL_MONITOR = "kill_monitor"
    """Kills the rank's monitor process."""

    @property
    def needs_main_thread(self) -> bool:
        """Whether it takes effect only in the thread that runs the training function."""
        raised = (Kind.EXCEPTION, Kind.SYSTEM_EXIT, Kind.OUT_OF_MEMORY)
        return self in (*raised, Kind.HANG, Kind.HANG_COLLECTIVE)

    def __str__(self) -> str:
        return self.value
