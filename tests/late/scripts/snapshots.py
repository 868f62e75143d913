"""Snapshots and restores on the device `late`: `python snapshots.py SCENARIO FOLDER`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from late import device, scenario
from late.scenario import released_when_blocked, until_blocked, when_blocked
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot import device_copy

LATE = device.use()
PATH = sys.argv[2]


def parameters(count: int = 4096) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """One on each device, both zero."""
    made = [nn.Parameter(torch.zeros(count, device=f"late:{i}")) for i in range(2)]
    torch.accelerator.synchronize(0)
    torch.accelerator.synchronize(1)
    return made, torch.optim.SGD(made, lr=1.0)


def add(tensors: list[nn.Parameter], value: float) -> None:
    with torch.no_grad():
        for each in tensors:
            each.add_(value)


def restored(path: str, step: int | None = None, count: int = 4096) -> list[torch.Tensor]:
    """The saved parameters, read from the files."""
    state = {"p": [torch.full((count,), 9.0) for _ in range(2)]}
    with Checkpointer(path) as checkpointer:
        checkpointer.restore(state, step=step)
    return state["p"]


def check_ones(path: str, step: int | None = None) -> None:
    assert all(torch.equal(each, torch.ones(4096)) for each in restored(path, step))


def an_eager_save_waits_for_the_devices() -> None:
    both, _ = parameters()
    with Checkpointer(PATH) as checkpointer:
        with device.held(0) as first, device.held(1) as second:
            add(both, 1)
            with released_when_blocked("wait_for", first, second):
                handle = checkpointer.save(1, {"p": both})
            assert first.is_released()
        add(both, 1)
        handle.wait()
    check_ones(PATH)


def an_eager_save_has_views_of_any_layout() -> None:
    LATE.set_delays(7, 2000)
    whole = torch.arange(48.0).reshape(6, 8)

    def views(of: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"t": of.t(), "rows": of[::2, 1:], "half": of.half(), "one": of[2, 3], "no": of[:0]}

    on_device = whole.to("late:1")
    on_device.add_(1)
    state = {"late": views(on_device), "cpu": views(whole)}
    with Checkpointer(PATH) as checkpointer:
        checkpointer.save(1, state).wait()
        on_device.zero_()
        checkpointer.restore(state)
    for name, expected in views(whole + 1).items():
        assert torch.equal(state["late"][name].cpu(), expected), name


class Interrupted(Exception):
    pass


def an_interrupted_copy_has_ended_before_its_buffer_is_used_again() -> None:
    def interrupt(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGUSR1, interrupt)
    both, _ = parameters()
    with Checkpointer(PATH) as checkpointer, device.held(0) as first, device.held(1) as second:
        try:
            # In its wait for the first device.
            with when_blocked(
                "wait_for",
                lambda: os.kill(os.getpid(), signal.SIGUSR1),
                first.release,
                lambda: until_blocked("call_off"),
                second.release,
            ):
                checkpointer.save(1, {"p": both})
        except Interrupted:
            assert second.is_released()
        else:
            raise AssertionError("it was not interrupted")
        checkpointer.abort()


def a_copy_that_is_called_off_has_ended() -> None:
    device_copy._GROUP_BYTES = 1  # a group for each device
    both, optimizer = parameters()
    checkpointer = Checkpointer(PATH, overlap=optimizer)
    with device.held(0) as first, device.held(1) as second:
        checkpointer.save(1, {"p": both})
        until_blocked("fill")  # for the first device
        with (
            when_blocked("_await_copy", first.release),
            released_when_blocked("settle", second),
        ):
            checkpointer.abort()
        assert first.is_released()
        assert second.is_released()


def copies_during_training_have_the_state_of_the_save() -> None:
    """They come after what was queued before, and do not wait for what is queued later."""
    device_copy._GROUP_BYTES = 1
    for number in (0, 1):
        both, _ = parameters()
        targets = [torch.full((4096,), 9.0) for _ in both]
        with torch.no_grad(), device.held(number) as earlier:
            both[number].add_(1)
            chunks = device_copy.DeviceChunks(list(zip(both, targets, strict=True)))
            with device.held(number):  # the training goes on
                LATE.settle()
                for each in range(2):
                    with released_when_blocked("fill", earlier):
                        chunks.fill(each)
                    LATE.settle()
                    assert torch.equal(targets[each], torch.full((4096,), float(each == number)))
                assert torch.accelerator.current_device_index() == 0
                chunks.settle()


def a_group_is_there_when_it_is_said_to_be() -> None:
    both, _ = parameters()
    targets = [torch.full((4096,), 9.0) for _ in both]
    with device.held(0) as first, device.held(1) as second:
        chunks = device_copy.DeviceChunks(list(zip(both, targets, strict=True)))
        with released_when_blocked("wait_for", first, second):
            chunks.fill(0)
        assert all(torch.equal(each, torch.zeros(4096)) for each in targets)


def an_optimizer_waits_for_the_copies_of_a_save() -> None:
    """The copies have not begun when the step is called; the training uses two more streams."""
    both, optimizer = parameters()
    others = [torch.Stream("late:0"), torch.Stream("late:1")]
    with Checkpointer(PATH, overlap=optimizer) as checkpointer:
        for step in (1, 2):
            add(both, 1)
            with device.held(0) as first, device.held(1) as second:
                handle = checkpointer.save(step, {"p": both})
                for each, stream in zip(both, others, strict=True):
                    with stream:
                        each.grad = torch.full_like(each, 1.0)
                for stream in others:
                    stream.synchronize()
                with released_when_blocked("_await_copy", first, second):
                    optimizer.step()
                assert first.is_released()
            handle.wait()
            add(both, step)
    for step in (1, 2):
        expected = torch.full((4096,), float(step))
        assert all(torch.equal(each, expected) for each in restored(PATH, step)), step


def a_save_on_a_stream_of_its_own() -> None:
    both, optimizer = parameters()
    for overlap in (False, optimizer):
        path = f"{PATH}/{bool(overlap)}"
        with Checkpointer(path, overlap=overlap) as checkpointer, torch.Stream("late:0"):
            with device.held(0) as gate:
                with torch.no_grad():
                    both[0].fill_(1)
                    both[1].fill_(1)
                with released_when_blocked("wait_for", gate):
                    handle = checkpointer.save(1, {"p": both})
                    checkpointer.wait() if overlap is False else optimizer.step()
                assert gate.is_released()
            handle.wait()
        torch.accelerator.synchronize(0)
        check_ones(path)


def tensors_that_are_freed_after_the_save() -> None:
    both, optimizer = parameters()
    add(both, 1)
    checkpointer = Checkpointer(PATH, overlap=optimizer)
    with checkpointer:
        with device.held(0), device.held(1):
            handle = checkpointer.save(1, {"p": both})
            optimizer.param_groups.clear()
            both.clear()
        new = [torch.full((4096,), 7.0, device=f"late:{i % 2}") for i in range(8)]
        LATE.settle()
        checkpointer.wait() if handle.done() else checkpointer.save(2, {"p": new[:2]}).wait()
    check_ones(PATH, 1)


def a_save_of_pinned_memory() -> None:
    both, _ = parameters()
    add(both, 1)
    pinned = [each.detach().to("cpu").pin_memory() for each in both]
    with Checkpointer(PATH) as checkpointer:
        checkpointer.save(1, {"p": pinned}).wait()
        for each in pinned:
            each.zero_()
        state = {"p": pinned}
        addresses = [each.data_ptr() for each in pinned]
        checkpointer.restore(state)
        assert [each.data_ptr() for each in state["p"]] == addresses
        assert all(each.is_pinned("late") for each in state["p"])
    check_ones(PATH)


def a_restore_into_the_tensors_of_two_devices() -> None:
    LATE.set_delays(11, 1000)
    both, optimizer = parameters()
    add(both, 1)
    for source in ("memory", "files"):
        checkpointer = Checkpointer(f"{PATH}/{source}", overlap=optimizer)
        checkpointer.save(1, {"p": both, "o": optimizer.state_dict()}).wait()
        if source == "files":
            checkpointer.close()
            checkpointer = Checkpointer(f"{PATH}/{source}")
        addresses = [each.data_ptr() for each in both]
        for i, stream in enumerate((torch.Stream("late:0"), torch.Stream("late:1"))):
            with stream:  # behind what the streams of the training have to do
                add(both, 5 + i)
                state: dict[str, Any] = {"p": both, "o": optimizer.state_dict()}
                checkpointer.restore(state)
                assert [each.data_ptr() for each in state["p"]] == addresses
                assert [each.device.index for each in state["p"]] == [0, 1]
                assert all(torch.equal(each.cpu(), torch.ones(4096)) for each in state["p"])
        checkpointer.close()


scenario.run(globals())
