"""What `Job` says of its counters, and what a program may set of them; what any thread may ask of a
job: that it stops, or that this host leaves it; and what adapters tell a job.
"""

from __future__ import annotations

import os
import weakref

from torch import nn

from outlast.async_checkpoint import Checkpointer
from outlast.elastic.job.by_rank.text_files import TextFile
from outlast.elastic.job.ending import Ending
from outlast.elastic.job.saves import Saves
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.stop_signals import StopSignals
from outlast.inprocess.running_call import RunningCall


class JobProgress:
    """The base class of `Job`, which sets these."""

    checkpointer: Checkpointer
    _call: RunningCall | None
    _ending: Ending
    _saves: Saves
    _stop: StopSignals
    _training: TrainingState

    @property
    def steps(self) -> int:
        """The number of steps since the first run."""
        return self._training.counters.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._training.counters.steps = steps

    @property
    def epoch(self) -> int:
        """The present epoch, from 0: set it before `epochs` to begin with another one."""
        return self._training.epochs.number

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._training.epochs.number = epoch

    @property
    def epoch_start(self) -> int:
        """The number of steps at which the present epoch began. `job.steps == job.epoch_start`, at
        the beginning of an epoch's code, says that it begins, and does not go on after a restore.
        """
        return self._training.epochs.first_step

    @property
    def seconds(self) -> float:
        """The time that the job has run, up to the state that was restored."""
        return self._training.counters.seconds

    @property
    def restored_from(self) -> str:
        """Where `restore` has found the state: "live" (this rank's own, from before the fault),
        "replica" (sent by another rank), "predecessor" (by the process that had this rank, and has
        left), "memory" (a checkpoint in memory), "copies" (some ranks' from the memory of another
        host) or "storage"; empty without a restored state.
        """
        return self.checkpointer.restorer.restored_from

    @property
    def samples(self) -> int:
        """The number of samples that were trained on, over all ranks and since the first run.

        Raises:
            ValueError: if it is unknown: see `step`.
        """
        return self._training.counters.samples

    def text_file(
        self, path: str | os.PathLike[str], *, each_rank: bool = False, encoding: str = "utf-8"
    ) -> TextFile:
        """Opens a log file that belongs to the state: after any restore, it ends with what had been
        written to it at the restored step. Call it on all ranks, before `restore`; write after it.

        Rank 0 writes; on other ranks the file discards what it is given, and `tell()` is 0. It can
        be given to `csv.writer` and `print(file=...)`, and read (`seek(0)`). A file that is there
        although no state was restored is of an earlier run: it is kept under a name with a number.

        Args:
            path: the file; its folder must exist. The state has it under this name.
            each_rank: whether each rank writes a file: `path` then differs between ranks.
            encoding: of the text; line ends are written as given.

        Raises:
            ValueError: after `restore`; if this path is a text file of this job or of another one;
                if it is no regular file.
            OSError: if it cannot be opened.
        """
        # Weak: what is known of a file outlives the job, whose model it must not keep.
        checkpointer = weakref.ref(self.checkpointer)

        def in_use() -> bool:
            return (found := checkpointer()) is not None and found.in_use

        return self._training.files.add(os.fspath(path), encoding, in_use, each_rank=each_rank)

    def stop(self, why: str = "stop() was called") -> None:
        """Makes all ranks save after the same step, and exit. Any thread of any rank may call this,
        for example when the cloud provider announces that it will reclaim the machine.
        """
        self._check_open()
        self._stop.request(why)

    def leave(self, why: str = "leave() was called") -> None:
        """Has the host of this rank leave a job on many hosts: its ranks move to another host at
        the end of a later step, and exit with code 0; the others go on. Any thread may call this.

        Raises:
            ValueError: if the job has one host, or no `outlast run` that could move its ranks.
        """
        self._check_open()
        if self._call is None or not self._call.launch.host_id:
            raise ValueError("leave(): only in a wrapped function, in a job of several hosts")
        self._call.ask_to_leave(why)

    def _check_open(self) -> None:
        if self._ending.released:
            raise ValueError("this job is closed")

    def leave_epochs_to_framework(self) -> None:
        """For adapters: the framework continues at the restored step by itself, and repeats what
        follows it. Otherwise a fault without `epochs` is a warning.
        """
        self._training.epochs.by_framework = True

    def end_copy(self) -> None:
        """For adapters: ends the copy of a save, before others than an optimizer may write."""
        self._saves.seal()

    def watch_ddp(self, model: nn.Module) -> None:
        """For a model that is wrapped in DDP after `restore`, of which the job was given the module
        inside: gradients are summed as before a restart, also by three ranks or more. Call it on
        all ranks, before the first pass.
        """
        self._training.buckets.watch(model)
