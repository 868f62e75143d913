"""The check that `states`, and the options of optimizers, are equal on all ranks: a checkpoint has
one of them, and after a fault a rank may receive that of another.

Each save compares digests, in the reports that ranks make anyway. Of two ranks that differ, both
claim one key of the ledger with their values, and the second one logs both. After each step a rank
notes its plain values, in memory that survives a kill: a rank that receives a state must have had
the same at the last step that others have noted, too.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from outlast.async_checkpoint.beside import Beside
from outlast.async_checkpoint.plain_values import Unsavable, encode
from outlast.async_checkpoint.subclasses import wraps
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.tensors import digest
from outlast.elastic.wrapped_modules import plain_name, unwrapped
from outlast.errors import StoreError

log = logging.getLogger("outlast.elastic")

Values = dict[str, str]
"""The values of a state as texts, by their places in it."""
_MOST = 64  # in one container: a longer one is compared by its length and its end
_CONTAINERS = (dict, list, tuple, deque)
_SHORT = frozenset({bool, int, float, complex, type(None)})
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_ELEMENTS, _WHOLE_BYTES = 1024, 64 << 10  # how many elements of a tensor that is larger
_TENSORS = " (tensors)"
_OPTIONS = " (optimizer)"


class EqualStates:
    """The check of one rank. `states` are those of which a checkpoint has one for all ranks; not
    checked is one with a true `may_differ`, of an adapter that knows what its framework restores.
    Of `optimizers`, the options are: a learning rate that a rank has decided on by itself, as
    `ReduceLROnPlateau` does with the loss of one rank, makes other weights there. `known` has, by
    entry, the differences in plain values that the last save has found.
    """

    def __init__(
        self, states: Mapping[str, Any], optimizers: Mapping[str, Any] | None = None
    ) -> None:
        self._optimizers = dict(optimizers or {})
        self._states = {
            name: each
            for name, each in states.items()
            if not isinstance(each, Optimizer) and not getattr(each, "may_differ", False)
        }
        self._told: set[str] = set()
        self.known: dict[str, str] = {}

    def at_step(self, shared: Mapping[str, Any]) -> dict[str, Values]:
        """The values to note, of the states that all ranks share."""
        plain = [n for n, each in self._states.items() if not isinstance(each, nn.Module)]
        return {name: values_of(shared[name]) for name in plain}

    def at_save(self, beside: Beside, ledger: CallLedger, step: int) -> Beside:
        if ledger.world_size == 1:
            return beside
        found: dict[str, Values] = {}
        for name, each in self._states.items():
            state = _compared(each)
            found[name], found[name + _TENSORS] = values_of(state), values_of(state, tensors=True)
        for name, each in self._optimizers.items():
            groups = getattr(each, "param_groups", ())
            options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            found[name + _OPTIONS] = values_of(options)
        digests = {name: digest_of(values) for name, values in found.items()}
        return Beside(beside.sync, digests, partial(self._committed, ledger, step, found))

    def _committed(
        self, ledger: CallLedger, step: int, found: dict[str, Values], differing: Mapping[str, int]
    ) -> None:
        where = {name: f"differed on ranks 0 and {rank}" for name, rank in differing.items()}
        self.known = {n: f"{each} at step {step}" for n, each in where.items() if n in self._states}
        for name in differing.keys() - self._told:
            self._told.add(name)
            if ledger.rank not in (0, differing[name]):
                continue
            mine = found.get(name, {})
            try:
                told = ledger.agree(f"states/{name}", json.dumps([ledger.rank, mine]))
            except StoreError as e:  # a restart
                log.debug("the difference in states[%r] is not told: %s", name, e)
                continue
            rank, theirs = json.loads(told)
            if rank != ledger.rank:
                pair = {rank: theirs, ledger.rank: mine}
                log.warning(
                    "%s at step %d. A checkpoint has one of them, and after a fault a rank may "
                    "receive that of another. %s",
                    _difference(name, pair),
                    step,
                    _remedy(name, self._states.get(name.removesuffix(_TENSORS))),
                )


def refusal(parts: Sequence[Any], receivers: Collection[int], *, is_resized: bool) -> str:
    """Why a restore is refused in which these ranks receive a state; empty if it is not. Each rank
    gives the values that its process has noted, as (step, state of the step, its rank then, values
    by entry), those that it has of other ranks, and the differences that it knows of.
    """
    by_state: dict[tuple[int, str], dict[int, Any]] = {}
    for noted, mirrored, known in parts:
        for name, why in known.items() if is_resized else ():  # a rank is gone, with its values
            return f"states[{name!r}] {why}, and ranks are lost. {_remedy(name)}"
        for step, state, rank, values in (*mirrored, *noted):
            by_state.setdefault((step, state), {})[rank] = values
    # The ranks have the numbers that they had.
    lacking = {each[2] for receiver in receivers for each in parts[receiver][0]}
    for rank in sorted(lacking if is_resized else lacking | {*receivers}):
        shared = [key for key, values in by_state.items() if rank in values and len(values) > 1]
        values = by_state[max(shared)] if shared else {}
        for other in values:
            for name, mine in values[rank].items():
                if values[other].get(name, mine) != mine:
                    pair = {rank: mine, other: values[other][name]}
                    return (
                        f"{_difference(name, pair)} at step {max(shared)[0]}, and rank {rank} "
                        f"would receive the state of another. {_remedy(name)}"
                    )
    return ""


def _compared(state: Any) -> Any:
    """Of a module, not its buffers: the statistics of a batch norm differ."""
    if not isinstance(state, nn.Module):
        return state.state_dict()
    named = [(plain_name(name), each) for name, each in unwrapped(state).named_parameters()]
    return dict(named[:: 1 + len(named) // 64])  # a difference is seldom in a few alone


def _difference(name: str, by_rank: Mapping[int, Values]) -> str:
    (rank, mine), (other, theirs) = sorted(by_rank.items())
    places = [at for at in {**mine, **theirs} if mine.get(at) != theirs.get(at)]
    at, more = places[0], f", and {len(places) - 1} more" if len(places) > 1 else ""
    if name.endswith(_OPTIONS):
        what = f"optimizer {name.removesuffix(_OPTIONS)}".strip() + ".param_groups differ"
    else:
        what = f"states[{name.removesuffix(_TENSORS)!r}] differs"
    return (
        f"{what} between ranks: {at} is "
        f"{mine.get(at, 'missing')} on rank {rank}, and {theirs.get(at, 'missing')} on rank "
        f"{other}{more},"
    )


def _remedy(name: str, state: Any = None) -> str:
    name, same = name.removesuffix(_TENSORS), "Compute it on all ranks, from what is the same there"
    if name.endswith(_OPTIONS) or isinstance(state, nn.Module):  # which `per_rank` does not take
        return f"{same} (all_reduce, broadcast)"
    return (
        f"{same} (all_reduce, broadcast); or, if it "
        f"may differ, pass states={{{name!r}: outlast.per_rank(...)}}"
    )


def values_of(state: Any, *, tensors: bool = False) -> Values:
    """The plain values and, on the CPU, tensors of one element; or else all other tensors. What is
    neither, and cannot be saved as plain values, is left out.
    """
    found: Values = {}
    _add(found, "", state, tensors)
    return found


def _add(found: Values, at: str, value: Any, tensors: bool) -> None:
    # torch's `tree_flatten_with_path` takes several times as long: after each step.
    if type(value) in _SHORT:
        if not tensors:
            found[at] = repr(value)
    elif isinstance(value, dict) and not _is_long(value):
        for key, each in value.items():
            _add(found, f"{at}[{key!r}]", each, tensors)
    elif isinstance(value, _CONTAINERS) and not _is_long(value):
        for number, each in enumerate(value):
            _add(found, f"{at}[{number}]", each, tensors)
    else:
        is_tensor = isinstance(value, torch.Tensor) and not (
            value.numel() == 1 and value.device.type == "cpu"
        )
        if is_tensor is tensors and not isinstance(value, DTensor):
            try:
                found[at] = _of_tensor(value) if is_tensor else _text(value)
            except (Unsavable, RuntimeError, TypeError, NotImplementedError) as e:
                log.debug("%s of a state is not compared between ranks: %s", at, e)


def digest_of(values: Values) -> str:
    """Whatever the order of the keys."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(values.items())).encode())


def _is_long(value: Any) -> bool:
    return isinstance(value, _CONTAINERS) and len(value) > _MOST


def _text(value: Any) -> str:
    if _is_long(value):
        last = next(reversed(value.values() if isinstance(value, dict) else value))
        return f"{len(value)} values, the last {_text(last)}"
    if isinstance(value, torch.Tensor) or (type(value).__module__ == "numpy" and value.ndim == 0):
        value = value.item()
    if isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    plain = encode(value)
    if plain is value and not isinstance(value, (*_ATOMS, *_CONTAINERS)):
        raise Unsavable(type(value).__name__)
    text = repr(plain)
    return text if len(text) < 80 else f"{text[:60]}... {xxhash.xxh3_64_hexdigest(text.encode())}"


def _of_tensor(tensor: torch.Tensor) -> str:
    if tensor.nbytes > _WHOLE_BYTES and not wraps(tensor):
        tensor = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _ELEMENTS)]
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} {digest(tensor)}"
