"""The kinds of fault, what each needs, and the phases of a job in which they can fire."""

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
    HANG_PYTHON = "hang_python"
    """Runs an endless loop of Python: other threads run, and an interrupt ends it."""
    KILL_MONITOR = "kill_monitor"
    """Kills the rank's monitor process."""
    KILL_WRITER = "kill_writer"
    """Kills the rank's writer processes."""
    DISK_FULL = "disk_full"
    """A write of the writer process writes half of its data, and fails with ENOSPC."""
    SLOW_DISK = "slow_disk"
    """A write of the writer process takes `seconds` longer."""
    TORN_WRITE = "torn_write"
    """A write of the writer process loses half of its data, without an error."""
    FLIPPED_BYTE = "flipped_byte"
    """A write of the writer process inverts one byte, without an error."""
    LOST_SHARED_MEMORY = "lost_shared_memory"
    """The shared memory with the rank's snapshots is truncated to nothing."""
    SIGNAL_STORM = "signal_storm"
    """Sends every thread of the process thousands of signals, which interrupt its system calls."""
    STORE_FROZEN = "store_frozen"
    """Stops the process that serves the job's store, for `seconds`."""

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

    def __str__(self) -> str:
        return self.value


_SECONDS = {
    Kind.SIGSTOP: 0.0,
    Kind.DISK_FULL: 0.0,
    Kind.SLOW_DISK: 1.0,
    Kind.SIGNAL_STORM: 1.0,
    Kind.STORE_FROZEN: 1.0,
}


class Phase(str, enum.Enum):
    """What a rank does when a fault fires; its value is its name in a plan."""

    STEP = "step"
    """At a step, a ping or an entry of the training function; the default."""
    ENTRY = "entry"
    """Just before the training function."""
    COLLECTIVE = "collective"
    """In a collective of torch.distributed, or in a backward pass."""
    SAVE = "save"
    """In a save, on the training thread: before its snapshot is copied."""
    WRITING = "writing"
    """In the middle of a write of the rank's writer process."""
    COMMITTING = "committing"
    """While the checkpoint is being committed. On rank 0: before its manifest is written, or before
    it becomes visible; on other ranks: while they wait for rank 0."""
    COMMITTED = "committed"
    """Just after the checkpoint has become visible, before any rank knows."""
    RESTORE = "restore"
    """In a restore, before the first tensor is loaded."""
    RECOVERY = "recovery"
    """In a restart in place: before finalize, and before initialize of the next iteration."""

    def __str__(self) -> str:
        return self.value
