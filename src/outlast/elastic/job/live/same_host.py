"""Reads tensors from the memory of another process of this host: one copy, and no socket.

`process_vm_readv` copies from process to process. The owner of the memory names itself and the
addresses, and keeps the tensors as they are until the reader has answered. Linux allows the call to
processes of one user; under Yama, as on Ubuntu, the owner must also name the reader (`prctl`). A
token that the reader must find in that memory shows that the process is the owner, and not another
one with its number (in another container, or on another host).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import Iterator, Sequence

import torch
import xxhash

from outlast.system.parallel import in_threads
from outlast.system.shared_memory import running_kernel

_AT_ONCE_BYTES = 8 << 20
_THREADS = 2  # one alone is held up by new pages: 170 ms instead of 100 for 256 MiB
_PR_SET_PTRACER = 0x59616D61
_libc = ctypes.CDLL(None, use_errno=True)

Span = tuple[torch.Tensor, int]  # bytes to read, contiguous, and their address in the other process


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def reader() -> list[int]:
    """What the reader tells the owner: its process, and a number of the running kernel."""
    try:
        kernel = running_kernel()
    except OSError:
        return [0, 0]
    return [os.getpid(), xxhash.xxh3_64_intdigest(kernel.encode()) >> 1]


@contextlib.contextmanager
def lent(views: Sequence[torch.Tensor], to: Sequence[int]) -> Iterator[list[int]]:
    """Lets the process that `to` describes read `views`, which are contiguous. Gives what to tell
    it: four numbers more than `views`, or one 0 if it cannot read them.
    """
    if to[0] == 0 or list(to[1:]) != reader()[1:] or any(v.device.type != "cpu" for v in views):
        yield [0]
        return
    token = torch.tensor([secrets.randbits(62), secrets.randbits(62)])
    # Fails without Yama, where it is not needed. Whom the program had named before cannot be asked.
    _libc.prctl(_PR_SET_PTRACER, to[0], 0, 0, 0)
    try:
        addresses = [token.data_ptr(), *(view.data_ptr() for view in views)]
        yield [os.getpid(), *token.tolist(), *addresses]
    finally:
        _libc.prctl(_PR_SET_PTRACER, 0, 0, 0, 0)


class OwnersMemory:
    """The memory of the process whose `lent` gave `told`; `OSError` if it cannot be read."""

    def __init__(self, told: Sequence[int]) -> None:
        self._pid, token, self.addresses = told[0], list(told[1:3]), list(told[4:])
        if self._pid == 0:
            raise OSError("the memory is not lent")
        found = torch.zeros(2, dtype=torch.int64)
        self._read(found.view(torch.uint8), told[3])
        if found.tolist() != token:
            raise OSError(f"process {self._pid} is another one here")

    def read(self, spans: Sequence[Span]) -> None:
        """Reads the bytes; an `OSError` if they are not there, or may not be read."""
        # A restart may interrupt this thread, which then leaves the others behind: what they write
        # to must stay, so they have the tensors, and not addresses.
        pieces = [
            (part, there + number * _AT_ONCE_BYTES)
            for into, there in spans
            for number, part in enumerate(into.split(_AT_ONCE_BYTES))
        ]

        def work(left: Iterator[tuple[torch.Tensor, int]]) -> None:
            for piece in left:
                self._read(*piece)

        total = sum(into.nbytes for into, _ in spans)
        in_threads(work, pieces, _THREADS if total > _AT_ONCE_BYTES else 1, "outlast-read")

    def _read(self, into: torch.Tensor, there: int) -> None:
        done, size, here = 0, into.nbytes, into.data_ptr()
        while done < size:
            local, remote = _Vector(here + done, size - done), _Vector(there + done, size - done)
            got = _libc.process_vm_readv(
                self._pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0
            )
            if got <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv({self._pid}): {os.strerror(number)}")
            done += got
