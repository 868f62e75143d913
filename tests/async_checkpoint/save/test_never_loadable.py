"""What no restore could load is not committed, and does not count as a checkpoint that is kept."""

from __future__ import annotations

import enum
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess.mutations import mutate
from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.snapshot import plan
from outlast.errors import CheckpointError, CheckpointMismatch, CheckpointUnsavable


class Text(str, enum.Enum):
    A = "a"


class Number(int, enum.Enum):
    A = 1


class Own(str):
    def __str__(self) -> str:
        return f"<{super().__str__()}>"


class Plain(enum.IntEnum):
    A = 1
    __str__ = int.__repr__  # as Python has it since 3.11


PLAIN = [Plain.A, "a", 3]


def state(value: float = 0.0) -> dict[str, Any]:
    return {"x": torch.full((10,), value)}


@pytest.mark.parametrize("key", [Text.A, Number.A, Own("q")])
def test_keys_whose_text_is_not_their_value(
    tmp_path: Path, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"x": {key: torch.ones(2)}}
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointUnsavable, match=r"'x' has the key .* whose text .* is not"):
            checkpointer.save(1, bad)
        checkpointer.save(2, state()).result()
    # Whatever else a reader would refuse: its own check is made before the commit.
    mutate(monkeypatch, plan._check_keys, "str(key) != plain", "False")
    with Checkpointer(tmp_path / "unchecked") as checkpointer:
        handle = checkpointer.save(1, bad)
        with pytest.raises(CheckpointError, match=r"could not commit it: .*'x.* of another name"):
            handle.result()
        assert checkpointer.checkpoints() == []


@pytest.mark.parametrize("key", PLAIN)
def test_keys_whose_text_is_their_value(tmp_path: Path, key: Any) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": {key: torch.ones(2)}}).result()
    target = {"x": {key: torch.zeros(2)}}
    with Checkpointer(tmp_path, linger=0) as checkpointer:
        assert checkpointer.restore(target) == 1
    assert torch.equal(target["x"][key], torch.ones(2))


def test_a_damaged_checkpoint_is_not_one_that_is_kept(tmp_path: Path) -> None:
    """Step 2 lost a file: with `keep=2`, step 1 stays until two others can be restored."""
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result()
        (tmp_path / "step-00000002" / "__0_0.distcp").unlink()
        checkpointer.save(3, state(3)).result()
    assert {path.name for path in tmp_path.glob("step-*")} >= {"step-00000001", "step-00000003"}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (4, 5):
            checkpointer.save(step, state(step)).result()
    found = {path.name for path in tmp_path.glob("step-*")}
    assert found == {"step-00000004", "step-00000005"}


@pytest.mark.parametrize("how", ["moved", "replaced", "removed"])
def test_a_folder_that_is_not_the_locked_one(tmp_path: Path, how: str) -> None:
    folder, away = tmp_path / "c", tmp_path / "away"
    with Checkpointer(folder, linger=0) as checkpointer:
        checkpointer.save(1, state(1)).result()
        if how == "removed":
            shutil.rmtree(folder)
        else:
            folder.rename(away)
        if how == "replaced":  # as by another job
            folder.mkdir()
            (folder / ".lock").touch()
        handle = checkpointer.save(2, state(2))
        why = (
            "is not the folder that this job has locked" if how == "replaced" else "is gone: it was"
        )
        with pytest.raises(CheckpointError, match=why):
            handle.result()
    assert not (folder / "step-00000002").exists()
    if how != "removed":
        assert (away / "step-00000001").exists()


def test_the_lock_is_for_the_group_if_the_umask_says_so(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        with Checkpointer(tmp_path, linger=0) as checkpointer:
            checkpointer.save(1, state()).result()
    finally:
        os.umask(before)
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o664


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED: dict[str, tuple[dict[Any, Any], str]] = {
    "no text and no number": ({2.5: torch.ones(1)}, r"state_dict\['x'\] has the key 2.5"),
    "a flag": ({True: torch.ones(1)}, r"state_dict\['x'\] has the key True"),
    "one name": ({1: torch.ones(1), "1": torch.ones(1)}, r"'x\.1' is the name of two entries"),
    "three bits": ({"w": torch.ones(4).byte().view(torch.uint3)}, r"'x\.w' is uint3, which"),
    "freed": ({"w": freed()}, r"'x\.w' has no data: its storage was freed"),
    "freed, in a tuple": ({"w": (1, [freed()])}, r"'x\.w\[1\]\[0\]' cannot be saved: a tensor wh"),
    "many digits": ({"w": 2**20_000}, r"'x\.w' cannot be saved: an integer of 20001 bits"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_saved_is_named(tmp_path: Path, what: str) -> None:
    bad, message = REFUSED[what]
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointUnsavable, match=message):
            checkpointer.save(1, {"x": bad})
        checkpointer.save(2, state()).result()


def test_memory_that_is_freed_between_two_saves(tmp_path: Path) -> None:
    saved = {"x": torch.ones(8)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved).result()
        saved["x"].untyped_storage().resize_(0)
        with pytest.raises(CheckpointUnsavable, match="'x' has no data"):
            checkpointer.save(2, saved)


@pytest.mark.parametrize("what", ["a key", "freed", "meta"])
def test_a_target_that_cannot_be_filled_is_named(tmp_path: Path, what: str) -> None:
    """Not as damage of the checkpoint."""
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": torch.ones(8)}).result()
        target: dict[Any, Any] = {"x": freed() if what == "freed" else torch.ones(8, device="meta")}
        target = {"x": {2.5: torch.ones(8)}} if what == "a key" else target
        with pytest.raises(CheckpointMismatch, match="'x'"):
            checkpointer.restore(target)


@pytest.mark.parametrize("inner", [{}, {"a": torch.ones(1)}])
def test_a_dict_under_a_number_next_to_a_tensor_under_its_text(
    tmp_path: Path, inner: dict[str, torch.Tensor]
) -> None:
    text = "'x.1' is the name of two entries"
    for state in ({"1": torch.ones(2), 1: inner}, {1: inner, "1": torch.ones(2)}):
        with Checkpointer(tmp_path) as saver, pytest.raises(CheckpointUnsavable, match=text):
            saver.save(1, {"x": state})


def test_a_parameter_that_is_not_initialized_is_refused_by_name(tmp_path: Path) -> None:
    state = {"m": torch.nn.LazyLinear(2).state_dict()}
    text = r"'m\.weight' is an uninitialized parameter"
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointUnsavable, match=text):
        checkpointer.save(1, state)
