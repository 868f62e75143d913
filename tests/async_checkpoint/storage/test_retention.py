"""Which checkpoints are kept, for any rules and any checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.async_checkpoint.policies import Retention
from outlast.async_checkpoint.storage.directory import CheckpointInfo

counts = st.none() | st.integers(1, 8)
metrics = st.none() | st.floats(allow_nan=False) | st.sampled_from([0.0, 1.0])
rules = st.builds(
    Retention, last=counts, every=counts, best=counts, mode=st.sampled_from(["max", "min"])
)


def info(step: int, metric: float | None = None) -> CheckpointInfo:
    return CheckpointInfo(step, f"step-{step:08d}", 10, 1, metric, 1)


checkpoints = st.dictionaries(st.integers(0, 60), metrics, max_size=20).map(
    lambda found: [info(step, metric) for step, metric in found.items()]
)


def steps(infos: list[CheckpointInfo]) -> list[int]:
    return [one.step for one in infos]


@given(rules, checkpoints, st.data())
def test_what_any_rule_keeps_stays(
    keep: Retention, found: list[CheckpointInfo], data: st.DataObject
) -> None:
    committed = data.draw(st.sampled_from(steps(found)) if found else st.just(5))
    removable = keep.removable(found, committed)
    gone = set(steps(removable))
    stays = [one for one in found if one.step not in gone]

    assert all(one in found for one in removable)
    assert steps(removable) == sorted(gone)
    assert committed not in gone
    if found:
        assert stays
    if keep.last is not None:
        assert gone.isdisjoint(sorted(steps(found))[-keep.last :])
    if keep.every is not None:
        assert all(step % keep.every for step in gone)
    if keep.best is not None:
        sign = 1 if keep.mode == "max" else -1
        rated = [one.metric * sign for one in found if one.metric is not None]
        for one in removable:
            if one.metric is not None:
                # At least `best` others are as good.
                assert sum(other >= one.metric * sign for other in rated) > keep.best


@given(rules, checkpoints, st.data())
def test_no_more_stays_than_the_rules_say(
    keep: Retention, found: list[CheckpointInfo], data: st.DataObject
) -> None:
    committed = data.draw(st.sampled_from(steps(found)) if found else st.just(5))
    gone = set(steps(keep.removable(found, committed)))
    by_every = {step for step in steps(found) if keep.every and step % keep.every == 0}
    others = set(steps(found)) - gone - by_every - {committed}
    if keep.last or keep.every or keep.best:
        assert len(others) <= (keep.last or 0) + (keep.best or 0)
    else:
        assert not gone


@given(rules, checkpoints, st.data())
def test_a_second_look_finds_nothing_more(
    keep: Retention, found: list[CheckpointInfo], data: st.DataObject
) -> None:
    committed = data.draw(st.sampled_from(steps(found)) if found else st.just(5))
    gone = keep.removable(found, committed)
    assert keep.removable([one for one in found if one not in gone], committed) == []


@given(rules, checkpoints)
def test_nothing_goes_if_the_committed_one_is_not_seen(
    keep: Retention, found: list[CheckpointInfo]
) -> None:
    assert keep.removable(found, committed=99) == []


@given(rules, checkpoints, st.data())
def test_the_newest_finite_checkpoint_stays(
    keep: Retention, found: list[CheckpointInfo], data: st.DataObject
) -> None:
    marks = st.sampled_from([True, False, None])
    found = [dataclasses.replace(one, finite=data.draw(marks)) for one in found]
    committed = data.draw(st.sampled_from(steps(found)) if found else st.just(5))
    removable = keep.removable(found, committed)
    finite = [one.step for one in found if one.finite]
    assert not finite or max(finite) not in steps(removable)
    # Without one, those that may be finite are worth more than one that is not.
    maybe = [one.step for one in found if one.finite is None]
    if not finite and maybe and committed not in maybe:
        assert max(maybe) not in steps(removable)
    assert keep.removable([one for one in found if one not in removable], committed) == []


def test_rules_add_up() -> None:
    found = [info(step, metric) for step, metric in enumerate([0.5, 0.9, 0.1, None, 0.7, 0.2])]
    assert steps(Retention().removable(found, 5)) == []
    assert steps(Retention(last=2).removable(found, 5)) == [0, 1, 2, 3]
    assert steps(Retention(last=1, every=2).removable(found, 5)) == [1, 3]
    assert steps(Retention(best=2).removable(found, 5)) == [0, 2, 3]
    assert steps(Retention(best=1, mode="min").removable(found, 5)) == [0, 1, 3, 4]


def test_a_metric_that_is_no_number_is_not_the_best() -> None:
    found = [info(1, float("nan")), info(2, 0.5), info(3, float("nan")), info(4, 0.1)]
    for mode in ("max", "min"):
        keep = Retention(best=2, mode=mode)
        assert {1, 3} <= set(steps(keep.removable(found, 4))) | {4}


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every": -1}, {"best": True}, {"mode": "most"}])
def test_rules_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        Retention(**wrong)
