"""The kinds of fault, what each needs, and the phases of a job in which they can fire."""

from __future__ import annotations

import enum


class Kind(str, enum.Enum):
    """A kind of fault; its value is its name in a plan.

    `docs/chaos.md` describes the effect of each kind.
    """

    EXCEPTION = "exception"
    SYSTEM_EXIT = "system_exit"
    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSTOP = "sigstop"
    SEGFAULT = "segfault"
    ABORT = "abort"
    OUT_OF_MEMORY = "out_of_memory"
    OOM_KILL = "oom_kill"
    HANG_GIL = "hang_gil"
    HANG = "hang"
    HANG_COLLECTIVE = "hang_collective"
    HANG_PYTHON = "hang_python"
    KILL_MONITOR = "kill_monitor"
    KILL_WRITER = "kill_writer"
    DISK_FULL = "disk_full"
    SLOW_DISK = "slow_disk"
    TORN_WRITE = "torn_write"
    FLIPPED_BYTE = "flipped_byte"
    LOST_SHARED_MEMORY = "lost_shared_memory"
    SIGNAL_STORM = "signal_storm"
    STORE_FROZEN = "store_frozen"

    @property
    def needs_main_thread(self) -> bool:
        """Whether it takes effect only in the thread that runs the training function."""
        raised = (Kind.EXCEPTION, Kind.SYSTEM_EXIT, Kind.OUT_OF_MEMORY)
        return self in (*raised, Kind.HANG, Kind.HANG_PYTHON, Kind.HANG_COLLECTIVE)

    @property
    def is_of_storage(self) -> bool:
        """Whether it takes effect in the writer process, at the next write."""
        return self in (Kind.DISK_FULL, Kind.SLOW_DISK, Kind.TORN_WRITE, Kind.FLIPPED_BYTE)

    @property
    def needs_writer(self) -> bool:
        """Whether it needs a writer process that is connected to the injector."""
        return self.is_of_storage or self is Kind.KILL_WRITER

    @property
    def default_seconds(self) -> float | None:
        """How long it lasts by default; `None` if it takes no `seconds`. A `sigstop` of 0 seconds
        lasts until a SIGCONT, and a `disk_full` of 0 seconds is one failed write.
        """
        return _SECONDS.get(self)

    __str__ = str.__str__


_SECONDS = {
    Kind.SIGSTOP: 0.0,
    Kind.DISK_FULL: 0.0,
    Kind.SLOW_DISK: 1.0,
    Kind.SIGNAL_STORM: 1.0,
    Kind.STORE_FROZEN: 1.0,
}


class Phase(str, enum.Enum):
    """What a rank does when a fault fires; its value is its name in a plan.

    `docs/chaos.md` says when each begins.
    """

    STEP = "step"
    ENTRY = "entry"
    COLLECTIVE = "collective"
    SAVE = "save"
    WRITING = "writing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    RESTORE = "restore"
    RECOVERY = "recovery"

    __str__ = str.__str__
