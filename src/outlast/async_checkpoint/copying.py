"""Copies tensors into an arena: at once, or beside the training while it does not change them.

Eagerly, a save returns when everything is copied. Overlapped, it returns at once: tensors that
only an optimizer changes (its parameters and its state) are copied by a thread beside the next
forward and backward pass, and the optimizer's `step` waits, by torch's own hook, for what is left.
All other tensors, batch-norm statistics say, are copied eagerly.

What is copied must be the state of the moment of the save (C2), so a write to a tensor that is
still being copied has to be noticed. torch counts the writes to a tensor (`_version`); a write
counts when it ends. A `Guard` therefore compares the counts not when the copy ends, but later, on
the thread that trains: there no write of that thread is under way, and every write that began
before has counted. Only then is the snapshot sealed. What has been copied is written to files
before that, but never committed: no rank says that it has finished before its seal. A write that
torch does not count (through `.data`, numpy or a raw pointer) to a tensor that belongs to an
optimizer, between `save` and `step`, cannot be seen: such code needs an eager save.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.async_checkpoint.streaming import move
from outlast.errors import CheckpointError

__all__ = ["Copy", "Guard", "copy_now", "owned_by"]

Copy = tuple[torch.Tensor, torch.Tensor]  # from, to

# One call: long enough that taking Python's lock in between costs nothing, short enough
# to end soon when the copy is called off.
_PIECE_BYTES = 16 << 20
# The same where several threads share the work: the last piece is what they may wait for.
_SHARE_BYTES = 8 << 20
_WORTH_A_CALL = 64 << 10  # below that, a call costs more than the copy
_MOST_THREADS = 8  # the memory of one host is busy with fewer


def copy_now(copies: Sequence[Copy]) -> None:
    """Copies everything, and returns when that is done.

    What is bytes in a row is copied by as many threads as torch uses, each of which takes the next
    piece when it is done with one. torch's own copy cuts every tensor in equal parts and waits for
    the slowest at each: where anything else runs on one of the processors, the writer of the save
    before say, that takes many times as long.
    """
    plain: list[tuple[int, int, int]] = []
    others: list[Copy] = []
    for source, to in copies:
        size = source.nbytes
        if size >= _WORTH_A_CALL and source.is_contiguous() and source.device.type == "cpu":
            start, end = source.data_ptr(), to.data_ptr()
            plain += [
                (end + at, start + at, min(_SHARE_BYTES, size - at))
                for at in range(0, size, _SHARE_BYTES)
            ]
        else:
            others.append((source, to))
    if plain:
        _move_all(plain, min(torch.get_num_threads(), _MOST_THREADS))
    if others:
        with torch.no_grad():
            torch._foreach_copy_([to for _, to in others], [source for source, _ in others])
        if any(source.is_cuda for source, _ in others):
            torch.cuda.synchronize()


def _move_all(pieces: Sequence[tuple[int, int, int]], threads: int) -> None:
    left = iter(pieces)  # the next of a list's iterator is one step: no two threads get the same

    def take() -> None:
        for to, source, size_bytes in left:
            move(to, source, size_bytes)

    helpers = [
        threading.Thread(target=take, name="outlast-copy", daemon=True)
        for _ in range(min(threads, len(pieces)) - 1)
    ]
    for helper in helpers:
        helper.start()
    take()
    for helper in helpers:
        helper.join()


def owned_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """The tensors that only these optimizers change: the addresses of their bytes."""
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_address(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
    return found


def _address(tensor: torch.Tensor) -> int:
    """Of a tensor's bytes; of this rank's part of a DTensor."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.data_ptr()


class Guard:
    """Copies in a thread, holds the optimizers' steps up until it is done, and seals.

    Args:
        copies: from contiguous tensors in the CPU's memory, to others of the same kind, in the
            order of their addresses.
        optimizers: whose steps change what is copied.
        sealed: called once, on the thread that trains or on one that asks for the snapshot:
            with nothing, when the snapshot is what it should be; else with what went wrong.
        reached: called in the thread that copies, now and then, and when all is copied: everything
            before this address is.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        optimizers: Sequence[Optimizer],
        sealed: Callable[[CheckpointError | None], None],
        reached: Callable[[int], None] = lambda address: None,
    ) -> None:
        self._copies = copies
        self._versions = [source._version for source, _ in copies]
        self._optimizers = optimizers
        self._sealed = sealed
        self._reached = reached
        self._told = copies[0][1].data_ptr() if copies else 0
        self._called_off = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_sealed = False
        self._outcome: tuple[CheckpointError | None] | None = None
        self._ended = threading.Event()
        self._copied = False
        self._thread = threading.Thread(target=self._copy, name="outlast-snapshot", daemon=True)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def start(self) -> None:
        """Begins to copy: once whoever would call it off can find it."""
        self._thread.start()

    @property
    def copied(self) -> bool:
        """Whether the copy has ended."""
        return self._ended.is_set()

    def seal(self) -> None:
        """Waits for the copy to end, and says whether it is good. To be called by a thread of
        which no write to the tensors is under way; a second call does nothing.
        """
        if self._thread.ident is not None:  # else it sees that it was called off, or never starts
            self._await_copy()
        self._hook.remove()  # first, and again at each call: an interrupt may come at any point
        with self._lock:
            if self._is_sealed:
                return
            if self._outcome is None:
                self._outcome = (self._found(),)
            # Said again, and the same, where an interrupt has come before the end of it.
            self._sealed(self._outcome[0])
            self._is_sealed = True
        self._copies = []

    def call_off(self) -> None:
        """Ends the copy; the snapshot is no good."""
        self._called_off = True
        self.seal()

    def _await_copy(self) -> None:
        # Not `join`: an interrupted one has the thread count as dead while it still copies
        # (Python 3.11, bpo-45274).
        self._ended.wait()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(optimizer is each for each in self._optimizers):
            self.seal()

    def _found(self) -> CheckpointError | None:
        if self._called_off:
            return CheckpointError("the snapshot was called off")
        if self._error is None and not self._copied:
            return CheckpointError("the snapshot was never copied")
        if self._error is not None:
            return CheckpointError(f"the copy of a tensor failed: {self._error}")
        changed = [
            tuple(source.shape)
            for (source, _), version in zip(self._copies, self._versions, strict=True)
            if source._version != version
        ]
        if changed:
            return CheckpointError(
                f"{len(changed)} tensors (the first of shape {changed[0]}) were written to while "
                "they were copied, before the optimizer's step: the snapshot is torn. Save such "
                "tensors eagerly: leave their optimizer out of `overlap`"
            )
        return None

    def _copy(self) -> None:
        try:
            for source, to in self._copies:
                self._move(to.data_ptr(), source.data_ptr(), source.nbytes)
            if not self._called_off:
                self._reached(sys.maxsize)
            self._copied = True
        except BaseException as e:  # noqa: BLE001 - `seal` tells it to the thread that trains
            self._error = e
        finally:
            self._ended.set()

    def _move(self, to: int, source: int, size_bytes: int) -> None:
        for at in range(0, size_bytes, _PIECE_BYTES):
            if self._called_off:
                return
            size = min(_PIECE_BYTES, size_bytes - at)
            move(to + at, source + at, size)
            if to + at + size - self._told >= _PIECE_BYTES:
                self._told = to + at + size
                self._reached(self._told)
