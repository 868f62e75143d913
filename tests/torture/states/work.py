"""What the processes of `sides` do with a batch of cases: each returns what was tried, what was
saved, and what is wrong, by seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outlast.async_checkpoint import Checkpointer

from .judge import Case, wrong_restore, wrong_save
from .programs import program_cases

Found = tuple[int, set[int], dict[int, list[str]]]
"""How many saves and restores were tried; the seeds that were saved; what is wrong, by seed."""


def save(folder: Path, cases: Sequence[Case]) -> Found:
    """Saves each case, and restores it from memory."""
    tried, saved, wrong = 0, set[int](), dict[int, list[str]]()
    with Checkpointer(folder, linger=0, keep=None) as checkpointer:
        for number, case in enumerate(cases):
            step = 2 * number

            def save_one(state: Any, second: int, step: int = step) -> None:
                checkpointer.save(step + second, state).result()

            tried += 1
            is_saved, found = wrong_save(case, save_one)
            wrong.setdefault(case.seed, []).extend([found] if found else [])
            if not is_saved:
                continue
            saved.add(case.seed)
            for target in case.targets[:2]:
                tried += 1
                found = wrong_restore(
                    case,
                    target,
                    lambda state, step=step: checkpointer.restore(state, step=step + 1),
                )
                if found:
                    wrong[case.seed].append(f"from memory, {found}")
        with contextlib.suppress(Exception):  # of a save that was reported already
            checkpointer.wait()
    return tried, saved, {seed: texts for seed, texts in wrong.items() if texts}


def programs(folder: Path, seeds: Sequence[int]) -> Found:
    """Saves jobs, and restores changed ones."""
    tried, wrong = 0, dict[int, list[str]]()
    for seed in seeds:
        count, found = program_cases(seed, folder / str(seed))
        tried += count
        if found:
            wrong[seed] = found
    return tried, set(), wrong


def restore(folder: Path, cases: Sequence[Case]) -> Found:
    """Restores what `save` has saved of the same cases, in another process."""
    tried, wrong = 0, dict[int, list[str]]()
    with Checkpointer(folder, linger=0) as checkpointer:
        there = {each.step for each in checkpointer.checkpoints()}
        for number, case in enumerate(cases):
            step = 2 * number + 1
            if step not in there:
                continue
            for target in case.targets:
                tried += 1
                found = wrong_restore(
                    case, target, lambda state, step=step: checkpointer.restore(state, step=step)
                )
                if found:
                    wrong.setdefault(case.seed, []).append(f"from storage, {found}")
    return tried, set(), wrong
