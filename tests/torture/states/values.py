"""Python values of every type that somebody keeps in a state. As with `tensors`, a fill of 0 is
what is saved; values of another fill have the same type.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import io
import pathlib
import random
import threading
import types
import uuid
import zoneinfo
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from .tensors import KINDS, NO, PERHAPS, YES, Source


class Color(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Mode(str, enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Number(enum.IntEnum):
    ONE = 1
    TWO = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Config:
    rate: float
    inner: Any = None
    names: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: tuple[int, ...] = ()


class OwnDict(dict[Any, Any]):
    """A dict with an attribute."""


class OwnList(list[Any]):
    pass


class Unknown:
    """Of a class that torch was not told about."""

    def __init__(self) -> None:
        self.x = 1


FLOATS = (0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308, 0.1)
TEXTS = ("", "a", "é", "\U0001f600", "a\0b", "\ud800", "__outlast__", "line\nline", "x" * 3000)
INTS = (0, 1, -1, 255, 2**31, -(2**63), 2**64, 2**1999, True)
DTYPES = (
    *("?", "i1", "<u2", ">i4", "f2", "f4", "f8", ">f8", "c8", "c16", "g", "S3", "S0", "U2", "U0"),
    *("M8[ns]", "m8[s]", "V5", [("a", "f4"), ("b", "i2", (2,))], [("t", "U3")]),
)
SIZES = ((), (0,), (1,), (3,), (2, 3), (2, 0))


def scalar(r: Random) -> Any:
    """A value that torch itself loads with `weights_only`."""
    return r.choice((r.choice(FLOATS), r.choice(TEXTS), r.choice(INTS), None, r.random(), 1j))


def _hashable(r: Random) -> Any:
    return r.choice((1, "a", 2.5, None, (1, "b"), Color.RED, b"", frozenset((1,)), Number.ONE))


def nested(s: Source, depth: int = 0) -> Any:
    """Containers that a walk over a state does not go into, with tensors and values in them."""
    r = s.content
    if depth > 2 or (depth and r.random() < 0.3):  # its own kind is the same whatever it has
        kinds = ("plain", "plain", "strides", "parameter", "conjugate", "sparse")
        if r.random() < 0.4:
            return KINDS[r.choice(kinds)][0](Source(r.randrange(2**32), 0))
        return r.choice((scalar, _hashable, lambda r: VALUES[r.choice(_INNER)][0](s)))(r)
    inner = [nested(s, depth + 1) for _ in range(r.randrange(4))]
    names = [r.choice(("a", "b", 1, (2, "c"), 2.5, None, "params", True)) for _ in inner]
    made: tuple[Callable[[], Any], ...] = (
        lambda: tuple(inner),
        lambda: Point(tuple(inner), depth),
        lambda: collections.deque(inner, r.choice((None, 8))),
        lambda: Config(0.1, inner, ["a"]),
        lambda: Frozen(inner, (1, 2)),
        lambda: (dict(zip(names, inner, strict=True)),),
        lambda: (collections.OrderedDict(zip(names, inner, strict=True)), inner),
        lambda: types.SimpleNamespace(a=inner, self=1),
        lambda: argparse.Namespace(lr=0.1, more=inner),
    )
    return r.choice(made)()


def _array(s: Source) -> Any:
    dtype = np.dtype(s.shape.choice(DTYPES))
    size = s.shape.choice(SIZES)
    count = int(np.prod(size)) * dtype.itemsize
    if dtype.kind == "U":
        found = np.full(size, "é", dtype)
    elif dtype.kind == "b":
        found = np.frombuffer(bytes(s.content.randrange(2) for _ in range(count)), dtype)
    elif dtype.names and dtype.names[0] == "t":
        found = np.zeros(size, dtype)
    else:
        found = np.frombuffer(s.content.randbytes(count), dtype) if count else np.zeros(size, dtype)
    found = found.reshape(size).copy()
    return np.asfortranarray(found) if s.shape.random() < 0.2 else found


def _numpy_scalar(s: Source) -> Any:
    found = _array(s)
    return (
        found.flat[0]
        if found.size and not isinstance(found.flat[0], str | bytes)
        else np.float32(1)
    )


def _times(r: Random) -> Any:
    zone = r.choice((None, datetime.timezone.utc, zoneinfo.ZoneInfo("Europe/Berlin")))
    return r.choice(
        (
            datetime.datetime(2024, 10, 27, 2, 30, tzinfo=zone, fold=r.randrange(2)),
            datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3, 4, tzinfo=zone),
            datetime.timedelta(r.randrange(9), 3, -4),
            datetime.timezone(datetime.timedelta(hours=2), "x"),
        )
    )


def _random_state(r: Random) -> Any:
    return r.choice(
        (
            lambda: random.Random(3).getstate(),
            lambda: np.random.RandomState(3).get_state(),
            lambda: np.random.default_rng(3).bit_generator.state,
            lambda: torch.Generator().manual_seed(3).get_state(),
        )
    )()


def _bytes_io(r: Random) -> io.BytesIO:
    found = io.BytesIO(r.randbytes(r.choice((0, 5))))
    found.seek(r.randrange(4))
    return found


def _cycle() -> Any:
    found: list[Any] = []
    found.append((found,))
    return (found,)


def _local_class() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


Make = Callable[[Source], Any]

VALUES: dict[str, tuple[Make, str]] = {
    "float": (lambda s: s.content.choice(FLOATS), YES),
    "text": (lambda s: s.content.choice(TEXTS), PERHAPS),
    "int": (lambda s: s.content.choice(INTS), YES),
    "bool": (lambda s: s.content.random() < 0.5, YES),
    "complex": (lambda s: complex(s.content.choice(FLOATS), -0.0), YES),
    "none": (lambda s: None, YES),
    "bytes": (lambda s: s.content.randbytes(s.content.choice((0, 1, 300))), YES),
    "bytearray": (lambda s: bytearray(s.content.randbytes(s.content.choice((0, 4)))), YES),
    "tuple": (lambda s: tuple(scalar(s.content) for _ in range(s.content.randrange(4))), PERHAPS),
    "set": (lambda s: {_hashable(s.content) for _ in range(s.content.randrange(4))}, YES),
    "frozenset": (lambda s: frozenset({_hashable(s.content), 3}), YES),
    "deque": (
        lambda s: collections.deque([1, scalar(s.content)], s.content.choice((None, 5))),
        PERHAPS,
    ),
    "nested": (nested, PERHAPS),
    "counter": (lambda s: (collections.Counter("abca"),), YES),
    "defaultdict": (lambda s: (collections.defaultdict(list, a=[1]),), PERHAPS),
    "enum": (lambda s: s.content.choice((*Color, *Mode, *Number, *Rights)), YES),
    "flags": (lambda s: Rights.READ | Rights.WRITE, YES),
    "named tuple": (lambda s: Point(s.content.random(), s.plain((2,))), YES),
    "dataclass": (lambda s: Config(s.content.random(), s.plain((2,)), ["x"]), YES),
    "frozen": (lambda s: Frozen(s.content.random(), (1, 2)), YES),
    "array": (_array, PERHAPS),
    "numpy scalar": (_numpy_scalar, PERHAPS),
    "numpy dtype": (lambda s: np.dtype(s.content.choice(DTYPES)), PERHAPS),
    "torch value": (
        lambda s: s.content.choice(
            (torch.Size([1, 2]), torch.float8_e5m2, torch.bfloat16, torch.device("cuda:1"))
        ),
        YES,
    ),
    "layout": (lambda s: s.content.choice((torch.strided, torch.channels_last)), PERHAPS),
    "random state": (lambda s: _random_state(s.shape), PERHAPS),
    "time": (lambda s: _times(s.content), YES),
    "decimal": (lambda s: decimal.Decimal(s.content.choice(("1.50", "NaN", "-0", "1E+9"))), YES),
    "path": (lambda s: pathlib.PurePosixPath(s.content.choice(("a/b", ".", "/"))), YES),
    "range": (lambda s: range(s.content.randrange(5), 9, 2), YES),
    "bytes io": (lambda s: _bytes_io(s.content), YES),
    "namespace": (lambda s: types.SimpleNamespace(a=scalar(s.content), b=[1]), PERHAPS),
    "long int": (lambda s: 2 ** s.content.choice((1999, 2001, 20000)), PERHAPS),
    "fraction": (lambda s: fractions.Fraction(1, 3), PERHAPS),
    "uuid": (lambda s: uuid.UUID(int=3), PERHAPS),
    "masked": (lambda s: np.ma.array([1.0, 2.0], mask=[0, 1]), PERHAPS),
    "matrix": (lambda s: np.zeros((2, 2)).view(np.recarray), PERHAPS),
    "array module": (lambda s: array.array("d", [1.0]), PERHAPS),
    "own dict": (lambda s: (OwnDict(a=1),), PERHAPS),
    "own list": (lambda s: (OwnList([1, 2]),), PERHAPS),
    "memoryview": (lambda s: memoryview(b"abc"), NO),
    "objects": (lambda s: np.array([object(), None], dtype=object), NO),
    "unknown": (lambda s: Unknown(), NO),
    "class": (lambda s: Unknown, NO),
    "lambda": (lambda s: lambda: 3, NO),
    "function": (lambda s: nested, NO),
    "partial": (lambda s: functools.partial(int, base=2), NO),
    "generator": (lambda s: (each for each in (1, 2)), NO),
    "torch generator": (lambda s: torch.Generator().manual_seed(3), NO),
    "random": (lambda s: random.Random(3), NO),
    "numpy random": (lambda s: np.random.default_rng(3), NO),
    "lock": (lambda s: threading.Lock(), NO),
    "file": (lambda s: io.StringIO("a"), NO),
    "module": (lambda s: torch.nn.Linear(1, 1), NO),
    "optimizer class": (lambda s: torch.optim.SGD, NO),
    "exception": (lambda s: ValueError("x"), NO),
    "cycle": (lambda s: _cycle(), NO),
    "local class": (lambda s: _local_class(), NO),
    "tuple with a lambda": (lambda s: (1, {"a": [lambda: 3]}), NO),
    "tuple with freed memory": (lambda s: ([KINDS["no memory"][0](s)],), NO),
    "tuple with meta": (lambda s: ({"a": torch.empty(2, device="meta")},), NO),
}

_INNER = ("enum", "array", "numpy scalar", "time", "decimal", "path", "bytes", "named tuple", "set")
