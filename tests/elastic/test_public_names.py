"""The exported names exist, and an import has no side effects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outlast import elastic

SPEC = {
    "State",
    "checkpoint_path",
    "from_ray",
    "load_state",
    "num_replicas",
    "num_restarts",
    "replica_rank",
    "save_all_states",
    "save_state",
}


def test_the_names_of_the_room() -> None:
    assert set(elastic.__all__) >= SPEC
    for name in elastic.__all__:
        assert getattr(elastic, name).__name__ == name
    assert set(dir(elastic)) >= set(elastic.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = elastic.nothing


def test_an_import_starts_nothing() -> None:
    code = (
        "import logging, signal, sys, threading\n"
        "before = [signal.getsignal(n) for n in signal.valid_signals()]\n"
        "import outlast.elastic as room\n"
        "assert 'torch' not in sys.modules\n"
        "for name in room.__all__: getattr(room, name)\n"
        "assert 'ray' not in sys.modules\n"
        "assert [signal.getsignal(n) for n in signal.valid_signals()] == before\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers\n"
        "assert not logging.getLogger('outlast').handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
