"""The registry of states against one `torch.save` and `torch.load` of the same content."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.checkpoint.limits import settle
from benchmarks.checkpoint.saves import disk_folder, in_ranks
from benchmarks.checkpoint.training_state import Size, Training
from benchmarks.elastic.state import through_torch
from outlast.elastic import (
    ElasticSampler,
    ModuleState,
    OptimizerState,
    StateDictState,
    load_all_states,
    load_state,
    save_all_states,
)

__all__ = ["measure"]


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Seconds of each operation, alternately in one process."""
    print("elastic: the registry of states", flush=True)
    found: dict[str, Any] = in_ranks("elastic-registry", 1, lambda _: _measure(size, rounds))[0]
    return found


def _measure(size: Size, rounds: int) -> dict[str, Any]:
    training = Training(size)
    sampler = ElasticSampler(10**6, global_batch_size=32)
    states = [
        ModuleState(training.model),
        OptimizerState(training.optimizer),
        StateDictState(sampler, "loader"),
    ]
    seconds: dict[str, list[float]] = {}
    with disk_folder() as folder:
        os.environ["OUTLAST_CHECKPOINT_PATH"] = str(folder / "states")
        turns: dict[str, Callable[[], dict[str, float]]] = {
            "torch": functools.partial(through_torch, training, sampler, folder / "torch"),
            "states": functools.partial(_registry, states),
        }
        for number in range(rounds + 1):
            for name in list(turns)[:: 1 if number % 2 else -1]:
                settle()
                for what, took in turns[name]().items():
                    if number:
                        seconds.setdefault(what, []).append(took)
    return {"size_bytes": training.size_bytes, "seconds": seconds}


def _registry(states: list[Any]) -> dict[str, float]:
    began = time.perf_counter()
    save_all_states()
    saved = time.perf_counter() - began
    settle()
    began = time.perf_counter()
    handle = save_all_states(asynchronous=True)
    blocked = time.perf_counter() - began
    assert handle is not None
    handle.wait()
    durable = time.perf_counter() - began
    # As in a new process: the whole checkpoint is read to choose it, then each loaded state.
    settle()
    began = time.perf_counter()
    loaded = load_all_states()
    chosen = time.perf_counter() - began
    assert len(loaded) == len(states)
    settle()
    began = time.perf_counter()
    for state in states:
        load_state(state)
    return {
        "save_all_states": saved,
        "save_all_states, asynchronous": blocked,
        "save_all_states, asynchronous, durable": durable,
        "load_all_states": chosen,
        "load_state of each, the checkpoint chosen before": time.perf_counter() - began,
    }
