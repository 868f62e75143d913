"""Checks the arguments of a Trainer whose checkpoints a `Job` makes, and derives the job's."""

from __future__ import annotations

import math

from transformers import Trainer, TrainingArguments

from outlast.async_checkpoint import Retention
from outlast.integrations.all_ranks import check_all_ranks


def check_supported(trainer: Trainer) -> None:
    """Checks that nothing is requested that contradicts the job's checkpoints.

    Raises:
        ValueError: naming the first argument that is not supported, and what to use instead.
    """
    args = trainer.args
    check_all_ranks(trainer.accelerator.num_processes, "TrainingArguments(use_cpu=True)")
    unsupported = {
        "auto_find_batch_size": "it trains again with a smaller batch: set the batch size",
        "save_only_model": "training could not continue: leave it out",
        "enable_jit_checkpoint": "it handles SIGTERM, as the job does: leave it out",
    }
    for name, reason in unsupported.items():
        if getattr(args, name, False):
            raise ValueError(f"TrainingArguments({name}=True) is not supported: {reason}")
    if args.push_to_hub and args.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={str(args.hub_strategy)!r} uploads checkpoint folders, which are not "
            'made here: use hub_strategy="end"'
        )
    if trainer.model_init is not None:
        raise ValueError("model_init is not supported: pass model=")
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("only DDP and single processes are supported, not DeepSpeed or FSDP")


def retention(args: TrainingArguments) -> Retention:
    """What Trainer's rotation keeps: the newest `save_total_limit` checkpoints and the best one."""
    if args.save_total_limit is None or args.save_total_limit <= 0:
        return Retention()
    best = None if args.metric_for_best_model is None else 1
    return Retention(
        last=args.save_total_limit, best=best, mode="max" if args.greater_is_better else "min"
    )


def count_steps(trainer: Trainer) -> int:
    """The number of optimizer steps of the whole training, for the scheduler.

    Raises:
        ValueError: if it is unknown.
    """
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        batches = len(trainer.get_train_dataloader())
    except TypeError as e:
        raise ValueError("the data set has no length: set max_steps in TrainingArguments") from e
    per_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    steps: int = math.ceil(args.num_train_epochs * per_epoch)
    return steps
