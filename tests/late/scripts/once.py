"""One process on the device `late`: `python once.py SCENARIO`, which asserts what must hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from late import device
from outlast.async_checkpoint import Checkpointer

LATE = device.use()


def a_copy_needs_its_event() -> None:
    for waits in (False, True):
        with device.held():
            source = torch.full((4,), 5.0).pin_memory().to("late", non_blocking=True)
            ready, stream, target = torch.Event("late"), torch.Stream("late"), torch.zeros(4)
            ready.record()
            if waits:
                stream.wait_event(ready)
            with stream:
                target.copy_(source, non_blocking=True)
            if not waits:
                stream.synchronize()
        stream.synchronize()
        assert torch.equal(target, torch.full((4,), 5.0 if waits else 0.0))


def a_training_is_that_of_the_cpu() -> None:
    LATE.set_delays(3, 300)
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        assert all(map(torch.equal, _trained("cpu", options), _trained("late", options)))


def _trained(kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer = _model(kind, options)
    for step in range(5):
        _step(model, optimizer, step)
    return [each.detach().cpu() for each in model.parameters()]


def _model(kind: str, options: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 4)).to(kind)
    return model, torch.optim.Adam(model.parameters(), **options)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    where = next(model.parameters()).device
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(where)
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def saves() -> None:
    """Each save has the state of its moment, although the device comes to it later."""
    LATE.set_delays(5, 500)
    for overlaps in (False, True):
        model, optimizer = _model("late", {"fused": True})
        path = f"{sys.argv[2]}/{overlaps}"
        with Checkpointer(path, overlap=optimizer if overlaps else False, keep=10) as checkpointer:
            there = []
            for step in range(1, 5):
                _step(model, optimizer, step)
                handle = checkpointer.save(
                    step, {"m": model.state_dict(), "o": optimizer.state_dict()}
                )
                _step(model, optimizer, 100 + step)
                handle.wait()
                there.append(step)
            for step in there:
                fresh, adam = _model("late", {"fused": True})
                state = {"m": fresh.state_dict(), "o": adam.state_dict()}
                wanted, theirs = _model("late", {"fused": True})
                for made in range(1, step):
                    _step(wanted, theirs, made)
                    _step(wanted, theirs, 100 + made)
                _step(wanted, theirs, step)
                checkpointer.restore(state, step=step)
                fresh.load_state_dict(state["m"])
                pairs = zip(fresh.parameters(), wanted.parameters(), strict=True)
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs), (overlaps, step)


globals()[sys.argv[1]]()
print('{"event": "passed"}')
