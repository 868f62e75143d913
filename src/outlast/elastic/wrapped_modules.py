"""Modules inside wrappers, whose parameters have other names there (`module.`, `_orig_mod.`).

A checkpoint has the names of the module itself, so that it fits whether or not the module is
wrapped in DDP or compiled, in any order, and whether or not parts of it are compiled.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outlast.elastic.numerics.consistent_ddp import ConsistentDDP

_COMPILED = "_orig_mod"  # where torch.compile keeps the module
# The code of the functions that load one module in torch's way.
_TORCHS = {
    each._load_from_state_dict.__code__ for each in (nn.Module, nn.BatchNorm1d, nn.InstanceNorm1d)
}
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
    renamed = {names.get(plain_name(name), name): value for name, value in state.items()}
    if not _is_copied(module, renamed):
        module.load_state_dict(renamed)


def resized(module: nn.Module, names: Container[str]) -> list[str]:
    """The buffers among these that a module may resize when it loads them, in a way of its own, as
    torch's observers for quantization do.
    """
    found = [
        plain_name(f"{prefix}.{name}" if prefix else name)
        for prefix, each in module.named_modules(remove_duplicate=False)
        if not _loads_as_torch(each)
        for name in each._buffers
    ]
    return [name for name in found if name in names]


def _loads_as_torch(module: nn.Module) -> bool:
    return getattr(module._load_from_state_dict, "__code__", None) in _TORCHS


def _is_copied(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Copies a state into a module as torch's `load_state_dict` does, which visits all names again
    for each layer of a `Sequential`: 20 s with 5,000 of them. Returns whether all was copied: not
    if a module loads in a way of its own or has hooks, nor what does not fit, which torch names.
    """
    pairs = {}
    for prefix, each in module.named_modules(remove_duplicate=False):
        extra = getattr(type(each), "set_extra_state", nn.Module.set_extra_state)
        hooks = (*each._load_state_dict_pre_hooks, *each._load_state_dict_post_hooks)
        if hooks or not _loads_as_torch(each) or extra is not nn.Module.set_extra_state:
            return False
        for name, to in (*each._parameters.items(), *each._buffers.items()):
            if to is not None and name not in each._non_persistent_buffers_set:
                key = f"{prefix}.{name}" if prefix else name
                pairs[key] = to, state.get(key)
    if (
        getattr(module.load_state_dict, "__func__", None) is not nn.Module.load_state_dict
        or torch.__future__.get_swap_module_params_on_conversion()
        or pairs.keys() != state.keys()
        or any(is_lazy(to) or to.is_meta for to, _ in pairs.values())
        or not all(isinstance(t, torch.Tensor) and t.shape == to.shape for to, t in pairs.values())
    ):
        return False
    try:
        with torch.no_grad():
            for to, tensor in pairs.values():
                to.copy_(tensor)
    except Exception:  # noqa: BLE001 - torch says which does not fit
        return False
    return True


def _with_inner(module: nn.Module) -> Iterator[nn.Module]:
    inner: Any = module
    while isinstance(inner, nn.Module):
        yield inner
        is_parallel = isinstance(inner, _PARALLEL)
        inner = inner.module if is_parallel else getattr(inner, _COMPILED, None)


def plain_name(name: str) -> str:
    """The name of a parameter or a module, whether or not it is inside a compiled one."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)
