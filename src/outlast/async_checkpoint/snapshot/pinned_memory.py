"""Page-locks snapshot buffers, so that a GPU copies into them at full speed, in the background.

The registration of a buffer must end before its memory is unmapped: the GPU would keep writing to
the old pages when other memory is mapped at the same address later.
"""

from __future__ import annotations

import contextlib
import logging

import torch

from outlast.system.shared_memory import SharedMemory

log = logging.getLogger("outlast.checkpoint")

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of this process


def device_in_use() -> int | None:
    """The current CUDA device of this thread; `None` if the process has not used CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


class PinnedMemory:
    """A registration of memory with CUDA."""

    def __init__(self, memory: SharedMemory) -> None:
        self._address = memory.address

    @classmethod
    def pin(cls, memory: SharedMemory, device: int) -> PinnedMemory | None:
        """Page-locks the memory. Without it copies are slower but correct, so an error is logged.

        Args:
            device: any device that this process uses. The current one may be different in a thread
                of this package, where the call would create a context on device 0.
        """
        with torch.cuda.device(device):
            cudart = torch.cuda.cudart()
            code = int(cudart.cudaHostRegister(memory.address, memory.size_bytes, _PORTABLE))
            if code == 0:
                return cls(memory)
            _clear_error(device)
        log.info(
            "a snapshot buffer of %d bytes could not be page-locked (CUDA error %d): copies from "
            "the GPU are slower",
            memory.size_bytes,
            code,
        )
        return None

    def unpin(self) -> None:
        """Ends the registration. No copy into the memory may be in progress."""
        if torch.cuda.is_initialized():  # else this is a forked child, which must not use CUDA
            torch.cuda.cudart().cudaHostUnregister(self._address)


def _clear_error(device: int) -> None:
    """Clears CUDA's last error, which the next kernel of the training would report as its own: a
    kernel here reports it instead.
    """
    with contextlib.suppress(RuntimeError):
        torch.empty(1, device=torch.device("cuda", device)).fill_(0)
