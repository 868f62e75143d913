"""Buffers whose bytes in memory are those of their conjugate or negative come back bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import outlast
from outlast.elastic.silent_faults.digests import flat_bytes
from outlast.elastic.tensors import bytes_of

VALUES = torch.tensor([0.0, -0.0, 1.5, -2.0, float("nan"), float("-inf")])
VIEWS = {
    "conjugate": lambda: torch.complex(VALUES, VALUES.flip(0)).conj(),
    "negative": lambda: torch._neg_view(VALUES.clone()),
    "strided": lambda: torch.complex(VALUES, VALUES.flip(0)).conj().imag,
}


@pytest.mark.parametrize("kind", VIEWS)
def test_the_bytes_are_those_of_the_values(kind: str) -> None:
    view = VIEWS[kind]()
    expected = bytes_of(view.clone().resolve_conj().resolve_neg())
    assert torch.equal(bytes_of(view), expected)
    assert torch.equal(flat_bytes(view), expected)


@pytest.mark.parametrize("kind", VIEWS)
def test_a_job_restores_them(tmp_path: Path, kind: str) -> None:
    def run(end: int) -> torch.Tensor:
        model = nn.Linear(1, 1)
        model.register_buffer("view", VIEWS[kind]())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"signals": (), "checks": outlast.ReplicaCheck(every=1)}
        with outlast.Job(tmp_path, model=model, optimizer=optimizer, **options) as job:
            job.restore()
            while job.steps < end:
                with torch.no_grad():
                    model.view.mul_(2)
                job.step()
        assert model.view.is_conj() or model.view.is_neg()
        return bytes_of(model.view)

    trained = run(3)
    assert torch.equal(run(3), trained)
    assert not torch.equal(run(4), trained)
