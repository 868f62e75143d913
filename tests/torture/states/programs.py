"""Jobs with an optimizer, and how people change them between a save and a restore.

What plain `torch.load` and `load_state_dict` resume, so that a further step can be made, a `Job`
must resume with the same values; what it does not resume, it must refuse by name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import outlast
from outlast.errors import CheckpointError, CheckpointUnsavable

from .compare import difference

OPTIMIZERS = ("sgd", "momentum", "adam", "amsgrad", "rmsprop", "adagrad", "tensor lr")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear layer; `how` says what is special about it."""

    name: str
    size: int = 3
    how: str = ""  # "frozen", "left out", "unused", "bfloat16", "transposed", "tied", "norm"


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, an optimizer and how many steps are made."""

    layers: tuple[Layer, ...]
    optimizer: str
    groups: int = 1
    own: str = ""  # "group key", "group tensor", "state key", "shared state", "names", "scheduler"
    steps: int = 1


HOWS = ("", "", "", "frozen", "left out", "unused", "bfloat16", "transposed", "tied", "norm")
OWN = ("", "", "group key", "group tensor", "state key", "shared state", "names", "scheduler")


def make_program(seed: int) -> Program:
    """The program that the case of this seed saves."""
    r = Random(f"program/{seed}")
    layers = [
        Layer(name, r.choice((1, 2, 3)), r.choice(HOWS))
        for name in r.sample(("embed", "body", "head", "0"), r.choice((1, 2, 3)))
    ]
    layers[0] = dataclasses.replace(layers[0], how="")
    return Program(
        tuple(layers), r.choice(OPTIMIZERS), r.choice((1, 1, 2)), r.choice(OWN), r.choice((0, 1, 2))
    )


def change(program: Program, r: Random) -> tuple[Program, str]:
    """A changed program, and what was changed."""
    layers = list(program.layers)
    at = r.randrange(len(layers))
    what = r.choice(_CHANGES)
    if what in ("frozen", "left out", "bfloat16", "transposed", "tied", "untied", "norm"):
        how = "" if what == "untied" else what
        layers[at] = dataclasses.replace(layers[at], how=how)
    elif what == "renamed":
        layers[at] = dataclasses.replace(layers[at], name="renamed")
    elif what == "larger":
        layers[at] = dataclasses.replace(layers[at], size=layers[at].size + 1)
    elif what == "moved":
        r.shuffle(layers)
    elif what == "removed" and len(layers) > 1:
        del layers[at]
    elif what == "added":
        layers.append(Layer("added"))
    elif what == "a group added":
        return dataclasses.replace(program, groups=program.groups + 1), what
    elif what == "another optimizer":
        return dataclasses.replace(program, optimizer=r.choice(OPTIMIZERS)), what
    elif what == "own":
        return dataclasses.replace(program, own=r.choice(OWN)), what
    elif what == "has stepped":
        return dataclasses.replace(program, steps=3), what
    return dataclasses.replace(program, layers=tuple(layers)), what


_CHANGES = (
    *("frozen", "left out", "bfloat16", "transposed", "tied", "untied", "norm", "renamed"),
    *("larger", "moved", "removed", "added", "a group added", "another optimizer", "own"),
    *("has stepped", "nothing"),
)


class Made:
    """The objects of a program, with other numbers for each `fill`."""

    def __init__(self, program: Program, fill: int) -> None:
        self.program = program
        with torch.random.fork_rng():
            torch.manual_seed(fill)
            self.model = nn.ModuleDict()
            for layer in program.layers:
                self.model[layer.name] = self._layer(layer)
            self.optimizer = self._optimizer()
            self.states: dict[str, Any] = {}
            if program.own == "scheduler":
                self.states["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def _layer(self, layer: Layer) -> nn.Module:
        if layer.how == "norm":
            return nn.BatchNorm1d(layer.size)
        made = nn.Linear(layer.size, layer.size)
        if layer.how == "tied":
            first = next(iter(self.model.values()), None)
            if isinstance(first, nn.Linear) and first.weight.shape == made.weight.shape:
                made.weight = first.weight
        elif layer.how == "bfloat16":
            made.to(torch.bfloat16)
        elif layer.how == "transposed":
            made.weight = nn.Parameter(made.weight.detach().t().contiguous().t())
        elif layer.how == "frozen":
            made.requires_grad_(False)
        return made

    def _optimizer(self) -> torch.optim.Optimizer:
        program = self.program
        out = {layer.name for layer in program.layers if layer.how == "left out"}
        named = [(n, p) for n, p in self.model.named_parameters() if n.split(".")[0] not in out]
        named = named or list(self.model.named_parameters())  # an optimizer must have some
        pairs: list[Any] = named if program.own == "names" else [p for _, p in named]
        size = -(-len(pairs) // program.groups)
        parts = [pairs[at : at + size] for at in range(0, len(pairs), size)]
        groups: list[dict[str, Any]] = [{"params": each} for each in parts]
        if program.own == "group key":
            groups[0] |= {"name": "first", "betas_of": (0.1, 0.2), "nothing": None}
        elif program.own == "group tensor":
            groups[0]["scale"] = torch.ones(2)
        lr: Any = torch.tensor(0.01) if program.optimizer == "tensor lr" else 0.01
        return {
            "sgd": lambda: torch.optim.SGD(groups, lr),
            "momentum": lambda: torch.optim.SGD(groups, lr, momentum=0.9),
            "adam": lambda: torch.optim.Adam(groups, lr),
            "amsgrad": lambda: torch.optim.AdamW(groups, lr, amsgrad=True),
            "rmsprop": lambda: torch.optim.RMSprop(groups, lr, centered=True),
            "adagrad": lambda: torch.optim.Adagrad(groups, lr),
            "tensor lr": lambda: torch.optim.Adam(groups, lr, foreach=False),
        }[program.optimizer]()

    def step(self) -> None:
        """A step with gradients that depend on the names alone."""
        unused = {layer.name for layer in self.program.layers if layer.how == "unused"}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and name.split(".")[0] not in unused:
                parameter.grad = torch.full_like(parameter, 0.1 * len(name))
        self.optimizer.step()
        parameters = self.optimizer.param_groups[0]["params"]
        state = self.optimizer.state
        if self.program.own == "state key":
            state[parameters[0]]["mine"] = (1, torch.ones(2))
        elif self.program.own == "shared state":
            shared = torch.ones(2)
            for each in parameters:
                state[each]["shared"] = shared
        for each in self.states.values():
            each.step()

    def state(self) -> dict[str, Any]:
        """All of its state: the tensors themselves."""
        states = {name: each.state_dict() for name, each in self.states.items()}
        optimizer = self.optimizer.state_dict()
        return {"model": dict(self.model.state_dict()), "optimizer": optimizer, "states": states}


@contextlib.contextmanager
def job_of(made: Made, folder: Path) -> Iterator[outlast.Job]:
    """A job of it that saves only when it is told to."""

    class Left(Exception):
        pass

    with contextlib.suppress(Left), outlast.Job(
        folder, model=made.model, optimizer=made.optimizer, states=made.states, every=None,
        signals=(), linger=0, random=False,
    ) as job:  # fmt: skip
        yield job
        raise Left  # without another save


def save_program(program: Program, folder: Path) -> str | None:
    """Trains and saves it, as a job and with torch; what is wrong."""
    made = Made(program, 0)
    try:
        with job_of(made, folder / "job") as job:
            job.restore()
            for _ in range(program.steps):
                made.step()
                job.step()
            job.save().result()
    except CheckpointUnsavable as e:
        return f"the job refused to save: {e}"
    torch.save(made.state(), folder / "plain")
    return None


def wrong_program(program: Program, changed: Program, what: str, folder: Path) -> str | None:
    """Restores what `save_program` has saved into a changed program; what is wrong."""
    plain, made = Made(changed, 1), Made(changed, 1)
    if changed.steps == 3:
        plain.step(), made.step()
    load_fails, step_fails = _resumed_by_torch(plain, io.BytesIO((folder / "plain").read_bytes()))
    try:
        with job_of(made, folder / "job") as job:
            job.restore()
    except CheckpointError as e:
        other_dtype = " was saved" in str(e) and "shape" not in str(e)  # never converted silently
        if not load_fails and not step_fails and not other_dtype:
            return f"with {what}, the job does not resume, and torch does: {e}"
        named = re.search(r"'[^']*'|parameter group \d|in the (state dict|checkpoint): \S", str(e))
        return None if named else f"with {what}, the job names no entry: {e}"
    except Exception as e:  # noqa: BLE001 - any may be raised
        return f"with {what}, the job raised {type(e).__name__}: {e}"
    if load_fails:
        return f"with {what}, the job resumes, and torch does not: {load_fails}"
    if step_fails and not program.steps:
        return None  # a job keeps no moments of an optimizer that has not stepped; nor can torch
    # A rate that is a tensor stays one, of 32 bits, and torch's load makes it a float.
    rounds = "tensor lr" in (program.optimizer, changed.optimizer)
    for moment in ("", *([] if step_fails or rounds else [" after a step"])):
        if moment:
            plain.step(), made.step()
        saved = Made(program, 0).optimizer.state_dict()
        one, other = (_numbers(each.state(), saved) for each in (plain, made))
        if wrong := difference(one, other, loose=True):
            return f"with {what}, silently{moment}, {wrong}"
    return None


def _resumed_by_torch(made: Made, file: io.BytesIO) -> tuple[str, str]:
    """Loads plainly; why that fails, and why a step after it does."""
    loaded = torch.load(file, weights_only=False)
    loaded["optimizer"] = _by_name(loaded["optimizer"], made.optimizer.state_dict())
    try:
        made.model.load_state_dict(loaded["model"])
        made.optimizer.load_state_dict(loaded["optimizer"])
        for name, each in made.states.items():
            if name in loaded["states"]:
                each.load_state_dict(loaded["states"][name])
    except Exception as e:  # noqa: BLE001 - any may be raised
        return f"{type(e).__name__}: {e}", ""
    other = Made(made.program, 1)
    other.model.load_state_dict(made.model.state_dict())
    other.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    try:
        other.step()
    except Exception as e:  # noqa: BLE001 - any may be raised
        return "", f"{type(e).__name__}: {e}"
    return "", ""


def _by_name(saved: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer in the present order of the names, which torch does not look at, if
    each group has the same names.
    """
    pairs = list(zip(saved["param_groups"], present["param_groups"], strict=False))
    names = [[each.get("param_names") or () for each in pair] for pair in pairs]
    if any(sorted(one) != sorted(other) or not one for one, other in names):
        return saved
    number = {
        name: now
        for _, new in pairs
        for name, now in zip(new["param_names"], new["params"], strict=True)
    }
    state = {
        number[name]: saved["state"][old]
        for group, _ in pairs
        for name, old in zip(group["param_names"], group["params"], strict=True)
        if old in saved["state"]
    }
    groups = [
        {**old, "params": new["params"], "param_names": new["param_names"]} for old, new in pairs
    ]
    return {**saved, "state": state, "param_groups": groups}


def _numbers(state: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The state without what a job keeps or converts on purpose: keys of groups that only the
    present program has (not the optimizer's state `saved`), and the type of a learning rate.
    """
    keys = {key for each in saved["param_groups"] for key in each}
    groups = state["optimizer"]["param_groups"]
    plain = [{k: v for k, v in each.items() if k in keys} for each in groups]
    for each in plain:
        for rate in {"lr", "initial_lr"} & each.keys():  # as of 32 bits
            each[rate] = torch.as_tensor(each[rate], dtype=torch.float32).item()
        each.pop("param_names", None)  # those of the present order
    states = {
        name: {**each, "_last_lr": [float(torch.as_tensor(x, dtype=torch.float32)) for x in last]}
        if (last := each.get("_last_lr"))
        else each
        for name, each in state["states"].items()
    }
    # torch makes what a parameter of 16 bits has in the optimizer 16 bits wide, too.
    moments = {
        number: {key: _wide(value) for key, value in each.items()}
        for number, each in state["optimizer"]["state"].items()
    }
    optimizer = {**state["optimizer"], "state": moments, "param_groups": plain}
    return {**state, "optimizer": optimizer, "states": states}


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    rounds = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.float32) if rounds else value


def program_cases(seed: int, folder: Path) -> tuple[int, list[str]]:
    """Saves the program of a seed, and restores it into three others."""
    program, r = make_program(seed), Random(f"changes/{seed}")
    folder.mkdir()
    if wrong := save_program(program, folder):
        return 1, [f"{wrong}\n    {program}"]
    tried, found = 1, list[str]()
    for changed, what in ((program, "no change"), change(program, r), change(program, r)):
        tried += 1
        if wrong := wrong_program(program, changed, what, folder):
            found.append(f"{wrong}\n    {program}\n    into {changed}")
    return tried, found
