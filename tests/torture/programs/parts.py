"""The parts of a training program, the choices of each, and which of them do not go together."""

from __future__ import annotations

Program = dict[str, str]
"""A choice of each part."""

PARTS: dict[str, tuple[str, ...]] = {
    "loop": ("batches", "trainer", "plain"),
    "parallel": ("ddp", "fsdp2"),
    "ranks": ("2", "3", "1"),
    "data": ("distributed", "own_sampler", "random_sampler", "elastic", "iterable", "drawn"),
    "inputs": ("even", "uneven", "join"),
    "workers": ("none", "fork", "spawn", "forkserver", "persistent"),
    "accumulate": ("no", "every_2", "no_sync_2"),
    "clip": ("no", "norm"),
    "optimizer": ("sgd", "adamw", "two"),
    "scheduler": ("no", "step", "epoch", "after_restore", "plateau"),
    "ema": ("no", "own", "averaged"),
    "layers": ("plain", "dropout", "batch_norm"),
    "evaluation": ("no", "after_steps", "rest", "epoch", "before"),
    "best": ("no", "states", "metric", "file"),
    "log": ("no", "each_step", "with_evaluation", "each_epoch"),
    "stopping": ("no", "epochs", "body"),
    "random": ("no", "rank_0", "numpy"),
    "leaving": ("plain", "finally_barrier", "finally_destroy", "except_log"),
    "helper": ("no", "daemon", "pool", "not_daemon"),
    "handlers": ("no", "timer", "children"),
    "bar": ("no", "tqdm"),
    "compile": ("no", "eager"),
}

# Each rule: with the first choice, the part has one of these.
_RULES: tuple[tuple[tuple[str, str], str, tuple[str, ...]], ...] = (
    (("loop", "plain"), "data", ("drawn",)),
    (("loop", "batches"), "data", ("distributed", "own_sampler", "random_sampler", "elastic",
                                   "iterable")),
    (("loop", "trainer"), "data", ("distributed", "own_sampler", "random_sampler", "elastic",
                                   "iterable")),
    (("loop", "plain"), "evaluation", ("no", "after_steps", "rest", "before")),
    (("loop", "plain"), "log", ("no", "each_step", "with_evaluation")),
    (("loop", "plain"), "scheduler", ("no", "step", "after_restore")),
    (("loop", "plain"), "stopping", ("no", "body")),
    (("data", "drawn"), "workers", ("none",)),
    (("data", "drawn"), "inputs", ("even",)),
    (("inputs", "uneven"), "data", ("own_sampler",)),
    (("inputs", "join"), "data", ("own_sampler",)),
    (("inputs", "join"), "parallel", ("ddp",)),
    (("inputs", "uneven"), "ranks", ("2", "3")),
    (("inputs", "join"), "ranks", ("2", "3")),
    (("parallel", "fsdp2"), "ranks", ("2", "3")),
    (("parallel", "fsdp2"), "layers", ("plain", "dropout")),
    (("parallel", "fsdp2"), "ema", ("no",)),
    (("parallel", "fsdp2"), "best", ("no", "states", "metric")),
    (("parallel", "fsdp2"), "compile", ("no",)),
    (("parallel", "fsdp2"), "accumulate", ("no", "every_2")),
    (("evaluation", "no"), "best", ("no",)),
    (("evaluation", "no"), "scheduler", ("no", "step", "epoch", "after_restore")),
    (("evaluation", "no"), "log", ("no", "each_step", "each_epoch")),
    (("evaluation", "no"), "stopping", ("no", "body")),
    # What an evaluation *before* the step decides belongs to no step yet.
    (("evaluation", "before"), "best", ("no", "states")),
    (("scheduler", "plateau"), "evaluation", ("epoch",)),
    (("stopping", "epochs"), "evaluation", ("epoch", "after_steps")),
)  # fmt: skip


# Ranks that do not make the same steps are refused, whatever else the program does.
_WITH_UNEVEN = ("loop", "parallel", "ranks", "accumulate", "log", "leaving")


def go_together(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a program may have both choices."""
    for choice, (part, name) in ((one, other), (other, one)):
        for given, ruled, choices in _RULES:
            if given == choice and ruled == part and name not in choices:
                return False
    return True


def is_wanted(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether a program with this pair of choices shows something."""
    for choice, (part, _) in ((one, other), (other, one)):
        if choice in (("inputs", "uneven"), ("inputs", "join")):
            return part in _WITH_UNEVEN
    return True


def is_refused(program: Program) -> bool:
    """Whether the job must end with an error: its ranks do not make the same steps."""
    return program["inputs"] != "even"
