"""The parts of a job's state that belong to its model: its tensors, what a program sets beside
them, and the order in which `DistributedDataParallel` sums its gradients.

A program sets which parameters are trained, and the mode of each module (`train`, `eval`). A
function that begins again sets both anew, unless it does so once.

Where a gradient is in DDP's bucket decides in which order those of the ranks are added, and so the
last bits, with three ranks or more. The first backward pass of a new DDP uses other buckets than
all later ones: these have the order in which the gradients of rank 0 arrived in it. So that order
is part of the state of a job. A new DDP is given it by torch's own means: a reducer whose
parameters have that order, and which is told that all have arrived.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from outlast.async_checkpoint.state_dict import of_any_size
from outlast.elastic.job.parts import Part
from outlast.elastic.tensors import rewrap
from outlast.elastic.wrapped_modules import load_plain, plain_name, plain_state_dict, resized
from outlast.errors import CheckpointMismatch
from outlast.inprocess.running_call import RunningCall

log = logging.getLogger("outlast.elastic")

_NAMES, _ORDERS = "parameters", "orders"  # part of the checkpoint's format


class ModelPart(Part):
    """The module; after a step, the live state refers to its tensors."""

    def save(self) -> dict[str, Any]:
        return plain_state_dict(self._source)

    def target(self, saved: Any) -> Any:
        return saved | {name: of_any_size(saved[name]) for name in resized(self._source, saved)}

    def load(self, state: Any, steps: int) -> None:
        rewrap(state, self.save, "model")
        load_plain(self._source, state)


class ModelModes(Part):
    """The names of the parameters that are not trained, or of those that are, if they are fewer, as
    with adapters. They are compared at the end of the first step after a restore, not set: a
    wrapper such as DDP asks for them only when it is made.
    """

    in_place = False
    _expected: tuple[str, ...] | None = None

    def save(self) -> dict[str, tuple[str, ...]]:
        frozen, trained = self._names()
        found = ("trained", *trained) if len(trained) < len(frozen) else ("frozen", *frozen)
        return {_NAMES: found}

    def _names(self) -> tuple[list[str], list[str]]:
        """The names of the parameters that are not trained, and of those that are."""
        names: tuple[list[str], list[str]] = [], []
        for name, each in self._source.named_parameters():
            names[each.requires_grad].append(plain_name(name))
        return names

    def shared(self) -> Any:
        return {}  # what counts is known when the iteration has ended

    def frozen(self, shared: Any) -> Any:
        return self.save()

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        self._expected = state[_NAMES] if steps and state else None

    def check(self, rank: int, steps: int, added: Iterable[str] = ()) -> None:
        """Call it before each step is counted. Warns of a parameter that was trained before a
        restore, and is not now: the function has unfrozen it in a step that is not made again. It
        may also freeze it on purpose, but not one of those `added` to an optimizer by the restore:
        that is a `CheckpointMismatch`.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return
        known = set(expected[1:])
        names = [n for n in self._names()[0] if (n in known) == (expected[0] == "trained")]
        added_names = {plain_name(name) for name in added}
        wrong = [name for name in names if name in added_names]
        found = wrong or names
        text = (
            f"{len(found)} parameters were trained in the state that this job continued from, and "
            f"are not in step {steps}: {', '.join(found[:3])}{', ...' * (len(found) > 3)}. What "
            f"unfreezes a parameter once{' and adds it to the optimizer' * bool(wrong)} has to run "
            f"again before {'job.restore()' if wrong else 'the model is wrapped'}"
        )
        if wrong:
            raise CheckpointMismatch(text)
        if names and rank == 0:
            log.warning("%s", text)


def restore_modes(module: nn.Module, call: RunningCall) -> None:
    """Gives each module of a model that outlives a restart in place the mode of its first restore:
    a fault in an evaluation leaves that of the evaluation.
    """
    for each in module.modules():
        each.training = call.modes.setdefault(each, each.training)


class GradientBuckets(Part):
    """The order of the buckets, where it may change, of each DDP in these modules, on all ranks."""

    in_place = False

    def __init__(self, modules: Iterable[Any]) -> None:
        self._ddps: list[DistributedDataParallel] = []
        self._orders: list[bytes] = []  # of the first ones; empty if it is not known
        self._find(modules)

    def watch(self, module: nn.Module) -> None:
        """Adds the DDPs of a module that was wrapped after the state was restored. Collective."""
        number = len(self._ddps)
        self._find([module])
        self.apply(number)

    def save(self) -> dict[str, tuple[bytes, ...]]:
        return {_ORDERS: tuple(self._orders)} if any(self._orders) else {}

    def shared(self) -> Any:
        return self.save()

    def load(self, state: Mapping[str, Any], steps: int) -> None:
        self._orders = list(state.get(_ORDERS, ()))

    def note(self) -> None:
        """Notes the orders that a step decided. Collective: the next pass would agree on them."""
        for number, ddp in enumerate(self._ddps):
            if not self._order_of(number) and not ddp.static_graph and _has_decided(ddp):
                self._orders += [b""] * (number + 1 - len(self._orders))
                self._orders[number] = _present_order(ddp)

    def _find(self, modules: Iterable[Any]) -> None:
        for module in modules:
            for each in module.modules() if isinstance(module, nn.Module) else ():
                if isinstance(each, DistributedDataParallel) and _may_change(each):
                    self._ddps.append(each)

    def apply(self, first: int = 0) -> None:
        """Gives each DDP, from that number on, the order that is known of it. Collective."""
        for number, ddp in enumerate(self._ddps[first:], first):
            parameters, _ = ddp._build_params_for_reducer()
            order = array("I", self._order_of(number)).tolist()
            if not order and ddp.static_graph:  # decided only by the second pass: so it is set
                order = list(reversed(range(len(parameters))))
            if order and sorted(order) != list(range(len(parameters))):
                log.info("the order of gradients is not kept: the model has other parameters")
            elif order:
                _set_order(ddp, order)

    def _order_of(self, number: int) -> bytes:
        return self._orders[number] if number < len(self._orders) else b""


def _may_change(ddp: DistributedDataParallel) -> bool:
    """Whether the order may change, and matters: a sum of two is the same in any order."""
    is_decided_by_pass = ddp.static_graph or not ddp.find_unused_parameters
    return is_decided_by_pass and ddp.process_group.size() > 2


def _has_decided(ddp: DistributedDataParallel) -> bool:
    """Whether a pass has decided the order of all later ones."""
    if ddp.reducer._rebuild_buckets():
        return True
    assert ddp.logger is not None
    ddp.logger.set_runtime_stats_and_log()  # a step of several passes has agreed on it itself
    return bool(ddp._get_ddp_logging_data().get("has_rebuilt_buckets"))


def _present_order(ddp: DistributedDataParallel) -> bytes:
    """The numbers of the parameters, as their gradients are in the buckets."""
    numbers = {id(each): i for i, each in enumerate(ddp._build_params_for_reducer()[0])}
    # Only this names the parameters of a bucket. It allocates as much as the gradients for a
    # moment, between two passes.
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return array("I", [numbers[id(p)] for each in buckets for p in each.parameters()]).tobytes()


def _set_order(ddp: DistributedDataParallel, order: list[int]) -> None:
    hooks = list(ddp._comm_hooks)
    has_hook = bool(ddp._get_ddp_logging_data().get("comm_hook"))
    if ddp.mixed_precision or ddp._delay_all_reduce_params or has_hook != bool(hooks):
        log.info(
            "the order of gradients is not kept by a DDP with mixed_precision, with parameters "
            "whose reduction is delayed, or with a communication hook that torch has built in"
        )
        return
    parameters, is_sparse = ddp._build_params_for_reducer()
    parameters = [parameters[i] for i in order]
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, [is_sparse[i] for i in order], names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
    ddp._comm_hooks = []
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()
