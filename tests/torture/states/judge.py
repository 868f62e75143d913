"""What a save and a restore of a case must do, and what is wrong if they do something else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from random import Random
from typing import Any

from outlast.errors import CheckpointError, OutlastError

from .cases import NO, YES, Builder, Node, dense, make_spec, name, savable, text, walk
from .changes import change
from .compare import difference, other_shape


@dataclasses.dataclass(frozen=True)
class Target:
    """What a case is restored into; `harmless` if that must be accepted."""

    spec: Node
    harmless: bool = True
    what: str = ""


@dataclasses.dataclass(frozen=True)
class Case:
    """A state and its targets. If it is saved `twice`, a state of plain tensors is saved first."""

    seed: int
    spec: Node
    targets: tuple[Target, ...]
    twice: bool = False

    def __str__(self) -> str:
        twice = "; after a state of plain tensors" if self.twice else ""
        into = "".join(f"\n      into {text(t.spec)} ({t.what})" for t in self.targets if t.what)
        return f"seed {self.seed}: {text(self.spec)}{twice}{into}"


def make_case(seed: int) -> Case:
    """The case of a seed."""
    spec, r = make_spec(seed), Random(f"case/{seed}")
    changed = (Target(*change(spec, r)) for _ in range(r.choice((1, 2, 3))))
    targets = (Target(spec), *(each for each in changed if each.what != "no change"))
    return Case(seed, spec, targets, twice=r.random() < 0.15)


def names(message: str, specs: list[Node]) -> bool:
    """Whether a message names a part of one of the states, or a key of it."""
    found = set()
    for spec in specs:
        for path, _ in walk(spec):
            found |= {name(path), repr(path[-1])} if path else set()
    found.add("the state dict")
    spelled = "|".join(re.escape(each) for each in found if each)
    quoted = "|".join(re.escape(repr(each)[1:-1]) for each in found if each)
    empty = "''" in message and "" in found
    return empty or bool(re.search(rf"(['\"]|: |, |\[)({spelled}|{quoted})|the key ", message))


def wrong_save(case: Case, save: Callable[[Any, int], None]) -> tuple[bool, str | None]:
    """Saves a case with `save(state, number)`; whether it is saved, and what is wrong."""
    state = Builder(0).build(case.spec)
    if case.twice:
        try:
            save(dense(Builder(2).build(case.spec)), 0)
        except CheckpointError:
            pass
        except Exception as e:  # noqa: BLE001 - any may be raised
            return False, f"the first save raised {_text(e)}"
    must = savable(case.spec)
    try:
        save(state, 1)
    except CheckpointError as e:  # of another rank, it is no `CheckpointUnsavable`
        if must == YES:
            return False, f"the save refused what it must accept: {e}"
        return False, None if names(str(e), [case.spec]) else f"a save names no entry: {e}"
    except Exception as e:  # noqa: BLE001 - any may be raised
        return False, f"the save raised {_text(e)}"
    if must == NO:
        return True, "the save accepted what it must refuse"
    wrong = difference(Builder(0).build(case.spec), state, loose=False)
    return True, f"the save has changed the state: {wrong}" if wrong else None


def wrong_restore(case: Case, target: Target, restore: Callable[[Any], Any]) -> str | None:
    """Restores a case into a target with `restore(state)`; what is wrong."""
    state = Builder(1).build(target.spec)
    before = f"into a target where {target.what}: " if target.what else ""
    try:
        found = restore(state)
    except OutlastError as e:
        if target.harmless:
            return f"{before}the restore refused what it must accept: {_text(e)}"
        if not isinstance(e, CheckpointError) or not names(str(e), [case.spec, target.spec]):
            return f"{before}the restore names no entry: {_text(e)}"
        return None
    except Exception as e:  # noqa: BLE001 - any may be raised
        return f"{before}the restore raised {_text(e)}"
    if found is None:
        return f"{before}the restore found no checkpoint"
    saved = Builder(0).build(case.spec)
    wrong = difference(saved, state, loose=bool(target.what))
    if not wrong and target.what == "(): emptied":
        wrong = other_shape(saved, state)
    return f"{before}silently, {wrong}" if wrong else None


def _text(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"
