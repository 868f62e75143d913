"""The heap is frozen during a call, and afterwards frozen only if the program froze it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from outlast.inprocess.recovery.frozen_heap import frozen_heap


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Undoes the freeze of the test process during a test."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if frozen:
        gc.collect()
        gc.freeze()


class Node:
    """A part of a reference cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_the_heap_is_frozen_during_the_call_and_garbage_is_not() -> None:
    garbage = weakref.ref(Node())
    with frozen_heap():
        assert gc.get_freeze_count() > 0
        assert garbage() is None
    assert gc.get_freeze_count() == 0


def test_it_is_undone_when_the_call_raises() -> None:
    with pytest.raises(ValueError, match="mine"), frozen_heap():
        raise ValueError("mine")
    assert gc.get_freeze_count() == 0


def test_a_heap_that_the_program_froze_before_stays_frozen() -> None:
    gc.freeze()
    with frozen_heap():
        pass
    assert gc.get_freeze_count() > 0


def test_objects_that_the_program_froze_meanwhile_stay_frozen() -> None:
    with frozen_heap():
        kept = [[] for _ in range(1_000)]  # type: ignore[var-annotated]
        gc.freeze()
    assert gc.get_freeze_count() > 0
    assert kept
