"""Saves the newest state that the ranks of a job still have, before the job ends.

It is called as the function of an iteration of its own (`ViewRecord.saves`), on the ranks that keep
something. No code of the user runs: the model and all else are saved as they were frozen. The
checkpoint is one of all ranks of the job: what belongs to a lost rank alone is taken from what its
process has kept, if it was on the host of one of these ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.trust import trusted
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import connect_ledger
from outlast.elastic.job.live.choice import Offer, StateToSave, choose_to_save
from outlast.elastic.job.live.frozen import Frozen, of_state
from outlast.elastic.job.live.own_state import Record, read_all
from outlast.elastic.job.live.recorder import Recorder
from outlast.elastic.job.live.to_save import collect, state_to_save
from outlast.elastic.job.live.transfer import Exchange
from outlast.elastic.tensors import local
from outlast.errors import CheckpointError, FolderUnusable
from outlast.inprocess.running_call import RunningCall, long_phase
from outlast.system.error_text import describe, first_line
from outlast.system.notices import notice
from outlast.system.units import duration_text, rank_names

log = logging.getLogger("outlast.elastic")

_LIMIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Kept:
    """What this rank keeps of a job: its last point, or why there is none; how to open the folder
    of its checkpoints, for a process group; the entries of the state that must be finite.
    """

    recorder: Recorder | str
    create: Callable[[Any], Checkpointer]
    finite: Collection[str] = ()


def check_same_folder(call: RunningCall, url: str) -> None:
    """A restart in place finds an unfinished job again by its folder."""
    recorders = [each.recorder for each in call.kept.values()]
    earlier = [
        isinstance(each, Recorder) and each.iteration < call.state.iteration for each in recorders
    ]
    if earlier and all(earlier) and url not in call.folders:
        raise FolderUnusable(
            f"after a restart in place, the job's folder is {url}, and before it was "
            f"{', '.join(sorted(call.kept))}: the training would begin again at step 0. A path "
            "that depends on the time, on chance or on the working directory has to be made before "
            "the wrapped function is called"
        )
    call.folders.add(url)


def rescue_for(call: RunningCall) -> None:
    """`rescue` at the end of a call; if that was told to stop, this is its save."""
    limit_s = _LIMIT_S
    if call.stop is not None:
        limit_s = call.grace_s
        call.saving_for_stop(limit_s)  # the launcher would end its ranks after its own grace time
    saved = rescue(call.kept, limit_s)
    if saved and call.stop is not None:
        call.finish_stop(saved)


def release_all(kept: dict[str, Kept]) -> None:
    """At the end of a call: nothing continues from what is kept."""
    for each in kept.values():
        if isinstance(each.recorder, Recorder):
            each.recorder.release()
    kept.clear()


def rescue(kept: Mapping[str, Kept], limit_s: float) -> str:
    """Saves what is kept of each job, by its folder. Returns what was saved, empty if it is not."""
    dist.init_process_group("gloo")
    ranks = Agreement(connect_ledger("rescue"), _LIMIT_S, "the jobs that end")

    def by_folder(parts: list[Any]) -> Any:
        folders = sorted(set().union(*parts))
        return {url: [rank for rank, part in enumerate(parts) if url in part] for url in folders}

    told = []
    with long_phase(_LIMIT_S):
        for url, members in ranks.gather(sorted(kept), by_folder).items():
            group = dist.new_group(members)
            if ranks.rank in members:
                leads = members[0] == ranks.rank
                told.append(_rescue(url, kept[url], group, limit_s, leads=leads))
        ranks.gather(None, lambda _: None)
    dist.destroy_process_group()
    return "; ".join(told) if all(told) else ""


def _rescue(url: str, kept: Kept, group: Any, limit_s: float, *, leads: bool) -> str:
    text, newest = "", "unknown"
    # If it is interrupted, anywhere: the rank that leads may be the lost one.
    why, speaks = "another rank was lost meanwhile", True
    began = time.monotonic()
    try:
        with kept.create(group) as checkpointer:
            newest = newest_on_storage(checkpointer)
            text = _Rescue(url, kept, group, checkpointer, limit_s).run()
        why = ""
    except Exception as e:
        log.debug("the last save has failed", exc_info=True)
        is_agreed = isinstance(e, CheckpointError)  # else the first rank may be lost
        told = first_line(e, with_type=not is_agreed)
        why = told if is_agreed else f"{told}; perhaps {why}"
        speaks = leads or not is_agreed
    finally:
        if why and speaks:
            lost = "the newest state that the ranks have is not saved in %s: %s. On storage: %s"
            log.error(lost, url, why, newest)
    if text and leads:
        notice(log, "%s (%s)", text, duration_text(time.monotonic() - began))
    return text


class _Rescue:
    """One rank's part."""

    def __init__(
        self, url: str, kept: Kept, group: Any, checkpointer: Checkpointer, limit_s: float
    ) -> None:
        self._kept, self._group, self._checkpointer = kept, group, checkpointer
        self._limit_s = limit_s
        ledger = connect_ledger("rescue", group)
        self._rank = ledger.rank
        self._ranks = Agreement(ledger, _LIMIT_S, url)
        self._records: dict[Record, bytes] = {}

    def run(self) -> str:
        """Saves it, unless it is saved; says which step that is."""
        with self._ranks.operation():
            if (finding := trusted(self._checkpointer)) is not None:
                raise CheckpointError(f"it is from after a silent fault: {finding.fault}")
            frozen, offer = self._offer()
            found = self._ranks.gather(msgspec.to_builtins(offer), self._choose)
            if isinstance(found, str):
                raise CheckpointError(found)
            choice, is_saved = msgspec.convert(found, tuple[StateToSave, bool])
            if is_saved:
                return f"step {choice.state.step}, the newest one that the ranks have, is saved"
            kept = of_state(choice.state, frozen)
            exchange = Exchange(self._group, self._rank)
            own = collect(choice, self._records, exchange, self._rank)
            state = self._ranks.together(lambda: state_to_save(choice, kept, own, self._rank))
        step = choice.state.step
        self._checkpointer.save(step, state, finite=self._kept.finite).wait(self._limit_s)
        lost = rank_names(choice.lost)
        lacks = f"; the random generators of {lost} are lost with it" if choice.lost else ""
        return f"step {step}, the newest one that the ranks had, is saved now{lacks}"

    def _offer(self) -> tuple[Sequence[Frozen], Offer]:
        recorder, memories = self._kept.recorder, self._checkpointer.session.memories
        frozen: Sequence[Frozen] = ()
        place, why = (0, 0), recorder if isinstance(recorder, str) else ""
        if isinstance(recorder, Recorder):
            recorder.freeze()
            frozen, why = recorder.all_frozen, recorder.why
            place = recorder.point.record.rank, recorder.point.record.world_size
        for rank in self._ranks.gather(place, _absent):
            memories += self._checkpointer.session.left_by(rank, place[1])
        memories += self._checkpointer.session.mirrors.collect()
        self._records = read_all(memories)
        if frozen and (name := _not_finite(frozen[-1], self._kept.finite)):
            frozen, why = (), f"{name} is not finite"
        held = [each.held for each in frozen]
        return frozen, Offer(list(self._records), "", False, 0, held, why=why)

    def _choose(self, parts: list[Any]) -> Any:
        choice = choose_to_save([msgspec.convert(part, Offer) for part in parts])
        if isinstance(choice, str):
            return choice
        newest = max((info.step for info in self._checkpointer.checkpoints()), default=-1)
        if newest > choice.state.step:
            return f"step {choice.state.step} is older than the checkpoint of step {newest}"
        return [msgspec.to_builtins(choice), newest == choice.state.step]


def newest_on_storage(checkpointer: Checkpointer) -> str:
    """The step of the newest checkpoint, in words, for the error of a last save."""
    try:
        steps = [info.step for info in checkpointer.checkpoints()]
        return f"step {steps[-1]}" if steps else "none"
    except (CheckpointError, OSError) as e:
        return f"unknown: {describe(e)}"


def _absent(places: list[Any]) -> list[int]:
    sizes = {size for _, size in places if size}
    return sorted(set(range(max(sizes, default=0))) - {rank for rank, _ in places})


def _not_finite(frozen: Frozen, names: Collection[str]) -> str:
    model = frozen.state()["model"]
    for name in names:
        tensor = model.get(name.removeprefix("model."))
        if tensor is not None and not bool(torch.isfinite(local(tensor)).all()):
            return name
    return ""
