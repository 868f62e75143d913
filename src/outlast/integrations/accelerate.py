"""accelerate: a `Job` of what an `Accelerator` has prepared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

import outlast
from outlast.async_checkpoint import SaveHandle
from outlast.elastic import ElasticLoader
from outlast.errors import CheckpointMismatch
from outlast.integrations.common import check_all_ranks, not_importable

try:
    from accelerate import Accelerator
    from accelerate.data_loader import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        DataLoaderShard,
        SeedableRandomSampler,
    )
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType
except ImportError as e:
    raise not_importable("accelerate", "transformers", e) from e

__all__ = ["declare_order", "make_job", "reset_state"]

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU")


def reset_state() -> None:
    """Makes accelerate forget process group, device and accumulation of the previous iteration.

    Call it at the start of a wrapped function, before the first `Accelerator` or, with Hugging
    Face's Trainer, before the `TrainingArguments`: accelerate keeps its state for the life of the
    process, but each iteration has a new process group, maybe with other ranks.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_job(
    accelerator: Accelerator,
    path: str | os.PathLike[str],
    *,
    loader: Any = None,
    states: Mapping[str, Any] | None = None,
    **options: Any,
) -> outlast.Job:
    """A `Job` that saves what the accelerator has prepared: the models, the optimizers, the
    schedulers, the gradient scaler, and the objects of `register_for_checkpointing`.

    With an `ElasticLoader`, a global batch has the same size on any number of processes: prepared
    schedulers then step once for each step of the optimizer, as with `split_batches=True`.
    Otherwise accelerate steps them once for each process.

    From then on, `accelerator.save_state()` saves through the job, in the background, and
    `accelerator.load_state()` loads its newest valid checkpoint.

    Args:
        accelerator: after `prepare`.
        path: the folder of the checkpoints, as for `Job`.
        loader: an `ElasticLoader`, or another loader with a state; not prepared by the accelerator.
        states: more objects with `state_dict` and `load_state_dict`, by name.
        options: passed to `Job`: `every`, `keep`, `min_ranks`, ...

    Raises:
        ValueError: if nothing was prepared, if the accelerator does not use the other ranks, if it
            uses FSDP, DeepSpeed or another method that saves by itself, or hooks of `save_state`.
    """
    if accelerator.distributed_type not in [DistributedType(name) for name in _SUPPORTED]:
        raise ValueError(
            f"{accelerator.distributed_type} is not supported: its states are not those of the "
            "prepared objects. Use a Job directly"
        )
    check_all_ranks(accelerator.num_processes, "Accelerator(cpu=True)")
    if not accelerator._models or not accelerator._optimizers:
        raise ValueError("prepare a model and an optimizer with the accelerator before make_job")
    hooks = [*accelerator._save_model_state_pre_hook, *accelerator._load_model_state_pre_hook]
    if hooks:
        raise ValueError(
            "hooks of save_state or load_state are registered, and would not be called: use "
            "accelerator.register_for_checkpointing, or states="
        )
    for each in accelerator._dataloaders:
        declare_order(each)
        if each is loader and not each.use_stateful_dataloader:
            raise ValueError(
                "the prepared loader has no state of its own. Leave loader= out, and iterate it "
                "with job.batches(loader); or prepare it with "
                "DataLoaderConfiguration(use_stateful_dataloader=True)"
            )
    if isinstance(loader, ElasticLoader):
        for scheduler in accelerator._schedulers:
            scheduler.split_batches = True
    job = outlast.Job(
        path,
        model=accelerator._models[0],
        optimizer=accelerator._optimizers[0].optimizer,
        loader=loader,
        states={**_states_of(accelerator), **(states or {})},
        **options,
    )

    def save_state(output_dir: str | None = None, *_: Any, **__: Any) -> SaveHandle:
        _check_folder("save_state", output_dir)
        return job.save()

    def load_state(input_dir: str | None = None, *_: Any, **__: Any) -> int:
        _check_folder("load_state", input_dir)
        return job.restore()

    accelerator.save_state, accelerator.load_state = save_state, load_state
    return job


def declare_order(loader: Any) -> int:
    """Declares to a `Job` that another number of processes continues with a prepared loader. It
    does if its order depends on seed and epoch alone, with `SeedableRandomSampler` or without
    shuffling: each batch of all processes is then the next part of that order. Returns the number
    of samples of such a batch; 0 for another order. A `ValueError` for one that cannot continue.
    """
    if type(loader) is DataLoaderDispatcher and not isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "dispatch_batches=True with a data set that has a length is not supported: after a "
            "restart, accelerate skips too few batches, and repeats samples. Leave it out"
        )
    if type(loader) is not DataLoaderShard:
        return 0
    batches, processes = loader.batch_sampler, 1
    if not isinstance(batches, BatchSamplerShard):
        if dist.is_initialized() and dist.get_world_size() > 1:
            return 0
    else:
        processes = 1 if batches.split_batches else batches.num_processes
        batches = batches.batch_sampler
    orders = SeedableRandomSampler, SequentialSampler
    if type(batches) is not BatchSampler or type(batches.sampler) not in orders:
        return 0
    found = int(batches.batch_size * processes)
    loader.batch_sampler.resizable_batch = found
    return found


def _states_of(accelerator: Accelerator) -> dict[str, Any]:
    """The prepared objects besides the first model and the first optimizer, by name."""
    states: dict[str, Any] = {"accelerator": _Accumulation(accelerator)}
    if accelerator.scaler is not None:
        states["scaler"] = accelerator.scaler
    groups = {
        "model": accelerator._models[1:],
        "optimizer": accelerator._optimizers[1:],
        "scheduler": accelerator._schedulers,
        "object": accelerator._custom_objects,
    }
    for name, objects in groups.items():
        first = 1 if name in ("model", "optimizer") else 0
        states.update({f"{name}{i}": each for i, each in enumerate(objects, first)})
    return states


class _Accumulation:
    """The position in the accumulation of gradients, and the pace of the schedulers."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        return {"step": self._accelerator.step, "scheduler_steps": self._scheduler_steps()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues there; a `CheckpointMismatch` if schedulers would go on at another pace."""
        before, now = state.get("scheduler_steps", 0), self._scheduler_steps()
        if before and now and before != now:
            raise CheckpointMismatch(
                f"accelerate has stepped the schedulers {before} times for each step of the "
                f"optimizer, once for each process, and would now do so {now} times. Continue with "
                f"{before} processes; or train with an outlast.elastic.ElasticLoader, or with "
                "Accelerator(step_scheduler_with_optimizer=False), from the beginning"
            )
        self._accelerator.step = state["step"]

    def _scheduler_steps(self) -> int:
        linked = [each for each in self._accelerator._schedulers if each.step_with_optimizer]
        if not linked:
            return 0
        split = all(each.split_batches for each in linked)
        return 1 if split else int(self._accelerator.num_processes)


def _check_folder(method: str, folder: str | None) -> None:
    if folder is not None:
        raise ValueError(
            f"{method}({folder!r}): the checkpoints are in the folder of the job. Leave it out"
        )
