"""Whether a restored state is the saved one, bit by bit; and how the two differ."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .tensors import Wraps


def difference(saved: Any, found: Any, *, loose: bool, at: str = "") -> str | None:
    """The first difference, or `None`. A `loose` comparison is that with a changed program: the
    containers are its own, and keys are compared as text.
    """
    if isinstance(saved, torch.Tensor):
        return _of_tensors(saved, found, loose, at)
    if isinstance(saved, Mapping | list) and isinstance(found, Mapping | list):
        return _of_containers(saved, found, loose, at)
    if type(saved) is not type(found):
        return f"{at or 'the state'} is {_short(found)} instead of {_short(saved)}"
    if _same_value(saved, found):
        return None
    parts = _parts(saved), _parts(found)
    if parts[0] is None or parts[1] is None or len(parts[0]) != len(parts[1]):
        return f"{at} is {_short(found)} instead of {_short(saved)}"
    for number, (one, other) in enumerate(zip(*parts, strict=True)):
        if wrong := difference(one, other, loose=False, at=f"{at}({number})"):
            return wrong
    return None


def other_shape(saved: Any, found: Any, at: str = "") -> str | None:
    """How the dicts and lists of what was restored into an empty one differ: in kind, or in order.
    Of the kinds of dicts, only an `OrderedDict` comes back as such.
    """
    if isinstance(saved, Mapping):
        kind = collections.OrderedDict if type(saved) is collections.OrderedDict else dict
        if at and type(found) is not kind:
            return f"{at} is a {type(found).__name__}, not a {kind.__name__}"
        if [*map(str, found)] != [*map(str, saved)]:
            return f"{at} has the keys {[*found]} instead of {[*saved]}"
        inner = [(str(key), value, found[key]) for key, value in saved.items()]
    elif isinstance(saved, list):
        if len(found) != len(saved):
            return f"{at} has {len(found)} elements instead of {len(saved)}"
        inner = [(str(i), *each) for i, each in enumerate(zip(saved, found, strict=True))]
    else:
        return None
    return next((wrong for k, a, b in inner if (wrong := other_shape(a, b, f"{at}[{k}]"))), None)


def _of_containers(saved: Any, found: Any, loose: bool, at: str) -> str | None:
    if not loose and type(saved) is not type(found):
        return f"{at or 'the state'} is a {type(found).__name__}, not a {type(saved).__name__}"
    one, other = _as_dict(saved, loose), _as_dict(found, loose)
    for key, value in one.items():
        if key not in other:
            if loose and _has_nothing(value):
                continue  # a program that has no place for nothing loses nothing
            return f"{at}[{key!r}] is missing"
        if wrong := difference(value, other[key], loose=loose, at=f"{at}[{key!r}]"):
            return wrong
    more = [key for key in other if key not in one]
    more = [key for key in more if not loose or not isinstance(other[key], Mapping | list)]
    if more:
        return f"{at}[{more[0]!r}] is there, and was not saved"
    if not loose and [*one] != [*other]:
        return f"{at} has the order {[*other]} instead of {[*one]}"
    return None


def _has_nothing(value: Any) -> bool:
    """Whether it is a container without any value in it."""
    inner = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, Mapping | list) and all(map(_has_nothing, inner))


def _as_dict(value: Any, loose: bool) -> dict[Any, Any]:
    items = enumerate(value) if isinstance(value, list) else value.items()
    return {str(key) if loose else (type(key), key): inner for key, inner in items}


def _of_tensors(saved: torch.Tensor, found: Any, loose: bool, at: str) -> str | None:
    if not isinstance(found, torch.Tensor):
        return f"{at} is {_short(found)} instead of a tensor"
    if not loose and type(saved) is not type(found):
        return f"{at} is a {type(found).__name__}, not a {type(saved).__name__}"
    # The length of a nested tensor is a symbol, which differs.
    for what in ("dtype", "layout") if saved.is_nested else ("dtype", "shape", "layout"):
        if (one := getattr(saved, what)) != (other := getattr(found, what)):
            return f"{at} has the {what} {other} instead of {one}"
    if saved.is_meta or found.is_meta:
        return None if saved.is_meta and found.is_meta else f"{at} is a meta tensor"
    if found.is_neg():  # torch negates it when it is read, and a NaN may get other bits then
        saved, found = (_without_nans(each) for each in (saved, found))
    return None if _bits(saved) == _bits(found) else f"{at} has other bits"


def _without_nans(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().clone()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return torch.where(real.isnan(), torch.zeros_like(real), real)


def _bits(tensor: torch.Tensor) -> Any:
    t = tensor.detach()
    if isinstance(t, Wraps):
        return _bits(t.inner)
    if t.is_quantized:
        per_channel = t.qscheme() == torch.per_channel_affine
        scale = (
            t.q_per_channel_scales().tolist() if per_channel else (t.q_scale(), t.q_zero_point())
        )
        return _bits(t.int_repr()), scale
    if t.is_nested:
        return _bits(t.values()), _bits(t.offsets())
    if t.layout is torch.sparse_coo:
        return t.is_coalesced(), _bits(t._indices()), _bits(t._values())
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _bits(t.crow_indices()), _bits(t.col_indices()), _bits(t.values())
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _bits(t.ccol_indices()), _bits(t.row_indices()), _bits(t.values())
    if t.layout is not torch.strided:
        return _bits(t.to_dense())
    plain = t.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    try:
        flat = plain.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    except (RuntimeError, NotImplementedError):  # of dtypes that torch cannot copy
        flat = plain.view(torch.uint8).reshape(-1)
    return flat.numpy().tobytes()


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, enum.Enum | type):
        return one is other
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        pairs = ((one.real, other.real), (one.imag, other.imag))
        return all(struct.pack("d", a) == struct.pack("d", b) for a, b in pairs)
    if isinstance(one, np.ndarray | np.generic):
        same = one.dtype == other.dtype and one.shape == other.shape
        return bool(same and one.tobytes() == other.tobytes())
    if isinstance(one, io.BytesIO):
        return one.getvalue() == other.getvalue() and one.tell() == other.tell()
    if isinstance(one, datetime.datetime | datetime.time):
        same = one.fold == other.fold and one.replace(tzinfo=None) == other.replace(tzinfo=None)
        return same and repr(one.tzinfo) == repr(other.tzinfo)
    if isinstance(one, tuple | list | Mapping | set | frozenset | collections.deque):
        return False
    if dataclasses.is_dataclass(one) or hasattr(one, "__dict__"):
        return False
    return repr(one) == repr(other) if one != other else True


def _parts(value: Any) -> list[Any] | None:
    """What a value consists of, in its order; `None` if of nothing else."""
    if isinstance(value, tuple | list):
        return list(value)
    if isinstance(value, collections.deque):
        return [value.maxlen, *value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [each for pair in value.items() for each in pair]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        own = getattr(value, "__dict__", {})
        return [*(getattr(value, name) for name in names), sorted(own), *own.values()]
    if hasattr(value, "__dict__") and (own := vars(value)):
        return [*own, *own.values()]
    return None


def _short(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:60]}"
