"""Plain data as the Python values that were saved (`plain_values.py`), without running code."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
from collections.abc import Callable, Iterable
from typing import Any

from outlast.async_checkpoint.plain_values import (
    DICTS,
    FLAT,
    NAMESPACES,
    PATHS,
    TAG,
    imported,
)

_BY_NAME = {kind.__name__: kind for kind in (*DICTS, *NAMESPACES, *PATHS)}


def decode(data: Any, like: Any = None) -> Any:
    """The value that was encoded. `like` is the present value, which may have its classes.

    Raises:
        Exception: if the data is not what `encode` returns, or a class is not there any more.
    """
    return _Decoder(like).decode(data)


class _Decoder:
    def __init__(self, like: Any) -> None:
        self._like = like
        self._classes: dict[str, type] | None = None

    def decode(self, data: Any) -> Any:
        kind = type(data)
        if kind in (list, tuple, set):
            if set(map(type, data)) <= FLAT | {int}:
                return data
            items = [self.decode(item) for item in data]
            changed = any(one is not other for one, other in zip(items, data, strict=True))
            return kind(items) if changed else data
        if kind in DICTS:
            if TAG in data:
                return _DECODERS[data[TAG]](self, data)
            inner = {key: self.decode(value) for key, value in data.items()}
            changed = any(inner[key] is not value for key, value in data.items())
            return kind(inner) if changed else data
        return data

    def class_of(self, node: Any, base: Callable[[type], bool]) -> type:
        """The class that a node names, if it is of the right kind."""
        name = str(node["type"])
        found = imported(name)
        if found is None:
            if self._classes is None:
                self._classes = {}
                _collect(self._like, self._classes, 0)
            # The same class in a script, whose module is `__main__`, and in a module.
            found = self._classes.get(name.partition(":")[2])
        if found is None or not base(found):
            raise ValueError(
                f"its class {name} is not there: import its module before the restore, and keep "
                "its name"
            )
        return found

    def enum(self, node: Any) -> Any:
        kind: Any = self.class_of(node, lambda found: issubclass(found, enum.Enum))
        if "name" in node:
            return kind.__members__[node["name"]]
        if not issubclass(kind, enum.Flag) or type(node["value"]) is not int:
            raise ValueError(f"{kind.__qualname__} has no value {node['value']!r}")
        return kind(node["value"])

    def namedtuple(self, node: Any) -> Any:
        kind: Any = self.class_of(
            node, lambda found: issubclass(found, tuple) and hasattr(found, "_fields")
        )
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
            if field.name in saved:
                continue
            if field.default is not dataclasses.MISSING:
                saved[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
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
        kind = getattr(datetime, str(node[TAG]))
        return kind(*args, fold=int(node["fold"])) if "fold" in node else kind(*args)

    def array(self, node: Any) -> Any:
        import numpy

        dtype = numpy.lib.format.descr_to_dtype(node["dtype"])
        shape, data = [int(size) for size in node["shape"]], node["data"].contiguous().numpy()
        if dtype.hasobject or min(shape, default=0) < 0 or data.dtype != numpy.uint8:
            raise ValueError("it is not an array")
        if dtype.itemsize * math.prod(shape) != data.size:
            raise ValueError(f"{data.size} bytes are no array of {shape}")
        found = numpy.zeros(shape, dtype)
        if data.size:
            found = numpy.frombuffer(data.tobytes(), dtype).reshape(shape).copy()
        return found if node[TAG] == "array" else found[()]

    def dtype(self, node: Any) -> Any:
        import numpy

        return numpy.lib.format.descr_to_dtype(node["dtype"])

    def dict(self, node: Any) -> Any:
        pairs = [(self.decode(key), self.decode(value)) for key, value in node["items"]]
        return _one_of(DICTS, node)(dict(pairs))

    def namespace(self, node: Any) -> Any:
        value = _one_of(NAMESPACES, node)()
        vars(value).update(self.decode(dict(node["fields"])))  # one of them may be named `self`
        return value

    def sequence(self, node: Any) -> Any:
        items = self.decode(list(node["items"]))
        if node[TAG] == "deque":
            return collections.deque(items, node["maxlen"])
        return (frozenset if node[TAG] == "frozenset" else set)(items)

    def zone(self, node: Any) -> Any:
        import zoneinfo

        return zoneinfo.ZoneInfo(node["key"])


def _one_of(kinds: tuple[type, ...], node: Any) -> Any:
    kind = _BY_NAME[node["of"]]
    if kind not in kinds:
        raise ValueError(f"{kind.__name__} is not a {node[TAG]}")
    return kind


_DECODERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "array": _Decoder.array,
    "scalar": _Decoder.array,
    "dtype": _Decoder.dtype,
    "enum": _Decoder.enum,
    "namedtuple": _Decoder.namedtuple,
    "dataclass": _Decoder.dataclass,
    "namespace": _Decoder.namespace,
    "dict": _Decoder.dict,
    "zone": _Decoder.zone,
    **dict.fromkeys(("deque", "set", "frozenset"), _Decoder.sequence),
    **dict.fromkeys(("date", "time", "datetime", "timedelta", "timezone"), _Decoder.time),
    "bytes": lambda _, node: b"",
    "path": lambda _, node: _one_of(PATHS, node)(str(node["text"])),
    "range": lambda _, node: range(*map(int, node["args"])),
    "decimal": lambda _, node: decimal.Decimal(str(node["text"])),
}


def _collect(value: Any, found: dict[str, type], depth: int) -> None:
    """The classes of a value and of what it contains."""
    kind = type(value)
    found.setdefault(kind.__qualname__, kind)
    inner: Iterable[Any] = ()
    if dataclasses.is_dataclass(kind) or kind in NAMESPACES:
        inner = getattr(value, "__dict__", {}).values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple | collections.deque):
        inner = value
    for each in inner if depth < 50 else ():
        _collect(each, found, depth + 1)
