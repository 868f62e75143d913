"""Python values as plain data, which a load (`plain_decoding.py`) reads without running code.

torch reads numbers, text, containers and tensors with `weights_only=True`. Other values are saved
as *nodes*, dicts of plain data that say what they were: NumPy arrays and scalars, dataclasses,
enums, named tuples, deques, frozen sets, dates and times, paths, namespaces. A class is saved by
its name. A load takes the class of that name only from modules that the program has imported, or
from the value that is replaced; it imports nothing, and calls no method of the class. Whatever
could not be loaded in this way is refused when it is saved.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import pathlib
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

TAG = "__outlast__"  # the key that marks a node; part of the checkpoint's format
# Longer integers are pickled in a way that torch does not read.
_MOST_BITS = 2000
# Containers within one another. `decode` takes up to four Python frames for each, `encode` three:
# the recursion limit is no measure, as what a save accepts, a load might not. This many take 600
# of Python's usual 1000 frames; the others are for the program.
_MOST_LEVELS = 150
_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_TORCH_ATOMS = (torch.Size, torch.dtype, torch.device)
FLAT = frozenset(_ATOMS) - {int, bytes}
DICTS = (dict, collections.OrderedDict, collections.Counter)
NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
PATHS = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath)


class Unsavable(ValueError):
    """A value cannot be saved. `where` is its place in what was to be saved."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.where = ""

    def within(self, place: str) -> Unsavable:
        """The same, as seen from the container."""
        self.where = place + self.where
        return self


def encode(value: Any) -> Any:
    """The value, or an equal one of plain data.

    Raises:
        Unsavable: if it could not be loaded again, or refers to itself.
    """
    try:
        return _encode(value, set())
    except RecursionError:  # the program itself is deep in calls
        raise Unsavable("it is nested too deeply") from None


def _encode(value: Any, above: set[int]) -> Any:
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        raise Unsavable(f"an integer of {value.bit_length()} bits")
    if kind is bytes and not value:  # pickled in a way that torch does not read
        return {TAG: "bytes"}
    if kind in _ATOMS or kind in _TORCH_ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, enum.Enum):
        return _enum(value)
    if id(value) in above:
        raise Unsavable("it contains itself")
    if len(above) >= _MOST_LEVELS:
        raise Unsavable(f"it is nested too deeply, in more than {_MOST_LEVELS} containers")
    above.add(id(value))
    try:
        if kind in (list, tuple, set, frozenset, collections.deque):
            return _sequence(value, kind, above)
        if kind in DICTS:
            return _dict(value, kind, above)
        if kind in NAMESPACES:
            return {TAG: "namespace", "of": kind.__name__, "fields": _fields(vars(value), above)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            if getattr(value, "__dict__", None):
                raise Unsavable(f"{kind.__qualname__} has attributes besides its fields")
            items = {name: getattr(value, name) for name in kind._fields}
            return {TAG: "namedtuple", "type": _name(kind), "items": _fields(items, above)}
        if dataclasses.is_dataclass(kind) and not isinstance(value, collections.abc.Mapping):
            return _dataclass(value, kind, above)
    finally:
        above.discard(id(value))
    return _leaf(value, kind)


def _leaf(value: Any, kind: type) -> Any:
    if kind in PATHS:
        return {TAG: "path", "of": kind.__name__, "text": str(value)}
    if kind is range:
        args = _encode_all((value.start, value.stop, value.step), set())
        return {TAG: "range", "args": args}
    if kind is decimal.Decimal:
        return {TAG: "decimal", "text": str(value)}
    if kind.__module__ in ("datetime", "zoneinfo"):
        node = _time(value, kind)
        if node is not None:
            return node
    numpy = sys.modules.get("numpy")
    if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
        return _array(value, numpy)
    if numpy is not None and isinstance(value, numpy.dtype):
        return {TAG: "dtype", "dtype": _descr(value, numpy)}
    _check_loads(value)
    return value


def _sequence(value: Any, kind: type, above: set[int]) -> Any:
    items = _encode_all(value, above)
    if kind is collections.deque:
        return {TAG: "deque", "items": items, "maxlen": value.maxlen}
    changed = any(one is not other for one, other in zip(items, value, strict=True))
    if kind is frozenset or (kind is set and changed):  # nodes cannot be in a set
        return {TAG: kind.__name__, "items": items}
    return kind(items) if changed else value


def _encode_all(values: Iterable[Any], above: set[int]) -> list[Any]:
    values = list(values)
    kinds = set(map(type, values))
    # Long lists of numbers, such as the indexes of a sampler, take no loop in Python.
    if kinds <= FLAT or (
        kinds == {int} and max(map(abs, (min(values), max(values)))).bit_length() <= _MOST_BITS
    ):
        return values
    found = []
    for index, value in enumerate(values):
        try:
            found.append(_encode(value, above))
        except Unsavable as e:
            raise e.within(f"[{index}]") from None
    return found


def _dict(value: Any, kind: type, above: set[int]) -> Any:
    keys, items = _encode_all(value, above), _fields(value, above)
    if any(one is not other for one, other in zip(keys, value, strict=True)) or TAG in value:
        pairs = list(zip(keys, items.values(), strict=True))
        return {TAG: "dict", "of": kind.__name__, "items": pairs}
    changed = any(items[key] is not inner for key, inner in value.items())
    return kind(items) if changed else value


def _fields(values: Any, above: set[int]) -> dict[Any, Any]:
    found = {}
    for key, value in values.items():
        try:
            found[key] = _encode(value, above)
        except Unsavable as e:
            raise e.within(f"[{key!r}]" if not isinstance(key, str) else f".{key}") from None
    return found


def _dataclass(value: Any, kind: type, above: set[int]) -> Any:
    try:
        object.__new__(kind)
    except TypeError as e:
        raise Unsavable(f"{kind.__qualname__} is a dataclass of another kind: {e}") from None
    names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
    slots = {slot for base in kind.__mro__ for slot in _slots_of(base)}
    if lost := sorted(slot for slot in slots.difference(names) if hasattr(value, slot)):
        raise Unsavable(f"{kind.__qualname__} has the attributes {lost}, which are no fields")
    fields = {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}
    return {TAG: "dataclass", "type": _name(kind), "fields": _fields(fields, above)}


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _enum(value: enum.Enum) -> Any:
    kind = type(value)
    node = {TAG: "enum", "type": _name(kind)}
    if kind.__members__.get(value.name) is value:
        return {**node, "name": value.name}
    if isinstance(value, enum.Flag) and isinstance(value.value, int):
        return {**node, "value": value.value}  # flags together
    raise Unsavable(f"{value!r} is no member of {kind.__qualname__} that it declares")


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if imported(name) is not kind:
        raise Unsavable(
            f"the class {kind.__qualname__} is not found as {name} when it is loaded: define it at "
            "the top level of a module"
        )
    return name


def _time(value: Any, kind: type) -> Any:
    if kind is datetime.timedelta:
        return {TAG: "timedelta", "args": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {TAG: "date", "args": [value.year, value.month, value.day]}
    if kind is datetime.timezone:
        offset, *name = value.__getinitargs__()
        return {TAG: "timezone", "args": [_time(offset, datetime.timedelta), *name]}
    if kind is datetime.datetime or kind is datetime.time:
        names = ("year", "month", "day") if kind is datetime.datetime else ()
        names = (*names, "hour", "minute", "second", "microsecond")
        zone = None if value.tzinfo is None else _leaf(value.tzinfo, type(value.tzinfo))
        args = [*(getattr(value, name) for name in names), zone]
        return {TAG: kind.__name__, "args": args, "fold": value.fold}
    if kind.__name__ == "ZoneInfo" and value.key is not None:
        return {TAG: "zone", "key": value.key}
    return None


def _array(value: Any, numpy: Any) -> Any:
    descr = _descr(value.dtype, numpy)
    # NumPy has bytes of a scalar without any: of an empty text.
    content = bytearray(value.tobytes() if value.dtype.itemsize else b"")
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    return {TAG: kind, "dtype": descr, "shape": list(value.shape), "data": data}


def _descr(dtype: Any, numpy: Any) -> Any:
    if dtype.hasobject:
        raise Unsavable("a NumPy array of Python objects")
    descr = numpy.lib.format.dtype_to_descr(dtype)
    if numpy.lib.format.descr_to_dtype(descr) != dtype:
        raise Unsavable(f"NumPy's dtype {dtype}")
    return descr


def _tensor(value: torch.Tensor) -> torch.Tensor:
    if value.is_meta:
        raise Unsavable("a meta tensor has no data")
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or vars(value):
        _check_loads(value)
    return value


def _check_loads(value: Any) -> None:
    """Checks a value of a class that only torch may know: see `torch.serialization`."""
    kind = type(value)
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:
        what = "a lambda" if getattr(value, "__name__", "") == "<lambda>" else f"a {kind.__name__}"
        raise Unsavable(
            f"{what} could not be loaded again without running code: save what it consists of, or "
            "call torch.serialization.add_safe_globals for a class of your own"
        ) from e


def imported(name: str) -> type | None:
    """The class of this name, if its module is imported. Runs no code, also not a module's
    `__getattr__`.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) else None
