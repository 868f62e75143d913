"""Python values as plain data, which a load reads without running code.

torch reads numbers, text, containers and tensors with `weights_only=True`. Other values are saved
as *nodes*, dicts of plain data that say what they were: NumPy arrays and scalars, dataclasses,
enums, named tuples, deques, frozen sets, dates, paths, namespaces. A class is saved by its name. A
load takes it only from modules that the program has imported, or from the value that is replaced;
it imports nothing, and calls no method of the class. Other values are refused when they are saved.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import math
import pathlib
import sys
import types
import zoneinfo
from collections.abc import Callable, Iterable
from typing import Any

import torch

from outlast.async_checkpoint import torch_values

_TAG = "__outlast__"  # the key that marks a node; part of the checkpoint's format
# Longer integers are pickled in a way that torch does not read.
_MOST_BITS = 2000
# Containers within one another: they take up to 600 of Python's usual 1000 frames. The recursion
# limit itself is no measure, as what a save accepts, a load might not.
_MOST_LEVELS = 150
_PYTHON_ATOMS = (bool, int, float, complex, str, bytes, bytearray, type(None))
_ATOMS = (*_PYTHON_ATOMS, torch.Size, torch.dtype, torch.device)
_FLAT = frozenset(_ATOMS) - {int, bytes}
_DICTS = (dict, collections.OrderedDict, collections.Counter)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_PATHS = (pathlib.PurePosixPath, pathlib.PosixPath, pathlib.PureWindowsPath)


class Unsavable(ValueError):
    """A value cannot be saved. `where` is its place in what was to be saved."""

    where = ""


def encode(value: Any) -> Any:
    """The value, or an equal one of plain data; `Unsavable` if it could not be loaded again."""
    try:
        return _encode(value, set())
    except RecursionError:  # the program itself is deep in calls
        raise Unsavable("it is nested too deeply") from None


def _encode(value: Any, above: set[int]) -> Any:
    kind: Any = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        raise Unsavable(f"an integer of {value.bit_length()} bits")
    if kind is bytes and not value:  # pickled in a way that torch does not read
        return {_TAG: "bytes"}
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            raise Unsavable("a meta tensor has no data")
        if value.layout is torch.strided and value.numel() and not value.data_ptr():
            raise Unsavable("a tensor whose storage was freed has no data")
        if kind not in (torch.Tensor, torch.nn.Parameter) or vars(value):
            _check_loads(value)
        return value
    if isinstance(value, enum.Enum):
        node = {_TAG: "enum", "type": _name(kind)}
        if kind.__members__.get(value.name) is value:
            return {**node, "name": value.name}
        if isinstance(value, enum.Flag) and isinstance(value.value, int):
            return {**node, "value": value.value}  # flags together
        raise Unsavable(f"{value!r} is no member of {kind.__qualname__} that it declares")
    if id(value) in above:
        raise Unsavable("it contains itself")
    if len(above) >= _MOST_LEVELS:
        raise Unsavable(f"it is nested too deeply, in more than {_MOST_LEVELS} containers")
    above.add(id(value))
    try:
        if kind in (list, tuple, set, frozenset, collections.deque):
            return _sequence(value, kind, above)
        if kind in _DICTS:
            return _dict(value, kind, above)
        if kind in _NAMESPACES:
            return {_TAG: "namespace", "of": kind.__name__, "fields": _fields(vars(value), above)}
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            if getattr(value, "__dict__", None):
                raise Unsavable(f"{kind.__qualname__} has attributes besides its fields")
            items = {name: getattr(value, name) for name in kind._fields}
            return {_TAG: "namedtuple", "type": _name(kind), "items": _fields(items, above)}
        if dataclasses.is_dataclass(kind) and not isinstance(value, collections.abc.Mapping):
            return _dataclass(value, type(value), above)
    finally:
        above.discard(id(value))
    if kind in _PATHS:
        return {_TAG: "path", "of": kind.__name__, "text": str(value)}
    if kind is range:
        return {_TAG: "range", "args": _encode_all((value.start, value.stop, value.step), set())}
    if kind is io.BytesIO:
        content = _encode(value.getvalue(), set())
        return {_TAG: "BytesIO", "content": content, "at": value.tell()}
    if kind is decimal.Decimal:
        return {_TAG: "decimal", "text": str(value)}
    if kind.__module__ in ("datetime", "zoneinfo") and (node := _time(value, kind)):
        return node
    if numpy := sys.modules.get("numpy"):
        if kind is numpy.ndarray or isinstance(value, numpy.generic):
            return _array(value, numpy)
        if isinstance(value, numpy.dtype):
            return {_TAG: "dtype", "dtype": _descr(value, numpy)}
    _check_loads(value)
    return value


def _sequence(value: Any, kind: type, above: set[int]) -> Any:
    items = _encode_all(value, above)
    if kind is collections.deque:
        return {_TAG: "deque", "items": items, "maxlen": value.maxlen}
    changed = any(one is not other for one, other in zip(items, value, strict=True))
    if kind is frozenset or (kind is set and changed):  # nodes cannot be in a set
        return {_TAG: kind.__name__, "items": items}
    return kind(items) if changed else value


def _encode_all(values: Iterable[Any], above: set[int]) -> list[Any]:
    kinds = set(map(type, values := list(values)))
    # Long lists of numbers, such as the indexes of a sampler, take no loop in Python.
    if kinds <= _FLAT or (
        kinds == {int} and max(map(abs, (min(values), max(values)))).bit_length() <= _MOST_BITS
    ):
        return values
    return list(_fields(dict(enumerate(values)), above).values())


def _dict(value: Any, kind: type, above: set[int]) -> Any:
    keys, items = _encode_all(value, above), _fields(value, above)
    if any(one is not other for one, other in zip(keys, value, strict=True)) or _TAG in value:
        pairs = list(zip(keys, items.values(), strict=True))
        return {_TAG: "dict", "of": kind.__name__, "items": pairs}
    changed = any(items[key] is not inner for key, inner in value.items())
    return kind(items) if changed else value


def _fields(values: Any, above: set[int]) -> dict[Any, Any]:
    found = {}
    for key, value in values.items():
        try:
            found[key] = _encode(value, above)
        except Unsavable as e:
            e.where = (f".{key}" if isinstance(key, str) else f"[{key!r}]") + e.where
            raise
    return found


def _dataclass(value: Any, kind: type, above: set[int]) -> Any:
    try:
        object.__new__(kind)
    except TypeError as e:
        raise Unsavable(f"{kind.__qualname__} is a dataclass of another kind: {e}") from None
    names = [field.name for field in dataclasses.fields(kind) if hasattr(value, field.name)]
    slots: set[str] = set()
    for base in kind.__mro__:
        own = vars(base).get("__slots__", ())
        slots.update((own,) if isinstance(own, str) else own)
    slots -= {"__dict__", "__weakref__", *names}
    if lost := sorted(slot for slot in slots if hasattr(value, slot)):
        raise Unsavable(f"{kind.__qualname__} has the attributes {lost}, which are no fields")
    fields = {**{name: getattr(value, name) for name in names}, **getattr(value, "__dict__", {})}
    return {_TAG: "dataclass", "type": _name(kind), "fields": _fields(fields, above)}


def _name(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _imported(name) is not kind:
        raise Unsavable(
            f"the class {kind.__qualname__} is not found as {name} when it is loaded: define it at "
            "the top level of a module"
        )
    return name


def _time(value: Any, kind: type) -> Any:
    if kind is datetime.timedelta:
        return {_TAG: "timedelta", "args": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.date:
        return {_TAG: "date", "args": [value.year, value.month, value.day]}
    if kind is datetime.timezone:
        offset, *name = value.__getinitargs__()
        return {_TAG: "timezone", "args": [_time(offset, datetime.timedelta), *name]}
    if kind is datetime.datetime or kind is datetime.time:
        names = ("year", "month", "day") if kind is datetime.datetime else ()
        names = (*names, "hour", "minute", "second", "microsecond")
        zone = None if value.tzinfo is None else _encode(value.tzinfo, set())
        args = [*(getattr(value, name) for name in names), zone]
        return {_TAG: kind.__name__, "args": args, "fold": value.fold}
    if kind.__name__ == "ZoneInfo" and value.key is not None:
        return {_TAG: "zone", "key": value.key}
    return None


def _array(value: Any, numpy: Any) -> Any:
    descr = _descr(value.dtype, numpy)
    # NumPy has bytes of a scalar without any: of an empty text.
    content = bytearray(value.tobytes() if value.dtype.itemsize else b"")
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
    kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
    return {_TAG: kind, "dtype": descr, "shape": list(value.shape), "data": data}


def _descr(dtype: Any, numpy: Any) -> Any:
    if dtype.hasobject:
        raise Unsavable("a NumPy array of Python objects")
    descr = numpy.lib.format.dtype_to_descr(dtype)
    if numpy.lib.format.descr_to_dtype(descr) != dtype:
        raise Unsavable(f"NumPy's dtype {dtype}")
    return descr


def _check_loads(value: Any) -> None:
    """Checks a value of a class that only torch may know: see `torch.serialization`."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        torch_values.read(file.getvalue())
    except Exception as e:
        is_function = isinstance(value, types.FunctionType)
        what = "lambda" if is_function and value.__name__ == "<lambda>" else type(value).__name__
        raise Unsavable(
            f"a {what} could not be loaded again without running code: save what it consists of, "
            "or call torch.serialization.add_safe_globals for a class of your own"
        ) from e


def _imported(name: str) -> type | None:
    """A class of an imported module. Runs no code, also not a module's `__getattr__`."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        if not isinstance(found, types.ModuleType | type):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) else None


def decode(data: Any, like: Any = None) -> Any:
    """The encoded value; `like` is the present one. Any exception may say that it does not fit."""
    return _Decoder(like).decode(data)


@dataclasses.dataclass
class _Decoder:
    like: Any
    classes: dict[str, type] = dataclasses.field(default_factory=dict)

    def decode(self, data: Any) -> Any:
        kind = type(data)
        if kind in (list, tuple, set):
            if set(map(type, data)) <= _FLAT | {int}:
                return data
            items = [self.decode(item) for item in data]
            changed = any(one is not other for one, other in zip(items, data, strict=True))
            return kind(items) if changed else data
        if kind in _DICTS:
            if _TAG in data:
                return _DECODERS[data[_TAG]](self, data)
            inner = {key: self.decode(value) for key, value in data.items()}
            changed = any(inner[key] is not value for key, value in data.items())
            return kind(inner) if changed else data
        return data

    def class_of(self, node: Any, base: Callable[[type], bool]) -> type:
        name = str(node["type"])
        found = _imported(name)
        if found is None:
            _collect(self.like, self.classes, 0)
            # The same class in a script, whose module is `__main__`, and in a module.
            found = self.classes.get(name.partition(":")[2])
        if found is None or not base(found):
            why = "import its module before the restore, and keep its name"
            raise ValueError(f"its class {name} is not there: {why}")
        return found

    def enum(self, node: Any) -> Any:
        kind: Any = self.class_of(node, lambda found: issubclass(found, enum.Enum))
        if "name" in node:
            return kind.__members__[node["name"]]
        if not issubclass(kind, enum.Flag) or type(node["value"]) is not int:
            raise ValueError(f"{kind.__qualname__} has no value {node['value']!r}")
        return kind(node["value"])

    def namedtuple(self, node: Any) -> Any:
        kind: Any = self.class_of(node, lambda c: issubclass(c, tuple) and hasattr(c, "_fields"))
        items = self.decode(dict(node["items"]))
        if list(kind._fields) != list(items):
            raise ValueError(f"{kind.__qualname__} has the fields {kind._fields}, not {[*items]}")
        return tuple.__new__(kind, items.values())

    def dataclass(self, node: Any) -> Any:
        kind: Any = self.class_of(node, dataclasses.is_dataclass)
        saved = self.decode(dict(node["fields"]))
        value = object.__new__(kind)
        own = getattr(value, "__dict__", None)
        for field in dataclasses.fields(kind):
            if field.name not in saved and field.default is not dataclasses.MISSING:
                saved[field.name] = field.default
            elif field.name not in saved and field.default_factory is not dataclasses.MISSING:
                saved[field.name] = field.default_factory()
        known = {field.name for field in dataclasses.fields(kind)}
        if not known <= saved.keys() or (own is None and saved.keys() - known):
            raise ValueError(f"{kind.__qualname__} has the fields {sorted(known)}, not {[*saved]}")
        for name, inner in saved.items():
            if own is None or name in getattr(kind, "__slots__", ()):
                object.__setattr__(value, name, inner)
            else:
                own[str(name)] = inner
        return value

    def time(self, node: Any) -> Any:
        args = self.decode(list(node["args"]))
        kind = getattr(datetime, str(node[_TAG]))
        return kind(*args, fold=int(node["fold"])) if "fold" in node else kind(*args)

    def array(self, node: Any) -> Any:
        import numpy

        dtype = numpy.lib.format.descr_to_dtype(node["dtype"])
        if node[_TAG] == "dtype":
            return dtype
        shape, data = [*map(int, node["shape"])], node["data"].contiguous().numpy()
        if dtype.hasobject or min(shape, default=0) < 0 or data.dtype != numpy.uint8:
            raise ValueError("it is not an array")
        if dtype.itemsize * math.prod(shape) != data.size:
            raise ValueError(f"{data.size} bytes are no array of {shape}")
        found = numpy.zeros(shape, dtype)
        if data.size:
            found = numpy.frombuffer(data.tobytes(), dtype).reshape(shape).copy()
        return found if node[_TAG] == "array" else found[()]

    def file(self, node: Any) -> Any:
        found = io.BytesIO(self.decode(node["content"]))
        found.seek(int(node["at"]))
        return found

    def dict(self, node: Any) -> Any:
        pairs = [(self.decode(key), self.decode(value)) for key, value in node["items"]]
        return _one_of(_DICTS, node)(dict(pairs))

    def namespace(self, node: Any) -> Any:
        value = _one_of(_NAMESPACES, node)()
        vars(value).update(self.decode(dict(node["fields"])))  # one of them may be named `self`
        return value

    def sequence(self, node: Any) -> Any:
        items = self.decode(list(node["items"]))
        if node[_TAG] == "deque":
            return collections.deque(items, node["maxlen"])
        return (frozenset if node[_TAG] == "frozenset" else set)(items)


def _one_of(kinds: tuple[type, ...], node: Any) -> Any:
    for kind in kinds:
        if kind.__name__ == node["of"]:
            return kind
    raise ValueError(f"{node['of']} is not a {node[_TAG]}")


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    **dict.fromkeys(("array", "scalar", "dtype"), _Decoder.array),
    "enum": _Decoder.enum,
    "namedtuple": _Decoder.namedtuple,
    "dataclass": _Decoder.dataclass,
    "namespace": _Decoder.namespace,
    "dict": _Decoder.dict,
    "zone": lambda _, node: zoneinfo.ZoneInfo(node["key"]),
    **dict.fromkeys(("deque", "set", "frozenset"), _Decoder.sequence),
    **dict.fromkeys(("date", "time", "datetime", "timedelta", "timezone"), _Decoder.time),
    "bytes": lambda _, node: b"",
    "path": lambda _, node: _one_of(_PATHS, node)(str(node["text"])),
    "range": lambda _, node: range(*map(int, node["args"])),
    "decimal": lambda _, node: decimal.Decimal(str(node["text"])),
    "BytesIO": _Decoder.file,
}


def _collect(value: Any, found: dict[str, type], depth: int) -> None:
    """The classes of a value and of what it contains."""
    kind = type(value)
    found.setdefault(kind.__qualname__, kind)
    inner: Iterable[Any] = ()
    if dataclasses.is_dataclass(kind) or kind in _NAMESPACES:
        inner = getattr(value, "__dict__", {}).values()
    elif isinstance(value, dict | list | tuple | collections.deque):
        inner = value.values() if isinstance(value, dict) else value
    for each in inner if depth < 50 else ():
        _collect(each, found, depth + 1)
