"""Modules inside wrappers, whose parameters have other names there (`module.`, `_orig_mod.`).

A checkpoint has the names of the module itself, so that it fits whether or not the module is
wrapped in DDP or compiled, in any order, and whether or not parts of it are compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from outlast.elastic.numerics.consistent_ddp import ConsistentDDP

_COMPILED = "_orig_mod"  # where torch.compile keeps the module
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel, ConsistentDDP)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    *_, last = _with_inner(module)
    return last


def consistent_ddp(module: nn.Module) -> ConsistentDDP | None:
    """The `ConsistentDDP` among the wrappers, if there is one."""
    return next((each for each in _with_inner(module) if isinstance(each, ConsistentDDP)), None)


def plain_state_dict(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The module's state with plain names; `keep_vars`: the parameters and buffers themselves."""
    state: dict[str, Any] = module.state_dict(keep_vars=keep_vars)
    if not any(_COMPILED in name for name in state):
        return state
    return {plain_name(name): value for name, value in state.items()}


def load_plain(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state with plain names, or with those of a compiled module."""
    names = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(plain_name(name), name): state[name] for name in state})


def _with_inner(module: nn.Module) -> Iterator[nn.Module]:
    inner: Any = module
    while isinstance(inner, nn.Module):
        yield inner
        is_parallel = isinstance(inner, _PARALLEL)
        inner = inner.module if is_parallel else getattr(inner, _COMPILED, None)


def plain_name(name: str) -> str:
    """The name of a parameter or a module, whether or not it is inside a compiled one."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)
