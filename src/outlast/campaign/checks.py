"""What a round must not leave behind: processes, temporary files, unfinished or damaged
checkpoints, open descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import psutil

from outlast.async_checkpoint import inspection
from outlast.campaign.environment import MARK
from outlast.campaign.notes import ENTRY, read_notes
from outlast.errors import CheckpointError
from outlast.events.event import Note

_GROWTH = 8
"""A process may have this many more descriptors than before, besides the largest increase, which is
that of its first save. A leak repeats at each restart.
"""
_WARM = 2
"""Entries of a process before its resources are compared: some are opened once."""


def marked(mark: str) -> list[psutil.Process]:
    """The live processes with this mark."""
    found = []
    for process in psutil.process_iter():
        # It has ended, or is another user's.
        with contextlib.suppress(psutil.Error, OSError):
            is_marked = process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap_orphans(mark: str, linger_s: float) -> list[str]:
    """Waits `linger_s` for the processes to end; describes and kills those that do not."""
    deadline = time.monotonic() + linger_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
    described = []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            described.append(f"process {process.pid}, {process.status()}: {_command(process)}")
            process.kill()
    psutil.wait_procs(left, timeout=linger_s)
    return described


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({' '.join(process.cmdline())[:200]})"
    except psutil.Error as error:
        return type(error).__name__


def temporary_files(folder: Path, prefix: str) -> list[str]:
    """Files and sockets in the folders of temporary files of the hosts, in entries whose names
    begin with the prefix; empty folders do not count.
    """
    return [
        f"temporary file {path.relative_to(folder)}"
        for entry in sorted(folder.glob(f"*/{prefix}*"))
        for path in (entry, *sorted(entry.rglob("*")))
        if not path.is_dir() or path.is_symlink()
    ]


def unfinished_checkpoints(folder: Path) -> list[str]:
    """Working folders of saves that were neither committed nor removed."""
    with contextlib.closing(inspection.open_storage(str(folder))) as storage:
        found = [one for one in inspection.survey(storage) if one.step is None]
    return [f"{one.folder}: {one.wrong}" for one in found]


def damaged_checkpoints(folder: Path) -> list[str]:
    """Committed checkpoints of which some byte is not the one that was saved."""
    found = []
    with contextlib.closing(inspection.open_storage(str(folder))) as storage:
        for one in inspection.survey(storage):
            if one.step is None:
                continue
            try:
                inspection.verify(storage, one.step)
            except CheckpointError as error:
                found.append(f"{one.folder}: {error}")
    return found


def leaks(folder: Path) -> list[str]:
    """Processes whose descriptors or threads grew with each restart in place."""
    entries: dict[int, list[Note]] = defaultdict(list)
    for note in read_notes(folder):
        if note.name == ENTRY:
            entries[note.pid].append(note)
    found = []
    for pid, notes in entries.items():
        if len(notes) < 2 * _WARM:
            continue
        warm = [note.data for note in notes[_WARM:]]
        where = f"rank {notes[-1].rank} (process {pid})"
        if _grows([sum(data["descriptors"].values()) for data in warm]):
            first, last = warm[0]["descriptors"], warm[-1]["descriptors"]
            more = ", ".join(
                f"{kind}: {first.get(kind, 0)} to {count}"
                for kind, count in sorted(last.items())
                if count > first.get(kind, 0)
            )
            found.append(f"{where} has more descriptors with each restart ({more})")
        if _grows([data["threads"] for data in warm]):
            threads = f"{warm[0]['threads']} to {warm[-1]['threads']}"
            found.append(f"{where} has more threads with each restart ({threads})")
    return found


def _grows(counts: Sequence[int]) -> bool:
    largest = max((b - a for a, b in itertools.pairwise(counts)), default=0)
    return counts[-1] - counts[0] - largest > _GROWTH and counts[-1] == max(counts)
