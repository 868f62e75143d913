"""Copies tensors during training, as long as training does not change them.

An eager save returns when everything is copied. An overlapped save returns at once: tensors that
only an optimizer changes (its parameters and its state) are copied during the next forward and
backward pass, by a thread, or by the GPU while a thread waits for it. The optimizer's `step` waits,
in a torch hook, for the rest of the copy. All other tensors, such as batch-norm statistics, are
copied at once.

A snapshot must be the state at the moment of the save (C2), so a write to a tensor that is still
being copied must be detected. torch counts the writes to a tensor (`_version`); a write counts when
it ends. So the counts are compared not when the copy ends, but later, on the training thread, when
the snapshot is sealed: no write of that thread is in progress there, and every write that began
before has been counted. Copied bytes are written to files before that, but never committed: no rank
reports that it has finished before its snapshot is sealed.

A write that torch does not count (through `.data`, numpy or a raw pointer) to a tensor of an
optimizer, between `save` and `step`, is not detected: such code needs an eager save. If the write
comes between the copy of a byte and its checksum, the checkpoint fails verification
(`snapshot/chunk_copy.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from outlast.async_checkpoint.snapshot.chunk_copy import Chunks
from outlast.async_checkpoint.snapshot.device_copy import CopyPair, DeviceChunks, on_gpu
from outlast.errors import CheckpointError, SaveCancelled

# The writer, which writes pieces of this size, is notified whenever this much has been copied.
_REPORTED_BYTES = 16 << 20
_WORTH_A_CALL = 64 << 10  # below that, a call costs more than the copy
_INSIDE = ("optimizer", "_optimizer", "optim", "base_optimizer")  # where wrappers keep theirs
_MAX_DEPTH = 8  # in case a wrapper refers to itself


def is_contiguous_cpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is contiguous in CPU memory, and large enough to be copied by itself."""
    return tensor.nbytes >= _WORTH_A_CALL and tensor.is_cpu and _has_bytes(tensor)


def _has_bytes(tensor: torch.Tensor) -> bool:
    # A subclass that wraps other tensors has neither memory nor an address.
    return tensor.is_contiguous() and tensor.data_ptr() != 0


class Writes:
    """The writes to tensors that torch has counted since this object was created."""

    def __init__(self, sources: Iterable[torch.Tensor]) -> None:
        # A tensor made in inference mode has no count, and cannot be written to outside of it.
        self._sources = [source for source in sources if not source.is_inference()]
        self._versions = [source._version for source in self._sources]

    def found(self, hint: str) -> CheckpointError | None:
        """The error if there were any; `hint` completes its message."""
        changed = [
            tuple(source.shape)
            for source, version in zip(self._sources, self._versions, strict=True)
            if source._version != version
        ]
        if not changed:
            return None
        return CheckpointError(
            f"{len(changed)} tensors (the first of shape {changed[0]}) were written to while "
            f"they were copied, {hint}: the snapshot is torn"
        )


def can_overlap(tensor: torch.Tensor, owned: set[int]) -> bool:
    """Whether the tensor can be copied during training: only an optimizer changes it (its address
    is in `owned`), and it is contiguous, in the memory of the CPU or of a GPU.
    """
    if not (tensor.is_cpu or on_gpu(tensor)) or tensor.is_inference():
        return False
    return _has_bytes(tensor) and tensor.data_ptr() in owned


def addresses_of_optimizers(optimizers: Iterable[Optimizer]) -> set[int]:
    """The addresses of the tensors that only these optimizers change."""
    found: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found.update(_address(parameter) for parameter in group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                found.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
    return found


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's bytes; for a DTensor, of this rank's part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.data_ptr()


def optimizers_of(overlap: Any) -> tuple[list[Optimizer], list[str]]:
    """The optimizers that the argument `overlap` gives, without their wrappers; and the types of
    those whose `step` cannot be hooked, so that their tensors must be copied at once.

    torch calls the hook for each optimizer that was constructed as a `torch.optim.Optimizer`. A
    wrapper, such as that of accelerate, often is one by class only: the one inside has the hook.

    Raises:
        TypeError: if the argument is neither an optimizer, nor several, nor `False`.
        ValueError: if it is `True`.
    """
    if overlap is False:
        return [], []
    if overlap is True:
        raise ValueError(
            "overlap=True is for a Job, which has the optimizer: pass the optimizer itself to a "
            "Checkpointer, overlap=optimizer"
        )
    several = isinstance(overlap, Iterable) and not isinstance(overlap, str)
    hooked: list[Optimizer] = []
    others: list[str] = []
    for each in list(overlap) if several else [overlap]:
        if not callable(getattr(each, "step", None)):
            raise TypeError(f"overlap must be an optimizer, several, or False, not {each!r}")
        inside = _hooked_optimizer(each)
        if inside is None:
            others.append(type(each).__name__)
        else:
            hooked.append(inside)
    return hooked, others


def _hooked_optimizer(given: Any) -> Optimizer | None:
    """The outermost optimizer whose `step` calls torch's hooks."""
    current = given
    for _ in range(_MAX_DEPTH):
        if isinstance(current, Optimizer) and getattr(type(current).step, "hooked", False):
            return current
        current = next((v for v in (getattr(current, n, None) for n in _INSIDE) if v), None)
    return None


class OverlappedCopy:
    """Copies in a thread, and makes the optimizers' steps wait for it. Its owner, the `Snapshot`,
    seals: it waits for the end, removes the hook, and asks whether what was copied is correct.

    Args:
        copies: from contiguous tensors to tensors in the buffer.
        chunks: make the copies, in the order of their addresses.
        optimizers: whose steps change what is copied.
        seal: called before each step of one of them, on the training thread.
        reached: called on the copying thread from time to time, and at the end of the copy, with
            the address up to which everything is copied.
    """

    def __init__(
        self,
        copies: Sequence[CopyPair],
        chunks: Chunks | DeviceChunks,
        optimizers: Sequence[Optimizer],
        seal: Callable[[], None],
        reached: Callable[[int], None] = lambda address: None,
    ) -> None:
        self._copies = copies  # keeps the memory alive, on both sides
        self._writes: Writes | None = Writes(source for source, _ in copies)
        self._chunks: Chunks | DeviceChunks | None = chunks
        self._optimizers = optimizers
        self._seal = seal
        self._reached = reached
        self._called_off = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="outlast-snapshot", daemon=True)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def start(self) -> None:
        """Starts the copy. Store the object first, where `call_off` will find it."""
        self._thread.start()

    def call_off(self) -> None:
        """Makes the copy end early, without a result."""
        self._called_off = True

    def end(self) -> None:
        if self._thread.ident is not None:  # else it never starts, or sees that it was called off
            self._await_copy()
        self._hook.remove()

    def found(self) -> CheckpointError | None:
        """Why what was copied cannot be used, after `end`. On the training thread, where no write
        to the tensors is in progress.
        """
        if self._called_off:
            return SaveCancelled("the snapshot was called off")
        if not self._ended.is_set():  # the thread was never started
            return CheckpointError("the snapshot was never copied")
        if self._error is not None:
            return CheckpointError(f"the copy of a tensor failed: {self._error}")
        assert self._writes is not None
        return self._writes.found(
            "before the optimizer's step (save such tensors eagerly: leave their optimizer out of "
            "`overlap`)"
        )

    def checksums(self) -> dict[str, dict[str, Any]]:
        return {} if self._chunks is None else self._chunks.checksums()

    def release(self) -> None:
        """After the seal: what holds the snapshot must not hold the model."""
        self._copies = self._optimizers = ()
        self._writes = self._chunks = None
        self._seal, self._reached = _nothing, _nothing

    def _await_copy(self) -> None:
        # Not `join`: after an interrupted `join`, a thread that is still copying counts as dead
        # (Python 3.11, bpo-45274).
        self._ended.wait()

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if any(optimizer is each for each in self._optimizers):
            self._seal()

    def _copy(self) -> None:
        try:
            chunks = self._chunks
            assert chunks is not None
            try:
                self._fill_all(chunks)
            finally:
                chunks.settle()
            if not self._called_off:
                self._reached(sys.maxsize)
        except BaseException as e:  # noqa: BLE001 - the seal reports it on the training thread
            self._error = e
        finally:
            self._ended.set()

    def _fill_all(self, chunks: Chunks | DeviceChunks) -> None:
        reported = 0
        for number in range(len(chunks)):
            if self._called_off:
                return
            upto = self._fill(chunks, number)
            reported = reported or upto
            if upto - reported >= _REPORTED_BYTES:
                reported = upto
                self._reached(upto)

    def _fill(self, chunks: Chunks | DeviceChunks, number: int) -> int:
        return chunks.fill(number, lambda: self._called_off)


def _nothing(*_: object) -> None:
    """After the seal."""
