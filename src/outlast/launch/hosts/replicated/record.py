"""What an agent knows of the groups of its run, on disk: it must outlive the agent, see `past`.

One small file for each run and address, in a private folder of `/var/tmp`, which is local and stays
when the host starts again, or in the folder of `--rdzv-conf record_dir`. It is replaced durably
before this host acts on what it says, and removed when the host has left its group in order.

A disk that is busy with a checkpoint, or full, may take longer than a lease. In a group, a thread
writes, for as long as it takes, and only a change of the voters waits for that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from outlast.launch.hosts.replicated.past import Past
from outlast.system.files import (
    FileLocked,
    fsync_folder,
    lock_file,
    make_folder,
    private_folder,
    replace_durably,
)
from outlast.system.parallel import start_thread

FOLDERS = ("/var/tmp", tempfile.gettempdir())

_MOST_OUT = 256
"""Of so many ids, most are of groups that are over."""
_CLOSING_S = 5.0
"""How long the end of a launcher waits for the disk."""
RETRY_S = 1.0

_log = logging.getLogger(__name__)


class _Content(msgspec.Struct):
    run_id: str
    me: str
    past: Past


class Record:
    """The record of this process for one run and address."""

    def __init__(self, path: Path, run_id: str) -> None:
        self.past = Past()  # what is known, of which the file holds a copy
        self.durable = False  # whether there is a file
        self._path, self._run_id = path, run_id
        self._me = ""
        self._lock = -1
        self._writing = threading.Lock()
        self._closing = threading.Event()
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        try:
            make_folder(path.parent.parent)
            private_folder(path.parent)
            # Also if it is there: who has made it may have ended before its name was durable.
            fsync_folder(path.parent.parent)
            # Without it, a second agent of this address would say that the first has ended.
            self._lock = lock_file(path.with_suffix(".lock"), str(os.getpid()))
            content = _read(path)
        except FileLocked as e:
            self._without(f"process {e} on this host has it")
        except OSError as e:
            self._without(str(e))
        else:
            self.durable = True
            self._me = "" if content is None else content.me
            if content is not None and content.run_id == run_id:
                self.past = content.past.with_out([content.me])

    def begin(self, me: str) -> None:
        """This process is the host `me` from now on; the host that it was before is out. An
        `OSError` if the old content, which is wrong now, can be neither replaced nor removed.
        """
        self._is(me)
        try:
            self._write()
        except OSError as e:
            # It says what is true if the disk has lost it, but nothing that is false.
            self._path.unlink(missing_ok=True)
            fsync_folder(self._path.parent)
            self._without(str(e))

    def _is(self, me: str) -> None:
        if self._me:
            self.past = self.past.with_out([self._me])
        self._me = me
        if len(self.past.out) > _MOST_OUT:
            named = frozenset().union(*(group.voters for group in self.past.groups))
            out = self.past.out & named
            self.past = msgspec.structs.replace(self.past, out=out, over=frozenset())

    def ended(self) -> None:
        """This process is no host any more, and never again under that id."""
        if self._me:
            self._is("")
            self._later(self._write_at_last)

    def set(self, past: Past) -> None:
        """Returns when it is durable."""
        if past != self.past:
            self.past = past
            self._write()

    def set_later(self, past: Past, written: Callable[[], None]) -> None:
        """Calls `written`, from another thread, when it is durable."""

        def write() -> None:
            if self._write_at_last():
                written()

        self.past = past
        self._later(write)

    def remove(self) -> None:
        """This host has left in order: the others have agreed that it is none of them."""
        self.past, self._me = Past(), ""
        self._later(self._remove)

    def close(self) -> None:
        """Releases the file, unless the disk hangs: then the end of this process does."""
        self._closing.set()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(_CLOSING_S)
            if self._thread.is_alive():
                return
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # ------------------------------------------------------------------ the thread
    def _later(self, work: Callable[[], object]) -> None:
        if self._thread is None:
            self._thread = start_thread("outlast-record", self._run)  # the disk may hang
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _write_at_last(self) -> bool:
        logged = ""
        while True:
            try:
                self._write()
            except OSError as e:
                if str(e) != logged:
                    logged = str(e)
                    _log.warning(
                        "the record of this host's groups cannot be written: %s; it is tried "
                        "again, and until then this host does not count when voters change",
                        e,
                    )
                if self._closing.wait(RETRY_S):
                    return False
            else:
                return True

    # ------------------------------------------------------------------ the file
    def _write(self) -> None:
        with self._writing:
            if self.durable:
                self._replace()

    def _replace(self) -> None:
        content = _Content(self._run_id, self._me, self.past)
        replace_durably(self._path, msgspec.json.encode(content))

    def _remove(self) -> None:
        with self._writing:
            durable, self.durable = self.durable, False
        if not durable:
            return
        try:
            self._path.unlink(missing_ok=True)
            self._path.with_suffix(".lock").unlink(missing_ok=True)
            fsync_folder(self._path.parent)
        except OSError as e:
            _log.warning("the record of this host's groups cannot be removed: %s", e)

    def _without(self, why: str) -> None:
        self.durable = False
        _log.warning(
            "the record of this host's groups cannot be kept in %s: %s; if more than half of the "
            "hosts lose their power at once, the job may not start again by itself, and if this "
            "host is then cut off, it may begin a second time beside itself",
            self._path.parent,
            why,
        )


def open_record(
    run_id: str, endpoints: Sequence[tuple[str, int]], address: str, folder: str = ""
) -> Record:
    """The record of this host. `folder`: where it is kept, a private folder that is made if it is
    missing.
    """
    if not folder:
        top = next((f for f in FOLDERS if os.access(f, os.W_OK)), FOLDERS[-1])
        folder = f"{top}/outlast-hosts-{os.getuid()}"
    job = json.dumps([run_id, endpoints, address])
    path = Path(folder) / f"{hashlib.sha256(job.encode()).hexdigest()[:20]}.json"
    return Record(path, run_id)


def _read(path: Path) -> _Content | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Content)
    except FileNotFoundError:
        return None
    except ValueError as e:
        _log.warning("%s is damaged, and taken for lost: %s", path, e)
        return None
