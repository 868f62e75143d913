"""Modules inside wrappers, whose parameters have other names there (`module.`, `_orig_mod.`).

A checkpoint has the names of the module itself, so that it fits whether or not the module is
wrapped in DDP or compiled, in any order, and whether or not parts of it are compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn

from outlast.elastic.numerics.consistent_ddp import ConsistentDDP
from outlast.errors import CheckpointMismatch

T = TypeVar("T")

_COMPILED = "_orig_mod"  # where torch.compile keeps the module
_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel, ConsistentDDP)
# What a job with a wrapped model put before the names, before it saved plain ones.
_OLD_PREFIXES = ("_orig_mod.", "_orig_mod.module.", "module.")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside all wrappers."""
    *_, last = _with_inner(module)
    return last


def consistent_ddp(module: nn.Module) -> ConsistentDDP | None:
    """The `ConsistentDDP` among the wrappers, if there is one."""
    return next((each for each in _with_inner(module) if isinstance(each, ConsistentDDP)), None)


def plain_state_dict(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The module's state with plain names: parts of it may be compiled. With `keep_vars`, the
    parameters and buffers themselves.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=keep_vars)
    if not any(_COMPILED in name for name in state):
        return state
    return {plain_name(name): value for name, value in state.items()}


def load_plain(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Loads a state with plain names, or with those of a compiled module."""
    names = {plain_name(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(plain_name(name), name): state[name] for name in state})


def with_old_names(restore: Callable[[dict[str, Any]], T], state: dict[str, Any]) -> T:
    """Calls `restore` with the state of a job, whose "model" has plain names; if that does not fit,
    with the names that checkpoints of wrapped models had. If none fit, the error names what differs
    from the plain ones.
    """
    try:
        return restore(state)
    except CheckpointMismatch:
        for prefix in _OLD_PREFIXES:
            model = {prefix + name: value for name, value in state["model"].items()}
            try:
                # All ranks: whether a checkpoint fits, they know together.
                restored = restore({**state, "model": model})
            except CheckpointMismatch:
                continue
            state["model"] = {name: model[prefix + name] for name in state["model"]}
            return restored
        raise


def _with_inner(module: nn.Module) -> Iterator[nn.Module]:
    inner: Any = module
    while isinstance(inner, nn.Module):
        yield inner
        is_parallel = isinstance(inner, _PARALLEL)
        inner = inner.module if is_parallel else getattr(inner, _COMPILED, None)


def plain_name(name: str) -> str:
    """The name of a parameter or a module, whether or not it is inside a compiled one."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)
