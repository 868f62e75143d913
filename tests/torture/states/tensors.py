"""Tensors of every dtype, layout, view and class. The shape depends on the seed, the contents also
on a *fill*: 0 is what is saved, another one what is there before a restore.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

SUB_BYTE = tuple(getattr(torch, f"{u}int{n}") for u in ("", "u") for n in range(1, 8))
DTYPES: tuple[torch.dtype, ...] = tuple(
    found
    for name, found in sorted(vars(torch).items())
    if isinstance(found, torch.dtype)
    and not name.startswith(("q", "bits"))
    and found not in SUB_BYTE
    and str(found) == f"torch.{name}"  # not an alias, such as `torch.half`
)
COMMON = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.bool, torch.uint8)
SHAPES = [(), (0,), (1,), (3,), (2, 3), (4, 1), (0, 5), (2, 0, 3), (1, 1, 1), (5, 7), (2, 3, 4)]
LARGE = [(70_000,), (300, 301), (1, 33_000)]  # more than what the lowest rank always saves


class Source:
    """What tensors are made of: `shape` draws what depends on the seed alone, `content` more."""

    def __init__(self, seed: int, fill: int) -> None:
        self.shape, self.content = Random(seed), Random(f"{seed}/{fill}")

    def size(self) -> tuple[int, ...]:
        return self.shape.choice(LARGE if self.shape.random() < 0.03 else SHAPES)

    def dtype(self) -> torch.dtype:
        return self.shape.choice(COMMON if self.shape.random() < 0.4 else DTYPES)

    def plain(self, size: tuple[int, ...] | None = None, dtype: Any = None) -> torch.Tensor:
        """A contiguous tensor of any bits: also NaN with a payload, -0.0 and subnormal numbers."""
        size = self.size() if size is None else size
        dtype = dtype or self.dtype()
        data = self.content.randbytes(math.prod(size) * dtype.itemsize)
        if dtype is torch.bool:
            data = bytes(each & 1 for each in data)
        if not data:
            return torch.empty(size, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(size)

    def numbers(self, size: tuple[int, ...]) -> torch.Tensor:
        """Finite numbers, for layouts that compute with them."""
        values = [self.content.choice((0.0, 0.0, -1.5, 2.0)) for _ in range(math.prod(size))]
        return torch.tensor(values).view(size)


class Tagged(torch.Tensor):
    """A subclass with data of its own, and an attribute."""


class Wraps(torch.Tensor):
    """A tensor without data of its own, which does not say what it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner  # shadows a method of tensors
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return "Wraps(...)"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner = torch.utils._pytree.tree_map(
            lambda value: value.inner if isinstance(value, Wraps) else value, (args, kwargs or {})
        )
        found = function(*inner[0], **inner[1])
        return cls(found) if isinstance(found, torch.Tensor) else found


class Flattens(Wraps):
    """One that does say it, as quantized weights do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> Flattens:
        return Flattens(inner["inner"])  # type: ignore[no-any-return]


Make = Callable[[Source], Any]


def _tagged(s: Source) -> Any:
    found = s.plain().as_subclass(Tagged)
    found.tag = "t"
    return found


def _attribute(s: Source) -> Any:
    found = nn.Parameter(s.plain((3,), torch.float32))
    found.is_expert = True
    return found


def _no_memory(s: Source) -> torch.Tensor:
    found = s.plain((4,), torch.float32).clone()
    found.untyped_storage().resize_(0)  # as FSDP frees a parameter
    return found


def _strides(s: Source) -> torch.Tensor:
    return s.shape.choice(_VIEWS)(s.plain((4, 6)))


_VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.t(),
    lambda t: t[:, ::2],
    lambda t: t[1:3, 2:5],
    lambda t: t[0],
    lambda t: t[:, 3],
    lambda t: t[2, 2],
    lambda t: t[4:],
    lambda t: t.view(2, 2, 6).permute(2, 0, 1),
    lambda t: t.view(1, 2, 2, 6).contiguous(memory_format=torch.channels_last),
]
_OVERLAPPING: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[:1].expand(4, 6),
    lambda t: t[:, :1].expand(4, 6),
    lambda t: t[0, 0].expand(3),
    lambda t: t.view(24).unfold(0, 4, 2),
    lambda t: t.as_strided((3, 3), (1, 1)),
    lambda t: t[0].expand(2, 0, 6),
]


def _complex(s: Source) -> torch.Tensor:
    return s.plain((3, 4), s.shape.choice((torch.complex64, torch.complex128)))


def _compressed(layout: str) -> Make:
    def make(s: Source) -> torch.Tensor:
        dense = s.numbers((4, 6))
        if layout in ("bsr", "bsc"):
            return getattr(dense, f"to_sparse_{layout}")((2, 3))  # type: ignore[no-any-return]
        return getattr(dense, f"to_sparse_{layout}")()  # type: ignore[no-any-return]

    return make


def _coo(s: Source) -> torch.Tensor:
    found = s.numbers((3, 4)).to_sparse(s.shape.choice((1, 2)))
    return torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), s.plain((3, 2), torch.float32), (4, 2), check_invariants=False
    ) if s.shape.random() < 0.5 else found  # fmt: skip


def _hooked(s: Source) -> torch.Tensor:
    found = s.plain((2, 2), torch.float32).requires_grad_()
    found.register_hook(lambda grad: grad)
    return found


def _inference(s: Source) -> torch.Tensor:
    with torch.inference_mode():
        return s.plain((2, 3), torch.float32).clone()


def _quantized(s: Source) -> torch.Tensor:
    if s.shape.random() < 0.5:
        scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
        return torch.quantize_per_channel(s.numbers((2, 3)), scales, zeros, 0, torch.qint8)
    return torch.quantize_per_tensor(s.numbers((2, 3)), 0.5, 1, torch.quint8)


def _parameter(s: Source) -> nn.Parameter:
    data = s.plain(None, s.shape.choice(COMMON))
    return nn.Parameter(data, requires_grad=data.is_floating_point())


YES, NO, PERHAPS = "yes", "no", "perhaps"
"""Whether a save must accept it: `perhaps` means that it may refuse it by name."""

KINDS: dict[str, tuple[Make, str]] = {
    "plain": (lambda s: s.plain(), YES),
    "small": (lambda s: s.plain((3,), torch.float32), YES),
    "parameter": (_parameter, YES),
    "buffer": (lambda s: nn.Buffer(s.plain((2,))), YES),
    "strides": (_strides, YES),
    "overlapping": (lambda s: s.shape.choice(_OVERLAPPING)(s.plain((4, 6), s.dtype())), YES),
    "conjugate": (lambda s: _complex(s).conj(), YES),
    "negative": (lambda s: _complex(s).conj().imag, YES),
    "negative part": (lambda s: _complex(s).conj().imag[1:, ::2], YES),
    "of a graph": (lambda s: s.plain((3,), torch.float32).requires_grad_() * 1, YES),
    "hooked": (_hooked, YES),
    "inference": (_inference, YES),
    "sub-byte": (
        lambda s: s.plain((4,), torch.uint8).view(s.shape.choice(SUB_BYTE)), PERHAPS
    ),
    "bits": (lambda s: s.plain((4,), torch.uint8).view(torch.bits8), PERHAPS),
    "sparse": (_coo, YES),
    **{f"sparse {each}": (_compressed(each), YES) for each in ("csr", "csc", "bsr", "bsc")},
    "quantized": (_quantized, PERHAPS),
    "nested": (
        lambda s: torch.nested.nested_tensor(
            [s.plain((2, 3), torch.float32), s.plain((1, 3), torch.float32)], layout=torch.jagged
        ),
        PERHAPS,
    ),
    "meta": (lambda s: torch.empty(s.size(), device="meta"), NO),
    "tagged": (_tagged, PERHAPS),
    "attribute": (_attribute, YES),
    "no memory": (_no_memory, NO),
}  # fmt: skip


LEFT_OUT: dict[str, tuple[Make, str]] = {
    "mkldnn": (lambda s: s.numbers((2, 3)).to_mkldnn(), PERHAPS),
    "uninitialized": (lambda s: nn.UninitializedParameter(), NO),
    "wraps": (lambda s: Wraps(s.plain((2, 3), torch.float32)), NO),
    "flattens": (lambda s: Flattens(s.plain((2, 3), torch.float32)), PERHAPS),
}
"""Generated with `TORTURE_STATES=all` only: few cases of them have been tried."""
if os.environ.get("TORTURE_STATES") == "all":
    KINDS |= LEFT_OUT


def pool(seed: int, fill: int) -> torch.Tensor:
    """The memory of which `part` takes parts, which may overlap."""
    return Source(seed, fill).plain((64,), torch.float32)


def part(memory: torch.Tensor, seed: int) -> torch.Tensor:
    """A part of it."""
    r = Random(seed)
    begin = r.randrange(32)
    found = memory[begin : begin + r.choice((1, 8, 16, 32))]
    how = r.choice(("all", "all", "step", "matrix", "other dtype"))
    if how == "step":
        return found[:: r.choice((2, 3))]
    if how == "matrix" and found.numel() >= 8:
        return found.view(2, -1).t()
    if how == "other dtype":
        return found.view(r.choice((torch.int32, torch.uint8, torch.bfloat16)))
    return found
