"""Restores the state of a job: from the ranks that have survived a fault, or from a checkpoint."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.observers import notify
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import raise_together
from outlast.elastic.job.encoding import load_plain, load_state, unpacked
from outlast.elastic.job.live.choice import Choice, Offer, choose, next_branch
from outlast.elastic.job.live.frozen import Frozen, Leaf, join, signature
from outlast.elastic.job.live.own_state import Record, read
from outlast.elastic.job.live.recorder import NotSupported, Recorder
from outlast.elastic.job.live.transfer import Exchange, TransferFailed
from outlast.elastic.job.same_on_all_ranks import first_rank, names_of
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.errors import CheckpointError
from outlast.inprocess.running_call import RunningCall
from outlast.system.notices import notice
from outlast.system.units import duration_text

log = logging.getLogger("outlast.elastic")


class Restoring:
    """One rank's part in the restores of a job. With a wrapped `call`, it also notes the state of
    each step, from which the next iteration of the call continues.

    Args:
        required: whether it is an error if the state cannot be noted.
    """

    def __init__(
        self,
        training: TrainingState,
        checkpointer: Checkpointer,
        ledger: CallLedger,
        group: Any,
        call: RunningCall | None,
        *,
        required: bool,
    ) -> None:
        self._required = required
        self._training, self._call = training, call
        self._checkpointer, self._kept, self._group = checkpointer, checkpointer.kept, group
        self._rank, self._world_size = ledger.rank, ledger.world_size
        self._ranks = Agreement(ledger.child("live"), self._kept.timeout_s, self._kept.url)
        self._choice: Choice | None = None
        self._branch = ""
        self._recorder: Recorder | None = None
        self._before: Recorder | str = ""  # that of the last iteration, or why there is none
        self._offered: Frozen | None = None
        self._own: dict[Record, bytes] = {}
        """What this rank has offered of single ranks. Read once: the memory may be lost before the
        transfer, and the others would wait for this rank's part in it.
        """
        if call is not None:
            self._before = _recorders_of(call).get(self._kept.url, "")
            if isinstance(self._before, Recorder):
                self._before.freeze()

    @property
    def from_survivors(self) -> bool:
        return self._choice is not None

    def restore(self, step: int | None) -> int | None:
        """Restores the newest state, or the checkpoint of `step`. Returns the number of its steps,
        or `None` if there is none: everything is then as before.

        The candidates are the newest step that the ranks have in their memory, and the checkpoints:
        in memory, in that of another host, and on storage, of which the checkpointer takes the
        newest valid one. The ranks' own is taken unless a checkpoint is newer or is required, or
        its parts cannot be collected.

        Raises:
            Exception: as `Job.restore` describes.
        """
        self._choice = None
        found = self._newest_of_ranks()
        if isinstance(found, Choice):
            # A checkpoint of a later step exists only if all ranks have completed that step, and
            # have lost it since. If it turns out to be damaged, an older one is loaded.
            newer = self._kept.newest(found.step) if step is None else None
            if step is not None:
                found = f"the checkpoint of step {step} is required"
            elif newer is not None:
                found = f"the ranks are at step {found.step}, and a checkpoint at step {newer}"
            else:
                found = self._load_from_ranks(found)
        if isinstance(found, Choice):
            self._choice = found
            return self._training.counters.steps
        self._kept.not_live = found
        if found and self._rank == 0:
            log.warning("the state of the surviving ranks is not used: %s", found)
        return self._load_checkpoint(step)

    def begin(self) -> None:
        """All ranks continue from what was restored, or from the initial state. From now on, the
        state of each step is noted; what was kept for this restore is released. Collective.

        Raises:
            ValueError: if the state cannot be noted, and must be.
        """
        self._training.buckets.apply()
        if self._call is None:
            return
        branch = self._branch if self._choice is None else self._choice.branch
        restored = Record(branch, self._training.counters.steps, True, self._rank, self._world_size)
        self._recorder, missing = None, ""
        try:
            self._recorder = Recorder(
                self._training, self._kept, restored, self._branch, self._call.check_running
            )
        except NotSupported as e:
            if self._required:
                raise ValueError(f"live=True: {e}") from None
            missing = str(e)
            log.info("after a fault, this job loads a checkpoint: %s", e)
        self._keep(self._recorder or missing)

    def completed(self) -> None:
        if self._recorder is not None:
            self._recorder.completed()

    def close(self) -> None:
        """The job has ended without a fault: nothing is kept."""
        self._recorder = None
        self._keep("")

    def _keep(self, recorder: Recorder | str) -> None:
        self._before, self._own = "", {}
        if self._call is not None:
            recorders = _recorders_of(self._call)
            before = recorders.get(self._kept.url)
            recorders[self._kept.url] = recorder
            if isinstance(before, Recorder):
                before.release()

    def _newest_of_ranks(self) -> Choice | str:
        """The newest state of which the ranks still have all parts, or why there is none. Called on
        all ranks, with the same result.
        """
        if self._call is None:
            return ""

        def work(parts: list[Any]) -> Any:
            offers = [msgspec.convert(part, Offer) for part in parts]
            branch = next_branch(offers, uuid.uuid4().hex[:8])
            return [msgspec.to_builtins(choose(offers, branch)), branch]

        with self._ranks.operation():
            offer = msgspec.to_builtins(self._offer(self._call))
            found, self._branch = self._ranks.gather(offer, work)
        if isinstance(found, str):
            return found
        return msgspec.convert(found, Choice, str_keys=True)

    def _offer(self, call: RunningCall) -> Offer:
        self._own, before = self._records(), self._before
        frozen = self._offered = None if isinstance(before, str) else before.frozen
        return Offer(
            records=list(self._own),
            signature=signature(plain_state_dict(self._training.module, keep_vars=True)),
            resizable=not any(part.is_of_rank for part in self._training.parts.values()),
            came_back=call.fault_came_back,
            branches=max((int(each.branch.partition("-")[0]) for each in self._own), default=0),
            held=None if frozen is None else frozen.held,
            why=before if isinstance(before, str) else before.why,
        )

    def _records(self) -> dict[Record, bytes]:
        """The own states that this process has, of its own and of one that was killed."""
        found = [each for memory in self._kept.memories for each in read(memory)]
        return dict(reversed(found))  # of several of the same, the one that was written last

    def _load_from_ranks(self, choice: Choice) -> Choice | str:
        """Loads this state of the ranks; returns why it could not be collected on all ranks."""
        began = time.monotonic()
        notify("restoring")
        state: dict[str, Any] | None = None
        received_bytes = 0
        # Another error in the exchange is raised: other ranks wait in it for this one.
        exchange = Exchange(self._group, self._rank)
        try:
            here, trusted = self._own_state(choice, exchange)
            found = exchange.run(choice.sources, self._offered)
        except TransferFailed as e:
            log.warning("the state of the surviving ranks cannot be used: %s", e)
        else:
            try:
                state, received_bytes = self._joined(found, here, trusted)
            except (ValueError, TypeError, KeyError) as e:
                log.warning("the state of the surviving ranks cannot be used: %s", e)
        failed = first_rank(state is None, self._rank, self._group)
        if state is None or failed is not None:
            return f"the state of step {choice.step} could not be collected: see rank {failed}"
        self._load_on_all_ranks(state)
        source = "replica" if self._rank in choice.sources else "live"
        seconds = time.monotonic() - began
        self._kept.restored(
            self._training.state_dict(), choice.step, source, seconds, received_bytes
        )
        if self._rank == 0:
            received = sorted(choice.sources)
            how = f"; {names_of(received)} received it from others" if received else ""
            notice(
                log,
                "continuing after step %d with the state of the surviving ranks%s (%s)",
                choice.step,
                how,
                duration_text(seconds),
            )
        return choice

    def _joined(
        self, found: tuple[bytes, list[torch.Tensor]] | None, here: bytes | None, trusted: bool
    ) -> tuple[dict[str, Any], int]:
        """The state to load, of what was received and this rank's own state; and how many bytes of
        it this rank has received.
        """
        frozen = self._offered
        if found is not None:
            header, leaves = found
            skeleton, sent = load_state(header, [Leaf])
        else:
            assert frozen is not None  # the choice says so
            skeleton, sent, leaves = frozen.skeleton, frozen.own, list(frozen.leaves)
        if frozen is not None and frozen.versions.changed:
            raise ValueError("its tensors were written to during the restore")
        target: dict[str, Any] = {}
        if any(isinstance(each, Leaf) and each.sharded for each in tree_leaves(skeleton)):
            target, _ = self._training.load_target()
        state: dict[str, Any] = join(skeleton, leaves, target)
        own = {"buffers": {}, "parts": {}} if here is None else load_plain(here)
        # Buffers first as on the rank that sent them, then as on this rank.
        for name, value in {**sent["buffers"], **own["buffers"]}.items():
            state["model"][name] = unpacked(value)
        for name, part in self._training.parts.items():
            value = part.live(state.get(name), own["parts"].get(name), trusted)
            if value is not None:
                state[name] = value
        return state, sum(leaf.nbytes for leaf in leaves) if found is not None else 0

    def _own_state(self, choice: Choice, exchange: Exchange) -> tuple[bytes | None, bool]:
        """This rank's own state, and whether this process or its predecessor has noted it."""
        moved = exchange.move(
            [
                (holder, rank, self._own[record] if holder == self._rank else None)
                for rank, (holder, record) in enumerate(choice.own)
                if record is not None and holder != rank
            ]
        )
        if moved is not None:
            return moved, False
        _, mine = choice.own[self._rank]
        return (None, False) if mine is None else (self._own[mine], True)

    def _load_checkpoint(self, step: int | None) -> int | None:
        backup = self._training.backup()
        found: int | None = None
        try:
            state, optional = self._training.load_target()
            found = self._checkpointer.restore(state, step=step, optional=optional)
            if found is not None:
                self._load_on_all_ranks(state)
        except Exception:
            self._training.roll_back(backup)
            raise
        if found is None:
            self._training.roll_back(backup)
        return found

    def _load_on_all_ranks(self, state: dict[str, Any]) -> None:
        """Loads the restored state; if one rank cannot, raises on all ranks: the others would wait
        for that rank in their next collective.
        """
        error: Exception | None = None
        try:
            self._training.load_state_dict(state)
        except Exception as e:  # noqa: BLE001 - raised below, when the other ranks know of it
            error = e
        what = "the state could not be loaded"
        raise_together(error, what, self._rank, self._group, kind=CheckpointError)


# By folder, the recorder of a call's present or last iteration, or why there is none. It outlives
# the iteration: until all ranks have restored a state, or the call ends.
_recorders: dict[str, Recorder | str] = {}
_owner: RunningCall | None = None


def _recorders_of(call: RunningCall) -> dict[str, Recorder | str]:
    global _owner
    if _owner is not call:
        _release_all()
        _owner = call
        call.at_end(_release_all)
    return _recorders


def _release_all() -> None:
    global _owner
    for recorder in _recorders.values():
        if isinstance(recorder, Recorder):
            recorder.release()
    _recorders.clear()
    _owner = None
