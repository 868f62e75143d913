"""Ranks that behave differently. Every scenario's arguments: folder, plan."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RANK, join_group, leave_group, main, raising, say, scenario

from async_checkpoint.checkpoints import NET, blank, copy_of, folder_of, same, state_of
from async_checkpoint.staged_writer import Plan
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.restore.from_memory import MemorySnapshot
from outlast.async_checkpoint.save.saves import Saves
from outlast.async_checkpoint.state_dict import of_any_size
from outlast.async_checkpoint.storage import system_errors
from outlast.async_checkpoint.writer.client import ProcessFailed
from outlast.async_checkpoint.writer.main import Writer
from outlast.chaos.storage import flip_byte
from outlast.coordination.call_ledger import Round
from outlast.errors import CheckpointError, CheckpointReadError
from outlast.system.shared_memory import MemoryName

HOST = socket.gethostname()


def saves(checkpointer: Checkpointer, step: int, state: dict[str, Any]) -> None:
    checkpointer.save(step, state).wait(NET)


@scenario
def another_order(path: str, plan: str) -> None:
    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 0, state_of(0))
        raising(lambda: saves(checkpointer, 1 + RANK, state_of(1)))
        saves(checkpointer, 3, state_of(3))
    leave_group()


@scenario
def one_cannot_read(path: str, plan: str) -> None:
    """The last rank gets EACCES for the files of step 2, until they are readable again."""
    join_group()
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            saves(checkpointer, step, state_of(step))
    with Checkpointer(path) as checkpointer:  # without snapshots in memory
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_world_size() - 1 == RANK:
                patch.setattr(system_errors, "_pause", lambda seconds: None)
                refuse_to_open(patch, folder_of(Path(path), 2))
            with pytest.raises(CheckpointReadError, match=rf"rank 1 on {HOST}: .*EACCES") as caught:
                checkpointer.restore(blank(), step=2)
            assert "step-00000002" in str(caught.value)
        state = blank()
        assert checkpointer.restore(state) == 2
        assert same(state, state_of(2))
    leave_group()


@scenario
def one_cannot_be_saved(path: str, plan: str) -> None:
    """The last rank has a lambda, then a meta tensor."""
    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        for step, wrong in enumerate((lambda: 1, torch.empty(2, device="meta")), 2):
            own = {f"own{RANK}": wrong if RANK == 1 else torch.ones(1)}
            with pytest.raises(CheckpointError, match=r"'?own1'? ") as caught:
                saves(checkpointer, step, {**state_of(step), **own})
            assert RANK == 1 or f"rank 1 on {HOST}" in str(caught.value)
        saves(checkpointer, 4, state_of(4))
        assert [info.step for info in checkpointer.checkpoints()] == [1, 4]
    leave_group()


@scenario
def one_is_interrupted_before_its_snapshot(path: str, plan: str) -> None:
    """The last rank, while it waits for the copy of the save before; the next state is larger."""
    join_group()

    def interrupted(saves: Saves) -> None:
        raise KeyboardInterrupt

    timeout = datetime.timedelta(seconds=600)  # the other rank must not wait for so long
    with Checkpointer(path, timeout=timeout) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        if RANK == 1:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(Saves, "seal_all", interrupted)
                checkpointer.save(2, state_of(2, 6000))
        else:
            with pytest.raises(CheckpointError, match=rf"rank 1 on {HOST}: KeyboardInterrupt"):
                saves(checkpointer, 2, state_of(2, 6000))
        saves(checkpointer, 3, state_of(3))
        assert [info.step for info in checkpointer.checkpoints()] == [1, 3]
    leave_group()


def refuse_to_open(patch: pytest.MonkeyPatch, folder: Path) -> None:
    open_file = os.open

    def opened(name: Any, *args: Any, **kwargs: Any) -> int:
        if Path(os.fsdecode(name)).parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return open_file(name, *args, **kwargs)

    patch.setattr(os, "open", opened)


@scenario
def one_disk_hangs(path: str, plan: str) -> None:
    join_group()
    own = f"own{RANK}"
    stage = Plan(Path(plan)).use(pytest.MonkeyPatch()) if RANK == 1 else None
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, {**state_of(1), own: torch.ones(10)})
        dist.barrier()
        if stage is not None:
            stage.set({"op": "write_at", "do": "wait"})
            stage.gate()
            checkpointer.session.writer.timeout_s = 0.3
        raising(lambda: saves(checkpointer, 2, {**state_of(2), own: torch.ones(10)}))
        if stage is not None:
            stage.set()
            checkpointer.session.writer.timeout_s = 60.0
        saves(checkpointer, 3, {**state_of(3), own: torch.ones(10)})
    leave_group()


@scenario
def one_changes(path: str, plan: str) -> None:
    """A part that only rank 1 has appears, grows and disappears; the other ranks do not change."""
    join_group()
    with Checkpointer(path) as checkpointer:
        for step in range(1, 5):
            state = state_of(step)
            if RANK == 1 and step in (2, 3):
                state["own"] = torch.full((step * 10,), float(step))
                state["word"] = f"of {step}"
            handle = checkpointer.save(step, state)
            handle.wait(NET)
            expected, found = state, blank()
            if step in (2, 3) and RANK == 1:
                found.update(own=torch.zeros(step * 10), word="")
            assert checkpointer.restore(found) == step
            assert same(found, expected)
    with Checkpointer(path) as checkpointer:
        for step in range(1, 5):
            extra = {"own": torch.zeros(step * 10), "word": ""} if step in (2, 3) else {}
            found = {**blank(), **extra}
            assert checkpointer.restore(found, step=step) == step
            assert found.get("word", f"of {step}") == f"of {step}"
            assert same({k: v for k, v in found.items() if k not in extra}, state_of(step))
    leave_group()


@scenario
def one_changes_while_training_waits(path: str, plan: str) -> None:
    """No rank's snapshot can be sealed before rank 1 knows what it saves."""
    join_group()
    parameter = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = torch.optim.SGD([parameter], 0.1)
    with Checkpointer(path, overlap=optimizer) as checkpointer:
        for step in range(1, 4):
            parameter.grad = torch.full_like(parameter, -10.0)
            optimizer.step()
            state: dict[str, Any] = {"w": parameter.detach()}
            if RANK == 1 and step > 1:
                state["own"] = torch.full((step,), float(step))
            handle = checkpointer.save(step, state)
            dist.barrier()  # as in the next backward pass
            optimizer.step()
            handle.wait(NET)
            found = {"w": torch.zeros(10_000)}
            assert checkpointer.restore(found, step=step, optional=["own"]) == step
            assert same(found, {"w": torch.full((10_000,), 2.0 * step - 1)})
    leave_group()


@scenario
def unchanged(path: str, plan: str) -> None:
    """Prints how often a rank reports, and rank 0 collects, in a save of the same structure."""
    names = ("announce", "finish", "parts", "await_verdict", "await_conclusion", "forget")
    counts = dict.fromkeys(names, 0)
    patch = pytest.MonkeyPatch()

    def count(name: str) -> None:
        real = getattr(Round, name)

        def counted(*args: Any) -> Any:
            counts[name] += 1
            return real(*args)

        patch.setattr(Round, name, counted)

    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        dist.barrier()
        for name in counts:
            count(name)
        saves(checkpointer, 2, state_of(2))
        patch.undo()
    say("counted", **counts)
    leave_group()


@scenario
def goes_on(path: str, plan: str) -> None:
    """After each abort the next checkpointer restores and saves. Before the last one, rank 1 has
    forgotten what it saved, as a replacement has not saved anything. Prints the names of what the
    ranks agreed on in each restore.
    """
    join_group()
    own = {f"own{RANK}": torch.ones(10)}
    saved = {**state_of(1), **own}
    checkpointer, announce = Checkpointer(path), Round.announce
    saves(checkpointer, 1, saved)
    for step in (2, 3, 4):
        checkpointer.abort()
        if step == 4 and RANK == 1:
            checkpointer.session.memo._agreed = None
        checkpointer = Checkpointer(path)
        found = {**blank(), **copy_of(own)}
        with pytest.MonkeyPatch.context() as patch:
            names: list[str] = []

            def announced(self: Round, name: str, names: list[str] = names) -> None:
                names.append(name)
                announce(self, name)

            patch.setattr(Round, "announce", announced)
            assert checkpointer.restore(found) == step - 1
        assert same(found, saved)
        say("agreed", names=names)
        # From the third one on, rank 1 has another structure than before.
        more = {"more": torch.full((20,), 3.0)} if RANK == 1 and step > 2 else {}
        saved = {**state_of(step), **own, **more}
        saves(checkpointer, step, saved)
        own = {**own, **more}
    checkpointer.close()
    with Checkpointer(path) as checkpointer:
        for step in range(1, 5):
            checkpointer.verify(step)
    leave_group()


@scenario
def other_shapes(path: str, plan: str) -> None:
    join_group()
    with Checkpointer(path) as checkpointer:
        raising(lambda: saves(checkpointer, 1, {"x": torch.ones(1 + RANK)}))
        saves(checkpointer, 2, {"x": torch.ones(2)})
    leave_group()


@scenario
def one_cannot(path: str, plan: str) -> None:
    join_group()
    with Checkpointer(path) as checkpointer:
        own: Any = (lambda: None) if RANK == 1 else 0
        raising(lambda: saves(checkpointer, 1, {**state_of(1), f"own{RANK}": own}))
        key: Any = {1.5: 1} if RANK == 1 else {"one": 1}
        raising(lambda: saves(checkpointer, 2, {**state_of(1), "keys": key}))
        saves(checkpointer, 3, state_of(3))
    leave_group()


@scenario
def one_writer_is_killed(path: str, plan: str) -> None:
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        dist.barrier()
        if RANK == 0:
            Plan(Path(plan)).set({"op": "write_at", "name": "__1_*", "do": "kill"})
        dist.barrier()
        state = {**state_of(2), f"own{RANK}": torch.ones(10)}
        raising(lambda: saves(checkpointer, 2, state))
        dist.barrier()
        if RANK == 0:
            Plan(Path(plan)).set()
        dist.barrier()
        saves(checkpointer, 3, state)
    leave_group()


@scenario
def one_is_lost(path: str, plan: str) -> None:
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    join_group()
    checkpointer = Checkpointer(path, linger=datetime.timedelta())
    handle = checkpointer.save(1, {**state_of(1), f"own{RANK}": torch.ones(10)})
    say("saving")
    while not (Path(plan) / "lost").exists():
        time.sleep(0.01)
    try:
        handle.wait(datetime.timedelta(milliseconds=1))
    except TimeoutError:
        checkpointer.abort()
    raising(lambda: handle.wait(NET))


@scenario
def one_sees_damage(path: str, plan: str) -> None:
    """Each rank reads a separate part; that of rank 1 is damaged."""
    join_group()
    own = {f"own{RANK}": torch.zeros(2_000_000)}
    with Checkpointer(path) as checkpointer:
        for step in (1, 2):
            saves(checkpointer, step, {f"own{RANK}": torch.full((2_000_000,), float(step))})
    if RANK == 0:
        flip_byte(folder_of(Path(path), 2) / "__1_0.distcp", 6_000_000)
    dist.barrier()
    with Checkpointer(path) as checkpointer:
        state = copy_of(own)
        raising(lambda: checkpointer.restore(state))
        assert bool((state[f"own{RANK}"] == 1).all())
    leave_group()


@scenario
def one_has_no_room(path: str, plan: str) -> None:
    """Each rank has a part that all need; rank 1 has no memory to receive the other's part."""
    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        with pytest.MonkeyPatch.context() as patch:
            if RANK == 1:
                patch.setattr(MemoryName, "open", _refused)  # so the parts are sent
                patch.setattr(MemorySnapshot, "receive_buffers", _no_memory)
            raising(lambda: checkpointer.restore(blank()))
        found = blank()
        assert checkpointer.restore(found) == 1
        assert same(found, state_of(1))
    leave_group()


@scenario
def one_cannot_open_memory(path: str, plan: str) -> None:
    """Tensors are sent only if one rank may not read the memory of another."""
    join_group()
    pack = MemorySnapshot.pack
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        for refused in (False, True):
            packed: list[str] = []

            def watched(memory: Any, names: set[str], packed: list[str] = packed) -> Any:
                packed += names
                return pack(memory, names)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MemorySnapshot, "pack", watched)
                if refused and RANK == 1:
                    patch.setattr(MemoryName, "open", _refused)
                found = blank()
                assert checkpointer.restore(found) == 1
            assert checkpointer.restorer.restored_from == "memory"
            assert same(found, state_of(1))
            assert ("model.weight" in packed) == refused, packed
    leave_group()


@scenario
def restores_of_few_rounds(path: str, plan: str) -> None:
    """Says how many rounds of all ranks a restore takes, from memory and from storage; the latter
    with the one in which they agree on what their first save will be.
    """
    join_group()
    finish, taken = Round.finish, [0]

    def counted(*arguments: Any) -> None:
        taken[-1] += 1
        finish(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Round, "finish", counted)
        for saved in (True, False):
            with Checkpointer(path) as checkpointer:
                if saved:
                    saves(checkpointer, 1, state_of(1))
                taken.append(0)
                found = blank()
                assert checkpointer.restore(found, step=1) == 1  # not what opening has looked for
                assert same(found, state_of(1))
                taken.append(0)
                say("restored", source=checkpointer.restorer.restored_from, rounds=taken[-2])
    leave_group()


@scenario
def one_cannot_make_its_state(path: str, plan: str) -> None:
    """Rank 1's state dict cannot be made when the ranks agree on their first save: rank 0 does not
    wait for it, and their saves are in step afterwards.
    """

    def present() -> dict[str, Any]:
        if RANK == 1:
            raise RuntimeError("no state dict here")
        return state_of(1)

    join_group()
    with Checkpointer(path) as checkpointer:
        with pytest.raises(RuntimeError, match="here") if RANK == 1 else contextlib.nullcontext():
            checkpointer.saves.prepare(present)
        saves(checkpointer, 1, state_of(1))
        found = blank()
        assert checkpointer.restore(found) == 1
        assert same(found, state_of(1))
    leave_group()


@scenario
def values_are_told_or_sent(path: str, plan: str) -> None:
    """Few bytes of values are told with what a rank has; many are sent in a collective."""
    join_group()
    exchange = MemorySnapshot.exchange
    with Checkpointer(path) as checkpointer:
        for step, length in ((1, 10), (2, 300_000)):
            sent: list[str] = []

            def watched(*arguments: Any, sent: list[str] = sent) -> Any:
                sent += arguments[2]
                return exchange(*arguments)

            words = {f"word{number}": f"{number}" * length for number in range(4)}
            saves(checkpointer, step, {**state_of(step), **words})
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MemorySnapshot, "exchange", watched)
                found = blank() | dict.fromkeys(words, "")
                assert checkpointer.restore(found) == step
            assert checkpointer.restorer.restored_from == "memory"
            assert same(found, {**state_of(step), **words})
            lacked = checkpointer.ranks.exchange(len(sent))
            assert (sum(lacked) > 0) == (length > 10), lacked
    leave_group()


@scenario
def one_lacks_a_small_tensor(path: str, plan: str) -> None:
    """Rank 0 has saved it. One without elements has no bytes that could be sent; one of any size
    has that of rank 0.
    """
    join_group()
    own = f"own{RANK}"
    with Checkpointer(path) as checkpointer:
        for step, (saved, present) in enumerate(
            [(torch.ones(0, 2), torch.zeros(0, 2)), (torch.ones(3), of_any_size(torch.zeros(0)))]
        ):
            saves(checkpointer, step, {own: torch.ones(9), "small": saved})
            for refused in (False, True):
                found = {own: torch.zeros(9), "small": present}
                with pytest.MonkeyPatch.context() as patch:
                    if refused and RANK == 1:
                        patch.setattr(MemoryName, "open", _refused)
                    assert checkpointer.restore(found) == step
                assert checkpointer.restorer.restored_from == "memory"
                assert same(found, {own: torch.ones(9), "small": saved})
    leave_group()


def _refused(*_: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@scenario
def each_has_its_own(path: str, plan: str) -> None:
    """Ranks share nothing: a restore from memory sends nothing until one rank lacks something."""
    join_group()
    state = {f"own{RANK}": torch.full((1000,), float(RANK)), f"word{RANK}": f"of {RANK}"}
    blank = {f"own{RANK}": torch.zeros(1000), f"word{RANK}": ""}
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemorySnapshot, "index_for", _no_memory)
            found: dict[str, Any] = copy_of(blank)
            assert checkpointer.restore(found) == 1
            assert same(found, state)
        found = copy_of(blank) | ({"word0": ""} if RANK == 1 else {})
        assert checkpointer.restore(found) == 1
        assert same(found, state | ({"word0": "of 0"} if RANK == 1 else {}))
        found = copy_of(blank) | ({"more": 1} if RANK == 1 else {})
        raising(lambda: checkpointer.restore(found))
    leave_group()


def _no_memory(*_: object, **__: object) -> None:
    raise MemoryError("no memory for what is sent")


@scenario
def one_writer_does_not_answer(path: str, plan: str) -> None:
    """Rank 1's writer dies whenever it is asked for snapshots; storage has them too."""
    join_group()
    with Checkpointer(path) as checkpointer:
        saves(checkpointer, 1, state_of(1))
        writer = checkpointer.session.writer
        ask = writer.request

        def lost(method: Any, **arguments: Any) -> Any:
            if method is Writer.describe_snapshots:
                raise ProcessFailed("it is lost")
            return ask(method, **arguments)

        with pytest.MonkeyPatch.context() as patch:
            if RANK == 1:
                patch.setattr(writer, "request", lost)
            found = blank()
            assert checkpointer.restore(found) == 1
            assert same(found, state_of(1))
        say("restored")
    leave_group()


@scenario
def closes(path: str, plan: str) -> None:
    Plan(Path(plan)).use(pytest.MonkeyPatch())
    join_group()
    checkpointer = Checkpointer(path)
    checkpointer.save(1, {**state_of(1), f"own{RANK}": torch.ones(10)})
    dist.barrier()

    def close() -> None:
        try:
            checkpointer.close(datetime.timedelta(milliseconds=100))
        except CheckpointError:
            assert checkpointer.session.writer.pid is None
            raise

    raising(close)
    leave_group()


if __name__ == "__main__":
    main()
