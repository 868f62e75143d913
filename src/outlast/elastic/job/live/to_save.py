"""What each rank saves of a frozen state, for a checkpoint of all ranks: before a job ends, and for
ranks of another number, which continue from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from outlast.async_checkpoint import Checkpointer
from outlast.coordination.agreement import Agreement
from outlast.elastic.job.encoding import load_plain, unpacked
from outlast.elastic.job.iteration import Iteration
from outlast.elastic.job.live.choice import Offer, StateToSave, choose_to_save
from outlast.elastic.job.live.frozen import Frozen, of_state
from outlast.elastic.job.live.own_state import Record
from outlast.elastic.job.live.transfer import Exchange
from outlast.errors import CheckpointError

log = logging.getLogger("outlast.elastic")


def collect(
    choice: StateToSave, records: Mapping[Record, bytes], exchange: Exchange, rank: int
) -> dict[int, bytes]:
    """The own states of all ranks, on the rank that saves them. All ranks call this."""
    writer = choice.holders[0]
    own: dict[int, bytes] = {}
    for holder, record in choice.own:
        content = records[record] if holder == rank else None
        if holder != writer:
            content = exchange.move([(holder, writer, content)])
        if content is not None:
            own[record.rank] = content
    return own


def state_to_save(
    choice: StateToSave, frozen: Frozen | None, noted: Mapping[int, bytes], rank: int
) -> dict[str, Any]:
    """What this rank saves: all ranks that have the tensors divide them, as in any save."""
    if frozen is None or rank not in choice.holders:
        return {}
    if frozen.versions.changed:
        raise CheckpointError("its tensors were written to meanwhile")
    if not frozen.savers:
        raise CheckpointError("a rank that has left the job has handed it over")
    state = frozen.state()
    if rank != choice.holders[0]:
        buffers = frozen.own["buffers"]  # may differ
        model = {name: each for name, each in state["model"].items() if name not in buffers}
        return {"model": model, "optimizer": state["optimizer"]}
    own = {rank: load_plain(content) for rank, content in noted.items()}
    first = own[min(own)] if own else frozen.own
    for name, value in first["buffers"].items():
        state["model"][name] = unpacked(value)
    for name, save in frozen.savers.items():
        each = {r: o["parts"][name] for r, o in own.items() if name in o["parts"]}
        if saved := save(state.pop(name, None), each):
            state[name] = saved
    state["iteration"] = Iteration.at(choice.state.phase, state["iteration"])
    values = [each["states"] for each in own.values() if each.get("states")]
    differing = {name for each in values for name in each if each[name] != values[0].get(name)}
    if differing:
        text = "states %s differ between the ranks: those of rank %d are saved. Use "
        text += "outlast.per_rank() for what may differ"
        log.warning(text, ", ".join(sorted(differing)), frozen.held.record.rank)
    return state


def choose_to_reshard(offers: Sequence[Offer], found: Mapping[str, Any]) -> StateToSave | None:
    """What the ranks save for ranks of another number, where they have a later state than the
    checkpoints that were `found` (`Restorer.sort`), and it fits none as it is.
    """
    newest = max((each["step"] for each in found["candidates"]), default=-1)
    to_save = "" if any(offer.came_back for offer in offers) else choose_to_save(offers)
    sizes = {each.record.world_size for offer in offers for each in offer.held}
    if isinstance(to_save, str) or to_save.state.step <= newest or len(offers) in sizes:
        return None
    return to_save


def reshard(
    checkpointer: Checkpointer,
    ranks: Agreement,
    group: Any,
    choice: StateToSave,
    frozen: Sequence[Frozen],
    records: Mapping[Record, bytes],
    finite: Callable[[], Collection[str]],
) -> tuple[int | None, Any]:
    """Saves the newest state that the ranks have for ranks of another number. It is loaded as any
    checkpoint, from the memory of the ranks that have it. Returns its step, or `None` if that fails
    (an older checkpoint is loaded then); and which checkpoints there are, as `Restorer.sort`.
    `finite` as in `Checkpointer.save`. Collective.
    """
    restorer, rank = checkpointer.restorer, ranks.rank
    step: int | None = None
    kept = of_state(choice.state, frozen)
    try:
        own = collect(choice, records, Exchange(group, rank), rank)
        state = ranks.together(lambda: state_to_save(choice, kept, own, rank))
        checkpointer.save(choice.state.step, state, finite=finite())
        step = choice.state.step
    except CheckpointError as e:
        log.warning("the state of the surviving ranks cannot be resharded: %s", e)
    with ranks.operation():
        return step, ranks.gather(restorer.held(), partial(restorer.sort, None))
