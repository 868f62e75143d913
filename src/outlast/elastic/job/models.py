"""The models and optimizers of one job: one of each, or several by name.

Of several models, the job saves a `ModuleDict`: a checkpoint has their entries under their names,
such as `g.layer.weight`, and so have messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from outlast.elastic.wrapped_modules import consistent_ddp, plain_name, unwrapped

T = TypeVar("T")

Models: TypeAlias = nn.Module | Mapping[str, nn.Module]
Optimizers: TypeAlias = Optimizer | Mapping[str, Optimizer]

ONLY = ""
"""The name of what was given without one."""


def by_name(given: T | Mapping[str, T]) -> dict[str, T]:
    """What was given, by name."""
    return dict(given) if isinstance(given, Mapping) else {ONLY: given}


def joined(models: Models) -> nn.Module:
    """The module that is saved: the one inside the wrappers, or those of several models."""
    if not isinstance(models, Mapping):
        return unwrapped(models)
    return nn.ModuleDict({name: unwrapped(model) for name, model in models.items()})


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The parameters in the order of the optimizer; none of a wrapper that does not show them."""
    groups = getattr(optimizer, "param_groups", ())
    return itertools.chain.from_iterable(group["params"] for group in groups)


def check_models(models: Models, optimizers: Optimizers, states: Mapping[str, Any]) -> None:
    """Checks that no rank has only a part of an optimizer's state, as with torch's
    `ZeroRedundancyOptimizer`. And the models and optimizers of a job with several of them: a
    `TypeError` if one is none; a `ValueError` if a name is impossible, if an optimizer has
    parameters that are not saved, or is named after a model of which it has none, or if a model is
    a `ConsistentDDP`.
    """
    for name, optimizer in by_name(optimizers).items():
        if hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"{_called('optimizer', name)} is a {type(optimizer).__name__}, of whose state "
                "each rank has a part that no checkpoint would have: pass the plain optimizer, or "
                "shard the model and its optimizer with FSDP2 (fully_shard)"
            )
    if not isinstance(models, Mapping) and not isinstance(optimizers, Mapping):
        return
    for argument, given in (("model", models), ("optimizer", optimizers)):
        if isinstance(given, Mapping):
            _check_names(argument, given)
    for name, model in by_name(models).items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"{_called('model', name)} must be a module, not {model!r}")
        if consistent_ddp(model) is not None and name != ONLY:
            raise ValueError(
                f"{_called('model', name)} is a ConsistentDDP, which must be the only model of a "
                "job: pass it without a name"
            )
    saved = by_name(models).items()
    owners = _owners([*saved, *((f"states[{name!r}]", each) for name, each in states.items())])
    for name, optimizer in by_name(optimizers).items():
        called, of_models = _called("optimizer", name), set[str]()
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"{called} must be an optimizer, not {optimizer!r}")
        for parameter in parameters_of(optimizer):
            found = owners.get(id(parameter))
            if found is None:
                raise ValueError(
                    f"{called} has a parameter of shape {tuple(parameter.shape)} that is in no "
                    "model of the job, so it would not be saved"
                )
            of_models |= found
        if isinstance(models, Mapping) and name in models and name not in of_models:
            raise ValueError(
                f"{called} has no parameter of {_called('model', name)}, but those of "
                f"{', '.join(sorted(map(repr, of_models)))}"
            )


def _check_names(argument: str, given: Mapping[str, Any]) -> None:
    if not given:
        raise ValueError(f"{argument} has no entries")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"the names in {argument} must be texts, not {name!r}")
        if not name or "." in name or plain_name(name) != name:
            raise ValueError(f"{name!r} cannot be a name in {argument}: names in it have no dots")
        if argument == "model" and hasattr(nn.ModuleDict(), name):
            raise ValueError(f"{name!r} cannot be a name in model: modules have such an attribute")


def _owners(saved: Iterable[tuple[str, Any]]) -> dict[int, set[str]]:
    """By the identity of each parameter, the names of the modules that have it."""
    found: dict[int, set[str]] = {}
    for name, module in saved:
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            found.setdefault(id(parameter), set()).add(name)
    return found


def _called(argument: str, name: str) -> str:
    return argument if name == ONLY else f"{argument}[{name!r}]"
