"""`LogFiles`: after a restart, a fit continues the files of `CSVLogger` and `TensorBoardLogger`.

A new logger takes the next free version; if its version is given, a `CSVLogger` deletes the
existing file. `LogFiles` stores the versions of the first fit beside the checkpoints, and sets them
before anything else reads them, because the folder of a `ModelCheckpoint` may contain the version.
It keeps the rows of a `CSVLogger` up to the restored step. The later ones are logged again, when
their steps are repeated. TensorBoard shows the last value of each step by itself.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from outlast.system.files import replace_durably

log = logging.getLogger("outlast.integrations")

_VERSIONS = ".lightning-versions"
_KINDS = CSVLogger, TensorBoardLogger


class LogFiles:
    """The log files of one fit; if the job's `path` is a URL, versions are Lightning's own."""

    def __init__(self, trainer: Trainer, path: str | os.PathLike[str]) -> None:
        self._trainer = trainer
        self._loggers = [
            each
            for each in trainer.loggers
            if isinstance(each, _KINDS) and "://" not in str(each.save_dir)
        ]
        self._file = None if "://" in os.fspath(path) else Path(path) / _VERSIONS
        self._rows: list[_Rows] = []

    def continue_versions(self) -> None:
        """Sets the versions of the first fit, if there was one. Called on all ranks, in `setup`."""
        stored: list[Any] | None = None
        if self._trainer.is_global_zero and self._file is not None and self._file.exists():
            with contextlib.suppress(OSError, ValueError):  # then the versions are Lightning's
                stored = json.loads(self._file.read_text())
        stored = self._trainer.strategy.broadcast(stored)
        if stored is None or len(stored) != len(self._loggers):
            return
        for logger, version in zip(self._loggers, stored, strict=True):
            unused = logger.log_dir
            if logger.version != version:
                logger._version = version
                if self._trainer.is_global_zero:
                    with contextlib.suppress(OSError):  # it is not empty
                        _close(logger, empty=unused)
                        os.rmdir(unused)
                logger._experiment = None

    def begin(self, step: int) -> None:
        """Stores the versions, and keeps the rows up to `step`, whose state was restored."""
        if not self._trainer.is_global_zero or not self._loggers:
            return
        if self._file is not None:
            versions = [each.version for each in self._loggers]
            replace_durably(self._file, json.dumps(versions).encode())
            self._rows = [
                _Rows(each, step) for each in self._loggers if isinstance(each, CSVLogger)
            ]
        for each in self._loggers:
            # Only where the program asks for it: this hides all that has another number than its
            # step, such as samples. One more than the restored step, as the program may have logged
            # that step by this number, and it is not made again.
            if isinstance(each, TensorBoardLogger) and "purge_step" in each._kwargs:
                _close(each)
                each._kwargs["purge_step"] = step + 1

    def completed(self, step: int) -> None:
        for each in list(self._rows):
            try:
                each.completed(step)
            except OSError as e:  # without hard links, for example: a log must not end a training
                log.warning("%s is not continued after a fault: %s", each.path, e)
                self._rows.remove(each)


def _close(logger: Any, empty: str | None = None) -> None:
    """Closes the event file that Lightning has opened before the fit's begin; the next event opens
    another one. Removes it if it is the only file of an `empty` folder: it has no events yet.
    """
    if isinstance(logger, TensorBoardLogger):
        logger.finalize("")
        logger._experiment = None
        files = [] if empty is None else os.listdir(empty)
        if empty is not None and len(files) == 1 and files[0].startswith("events.out.tfevents."):
            os.unlink(os.path.join(empty, files[0]))


class _Rows:
    """The rows of one logger. Each write appends the step and the number of rows to `.rows`, beside
    the CSV file, so that a killed process loses none. `.metrics` is a hard link to the CSV file: it
    survives when a new logger deletes the file.
    """

    def __init__(self, logger: CSVLogger, step: int) -> None:
        self._writer = logger.experiment
        self.path = Path(self._writer.metrics_file_path)
        self._kept, self._counts = self.path.with_name(".metrics"), self.path.with_name(".rows")
        text = self._counts.read_text() if self._counts.exists() else ""
        whole = [line for line in text.splitlines() if len(line.split()) == 2]  # the last: torn
        lines = [line for line in whole if int(line.split()[0]) <= step]
        self._count = self._last = int(lines[-1].split()[1]) if lines else 0
        self._continue()
        replace_durably(self._counts, "".join(f"{line}\n" for line in lines).encode())
        self._count += len(self._writer.metrics)
        log_metrics = self._writer.log_metrics

        def count_and_log(*arguments: Any, **named: Any) -> None:
            self._count += 1
            log_metrics(*arguments, **named)

        self._writer.log_metrics = count_and_log

    def _continue(self) -> None:
        self.path.unlink(missing_ok=True)
        if self._count == 0 or not self._kept.exists():
            self._kept.unlink(missing_ok=True)
            self._count = 0
            return
        with self._kept.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(islice(reader, self._count))
            names = self._writer.metrics_keys = list(reader.fieldnames or ())
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(rows)
        replace_durably(self._kept, text.getvalue().encode())
        os.link(self._kept, self.path)

    def completed(self, step: int) -> None:
        if self._count == self._last:
            return
        self._writer.save()
        if not self._kept.exists():
            os.link(self.path, self._kept)
        with self._counts.open("a") as file:
            file.write(f"{step} {self._count}\n")
        self._last = self._count
