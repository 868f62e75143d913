"""The generated programs: they cover all pairs of choices, a sample goes through its faults as it
must, and a program that forgets a part of its state is found.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torture.programs import compare
from torture.programs.covering import complete, covered, pairs, programs
from torture.programs.parts import PARTS, Program
from torture.programs.running import run
from torture.programs.source import source
from torture.runner import run_trial

pytestmark = pytest.mark.slow

PLAIN: Program = {part: choices[0] for part, choices in PARTS.items()}


def test_the_programs_cover_all_pairs() -> None:
    found = programs()
    assert not pairs().difference(*map(covered, found))
    for program in found:
        compile(source(program), "program.py", "exec")


def test_a_choice_that_does_not_fit_is_not_made() -> None:
    given = [("loop", "plain"), ("data", "distributed")]
    assert complete(given, random.Random(0), set()) is None


# Different in most choices; the others are in `make torture ONLY=programs`.
@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, 7, 13])
@pytest.mark.timeout(1500)
def test_a_program_ends_as_without_faults(seed: int) -> None:
    report = run_trial("programs", seed, 60.0, most=3)
    assert not report.violations, "\n".join(report.violations[:5])
    assert report.tried


@pytest.mark.timeout(1500)
@pytest.mark.exhaustive
def test_a_state_that_is_forgotten_is_found(tmp_path: Path) -> None:
    program = {**PLAIN, "evaluation": "after_steps", "best": "states", "log": "each_epoch"}
    text = source(program)
    forgets = text.replace("sums = states['sums'] = kit", "sums = kit")
    assert forgets != text
    undisturbed = run(text, 2, tmp_path / "undisturbed", [], [])
    assert not compare.wrong_undisturbed(undisturbed)
    faults = [{"kind": "kill", "phase": "top", "step": 5, "rank": 1}]
    same = run(text, 2, tmp_path / "same", faults, [])
    assert not compare.differences(same, undisturbed, program)
    assert same.fired == 1
    other = run(forgets, 2, tmp_path / "other", faults, [])
    assert any(
        "row 1 of the log" in each for each in compare.differences(other, undisturbed, program)
    )
