"""An optimizer as a part of a job's state, and its parameter groups, which are made of those of a
checkpoint and the present ones.

The values of a group are replaced, whatever they are; where torch resumes, so does a job. A key
that only the present group has, as of a newer torch, stays. Groups are saved with the names of
their parameters in the model, and the moments go to the parameter of the same name; torch goes by
the order alone. A group that was added in training is added again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from outlast.async_checkpoint.state_dict import nodes
from outlast.elastic.job.encoding import is_plain_tensor
from outlast.elastic.job.models import parameters_of
from outlast.elastic.job.parts import Part
from outlast.elastic.tensors import rewrap
from outlast.elastic.wrapped_modules import plain_name
from outlast.errors import CheckpointMismatch

log = logging.getLogger("outlast.elastic")

_HAS_MOMENTS = "has_moments"  # part of the checkpoint's format
_ADDED = "outlast_parameters"  # likewise: of groups that were added in training
_PARAMETERS = "outlast_names"  # likewise: of all others, a line each
_NAMES = "param_names"  # torch's

_USED: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""The optimizers of all jobs so far."""


class OptimizerPart(Part):
    """An optimizer; after a step, the live state refers to its tensors.

    One of several, which have names, may make its first step later than the job. So its state also
    says whether it has moments.
    """

    _source: Optimizer

    def __init__(self, optimizer: Optimizer, module: nn.Module, *, is_named: bool) -> None:
        super().__init__(optimizer)
        self._module, self._is_named = module, is_named
        self._first_added = len(getattr(optimizer, "param_groups", ()))
        self._known: dict[torch.Tensor, str] = {}
        self.added: list[str] = []  # the parameters of the groups that a restore has added again
        self.created = False  # the present moments are those of `create_sharded_moments`
        # What a constructor makes, the first step expects. Of an optimizer that was used, nothing.
        is_new = optimizer not in _USED
        self._made_with = frozenset(optimizer.state) if is_new else frozenset()
        if is_new:
            _USED.add(optimizer)

    def save(self) -> dict[str, Any]:
        state = self._source.state_dict()
        pairs = zip(getattr(self._source, "param_groups", ()), state["param_groups"], strict=False)
        names = self._names()
        for number, (group, saved) in enumerate(pairs):
            found = [names.get(each, "") for each in group["params"]]
            if number >= self._first_added:  # in training
                saved[_ADDED] = found
            elif all(found):
                saved[_PARAMETERS] = "\n".join(found)
        return {**state, _HAS_MOMENTS: bool(state["state"])} if self._is_named else state

    def target(self, saved: Any) -> Any:
        """The moments, two thirds of the state, are loaded into new memory, which the optimizer
        adopts: the current moments then need no backup. The groups are filled with what was saved:
        their number, keys and types may have changed since.
        """
        saved = {**saved, "param_groups": []}
        return {**saved, "state": {}} if self.loads_anew else saved

    def load(self, state: Any, steps: int) -> None:
        state = dict(state)
        has_moments = state.pop(_HAS_MOMENTS, True)
        del self._source.param_groups[max(self._first_added, len(state["param_groups"])) :]
        self.added = _add_groups(self._source, self._module, state["param_groups"])
        names = self._names()
        pairs = zip(self._source.param_groups, [*state["param_groups"], {}], strict=False)
        is_torchs = isinstance(self._source, Optimizer)
        state["param_groups"] = [
            _loaded_group(number, group, loaded, names, is_torchs=is_torchs)
            for number, (group, loaded) in enumerate(pairs)
        ]
        rewrap(state, self.with_moments, "optimizer")
        self._source.load_state_dict(state)
        self._keep_dtypes(state)
        if steps and has_moments:
            self._match_strides()
            return
        for each in [each for each in self._source.state if each not in self._made_with]:
            del self._source.state[each]

    def _names(self) -> dict[torch.Tensor, str]:
        """Of each parameter of the model: looked up again when the optimizer has another one."""
        if not self._known or any(each not in self._known for each in parameters_of(self._source)):
            self._known = {each: name for name, each in self._module.named_parameters()}
        return self._known

    def shared(self) -> list[dict[str, Any]]:
        """The hyperparameters: a scheduler changes them."""
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self._source.param_groups
        ]

    def frozen(self, shared: Any) -> dict[str, Any]:
        state = self.save()
        pairs = zip(shared, state["param_groups"], strict=False)  # more may have been added since
        groups = [{**group, **each} for each, group in pairs]
        return {**state, "param_groups": groups}

    def create_sharded_moments(self) -> None:
        """Creates the moments, since a DTensor can only be loaded into an existing one. torch does
        this with a step at a learning rate of 0, which counts as a step.
        """
        parameters = list(parameters_of(self._source))
        self.created = any(isinstance(p, DTensor) for p in parameters) and not self._source.state
        if not self.created:
            return
        frozen = [each for each in parameters if not each.requires_grad]  # it may have moments
        try:
            for each in frozen:
                each.requires_grad_()
            get_optimizer_state_dict(self._module, self._source)
        finally:
            for each in frozen:
                each.requires_grad_(False)
                each.grad = None

    @property
    def replaces_moments(self) -> bool:
        """Whether the optimizer adopts the loaded tensors, and may hold the old and the new ones at
        once: not on a GPU, and not with a DTensor, which is resharded into the current one.
        """
        return type(self._source).load_state_dict is Optimizer.load_state_dict and all(
            is_plain_tensor(value) or not isinstance(value, torch.Tensor | dict | list | tuple)
            for moments in self._source.state.values()
            for value in moments.values()
        )

    @property
    def loads_anew(self) -> bool:
        """Whether the moments are loaded into new memory: what is there now may be more or less
        than was saved, such as a history. Not on a GPU, and not what is filled in place.
        """
        leaves = (leaf for each in self._source.state.values() for _, leaf in nodes(each))
        return all(not isinstance(each, torch.Tensor) or is_plain_tensor(each) for each in leaves)

    def _keep_dtypes(self, saved: dict[str, Any]) -> None:
        """Puts back what torch has converted to the type of the parameter: moments of 32 bits of
        one of 16 bits, or counts.
        """
        source: Any = self._source
        hooks = (f"_optimizer_load_state_dict_{when}_hooks" for when in ("pre", "post"))
        own = type(source).load_state_dict is not Optimizer.load_state_dict
        if own or any(getattr(source, name, None) for name in hooks):
            return
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, parameters_of(source), strict=True):
            for name, value in saved["state"].get(number, {}).items():
                now = source.state[parameter].get(name)
                if type(now) is type(value) is torch.Tensor and now.dtype != value.dtype:
                    source.state[parameter][name] = value.to(now.device)

    def _match_strides(self) -> None:
        """Gives the moments the memory format of their parameters (`torch.channels_last`): a fused
        optimizer walks both by address, without checking that they match.
        """
        for parameter, moments in self._source.state.items():
            if isinstance(parameter, DTensor) or parameter.is_contiguous():
                continue
            for name, value in moments.items():
                if type(value) is not torch.Tensor or value.shape != parameter.shape:
                    continue
                if value.stride() != parameter.stride():
                    strided = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    moments[name] = strided.copy_(value)


def _add_groups(optimizer: Optimizer, module: nn.Module, saved: list[Any]) -> list[str]:
    """Adds the groups that were added in training, and returns the names of their parameters; a
    `CheckpointMismatch` if the model lacks one, or the optimizer lacks another group.
    """
    parameters, found = dict(module.named_parameters()), list[str]()
    for number, group in [*enumerate(saved)][len(optimizer.param_groups) :]:
        names = group.get(_ADDED, [""])
        if not parameters.keys() >= {*names}:
            lacking = group.get(_PARAMETERS, "\n".join(names)).split("\n")
            raise CheckpointMismatch(
                f"the optimizer has {number} parameter groups, and {len(saved)} were saved. Add "
                f"group {number} before job.restore(), with its parameters in the model: "
                f"{', '.join(lacking[:10]) or 'the model did not have them at the save, either'}"
            )
        added = [parameters[name] for name in names]
        named = zip(group[_NAMES], added, strict=True) if _NAMES in group else added
        optimizer.add_param_group({"params": [*named]})
        found += names
    return found


def _loaded_group(
    number: int,
    group: dict[str, Any],
    loaded: dict[str, Any],
    names: dict[torch.Tensor, str],
    *,
    is_torchs: bool,
) -> dict[str, Any]:
    """The group to load; `CheckpointMismatch` if its parameter names differ or none was saved, or
    if an optimizer of torch has another number of parameters.
    """
    where = f"parameter group {number} of the optimizer"
    if not loaded:
        raise CheckpointMismatch(f"the checkpoint has no {where}")
    found = {**loaded, "params": _Numbers(_in_order(where, group, loaded, names))}
    if is_torchs and len(found["params"]) != len(group["params"]):
        raise CheckpointMismatch(
            f"{where} has {len(group['params'])} parameters, and {len(found['params'])} were saved"
        )
    found.pop(_ADDED, None)
    found.pop(_PARAMETERS, None)
    for key, present in group.items():
        if key == "params":
            continue
        if key not in loaded:
            found[key] = present
            log.info("%s keeps %s = %r, which the checkpoint lacks", where, key, present)
        elif key == _NAMES:
            found[key] = present
        else:
            found[key] = _as_present(present, loaded[key])
    return found


class _Numbers(list[int]):
    """Those of a group's parameters: torch looks in it once for each tensor of the state."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__(numbers)
        self._known = frozenset(self)

    def __contains__(self, number: object) -> bool:
        return number in self._known


def _as_present(present: Any, loaded: Any) -> Any:
    """A number that was saved as a tensor, such as a learning rate, or the other way round."""
    if isinstance(present, torch.Tensor):
        return torch.as_tensor(loaded, dtype=present.dtype, device=present.device)
    if isinstance(loaded, torch.Tensor) and isinstance(present, float | int):
        return loaded.item()
    return loaded


def _in_order(
    where: str, group: dict[str, Any], loaded: dict[str, Any], names: dict[torch.Tensor, str]
) -> Any:
    """The numbers of the saved parameters, in the present order. Names that the program has given
    to the optimizer come first.
    """
    now, saved = ([_inner(n) for n in each.get(_NAMES, ())] for each in (group, loaded))
    if not now or not saved:
        now = [names.get(each, "") for each in group["params"]]
        saved = loaded.get(_PARAMETERS, "").split("\n")
        if sorted(now) != sorted(saved):  # one of both models may be inside a DDP, or compiled
            now, saved = ([_inner(name) for name in each] for each in (now, saved))
        if not all(now) or len({*now}) < len(now) or sorted(now) != sorted(saved):
            return loaded["params"]  # names that are not known, or not the same: torch's order
    if now == saved:
        return loaded["params"]
    if sorted(now) != sorted(saved):
        only_now, only_saved = sorted({*now} - {*saved}), sorted({*saved} - {*now})
        raise CheckpointMismatch(
            f"{where} has other parameters than were saved: {only_now[:10]} are new, and "
            f"{only_saved[:10]} are missing"
        )
    numbers = dict(zip(saved, loaded["params"], strict=True))
    return [numbers[name] for name in now]


def _inner(name: str) -> str:
    """The name of a parameter, whether or not the model is inside a DDP, or compiled."""
    return ".".join(part for part in plain_name(name).split(".") if part != "module")
