"""Keeps the order in which `DistributedDataParallel` sums gradients, over restarts.

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

from outlast.elastic.job.parts import Part

log = logging.getLogger("outlast.elastic")

_ORDERS = "orders"


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
