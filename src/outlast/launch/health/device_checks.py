"""The checks of the accelerators of this host, or of the CPU if there is none.

A product of matrices is compared with its exact value. Their elements are small integers, so that
every sum on the way is exact in the format of the product, in any order of the additions: no
tolerance is needed, and no other host. The value is not computed by the same units: for a random
vector v, (A B) v must be equal to A (B v), which the CPU computes in 64-bit integers. A wrong
product passes only if all of its errors are orthogonal to v.
"""

from __future__ import annotations

import time

import torch

from outlast.system.units import size_text

_SIZE, _CPU_SIZE = 2048, 512
_REPEATS, _CPU_REPEATS = 64, 4
_COPY_BYTES, _CPU_COPY_BYTES = 1 << 28, 1 << 26


def devices() -> list[str]:
    """The names of the devices that torch sees."""
    if not torch.accelerator.is_available():
        return ["cpu"]
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]


def check_device(name: str) -> str:
    """Multiplies and copies on a device, and compares; a `RuntimeError` names what is wrong."""
    cpu = name == "cpu"
    check_products(name, torch.float32, _CPU_SIZE if cpu else _SIZE, largest=8)
    if not cpu:
        # In bfloat16, with its own units, integers are exact up to 256.
        check_products(name, torch.bfloat16, 256, largest=1)
    return f"{name}: products exact, {_copied(name, _CPU_COPY_BYTES if cpu else _COPY_BYTES)}"


def check_products(name: str, dtype: torch.dtype, inner: int, largest: int) -> None:
    """Compares the product of matrices with elements up to `largest` with its exact value, and with
    itself when it is repeated.
    """
    size, repeats = (_CPU_SIZE, _CPU_REPEATS) if name == "cpu" else (_SIZE, _REPEATS)
    generator = torch.Generator().manual_seed(1)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-largest, largest + 1, shape, generator=generator)

    a, b, v = integers(size, inner), integers(inner, size), integers(size)
    on_device = a.to(name, dtype), b.to(name, dtype)
    first = on_device[0] @ on_device[1]
    if not torch.equal(first.cpu().long() @ v, a @ (b @ v)):
        raise RuntimeError(f"a product of matrices of {dtype} is wrong: the device is faulty")
    # On the device, with one wait at the end: this keeps it busy.
    wrong = torch.zeros((), dtype=torch.long, device=name)
    for _ in range(repeats):
        wrong += (on_device[0] @ on_device[1] != first).sum()
    if count := int(wrong):
        raise RuntimeError(
            f"{count} elements of {repeats} equal products of {dtype} differ: the device is faulty"
        )


def _copied(name: str, size_bytes: int) -> str:
    source = torch.arange(size_bytes // 8, device=name)
    source.clone()  # the first allocation takes longer
    _wait(name)
    began = time.monotonic()
    copy = source.clone()
    _wait(name)
    seconds = time.monotonic() - began
    if not torch.equal(copy, source):
        raise RuntimeError("a copy of its memory differs from its source: the device is faulty")
    return f"memory copied at {size_text(int(size_bytes / max(seconds, 1e-9)))}/s"


def _wait(name: str) -> None:
    if name != "cpu":
        torch.accelerator.synchronize(torch.device(name))
