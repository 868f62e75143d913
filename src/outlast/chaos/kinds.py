"""The kinds of fault that can be planned, and which of them need the main thread."""

from __future__ import annotations

import enum

__all__ = ["Kind"]


class Kind(str, enum.Enum):
    """A fault. Its value is its name in a plan.

    What each one does, and how it ends, is told in `docs/chaos.md`.
    """

    EXCEPTION = "exception"
    """Raises `ChaosError`."""
    SYSTEM_EXIT = "system_exit"
    """Raises `SystemExit(1)`."""
    SIGKILL = "sigkill"
    """The process is killed at once."""
    SIGTERM = "sigterm"
    """The process is sent SIGTERM: it dies of it, or handles it."""
    SIGSTOP = "sigstop"
    """All threads of the process stop, until someone sends SIGCONT."""
    SEGFAULT = "segfault"
    """Reads from address 0."""
    ABORT = "abort"
    """Calls abort(), as a failed assertion in native code does."""
    OUT_OF_MEMORY = "out_of_memory"
    """Allocates up to a bound that the process sets itself, and raises the `MemoryError`."""
    OOM_KILL = "oom_kill"
    """Allocates up to that bound, and then dies as the kernel's out-of-memory killer has it."""
    HANG_GIL = "hang_gil"
    """Blocks in native code for ever, with the GIL held: no Python thread runs any more."""
    HANG = "hang"
    """Blocks in `time.sleep` for ever: other threads run, and a signal wakes it."""
    HANG_COLLECTIVE = "hang_collective"
    """Waits inside the process group for what no peer sends; the peers hang in their next
    collective."""
    KILL_MONITOR = "kill_monitor"
    """Kills the rank's monitor process."""

    @property
    def needs_main_thread(self) -> bool:
        """Whether it means something only in the thread that runs the training function."""
        return self in (
            Kind.EXCEPTION,
            Kind.SYSTEM_EXIT,
            Kind.OUT_OF_MEMORY,
            Kind.HANG,
            Kind.HANG_COLLECTIVE,
        )

    def __str__(self) -> str:
        return self.value
