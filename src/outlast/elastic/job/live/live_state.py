"""`LiveState`: one rank's part in continuing from the state of the ranks that survived a fault."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from typing import Any

import msgspec
from torch.utils._pytree import tree_leaves

from outlast.async_checkpoint.kept_state import KeptState
from outlast.async_checkpoint.observers import notify
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.elastic.job.encoding import load_plain, load_state, unpacked
from outlast.elastic.job.live.choice import Choice, Offer, choose, next_branch
from outlast.elastic.job.live.frozen import Frozen, Leaf, StateId, join, signature
from outlast.elastic.job.live.own_state import Record, read
from outlast.elastic.job.live.recorder import NotSupported, Recorder
from outlast.elastic.job.live.transfer import Exchange, TransferFailed
from outlast.elastic.job.same_on_all_ranks import first_rank
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.inprocess.running_call import RunningCall

log = logging.getLogger("outlast.elastic")


class LiveState:
    """Finds and collects the state of survivors, and notes the steps that follow, for one `Job`.

    Args:
        training: the state of the job.
        kept: where the rank's own state survives a kill.
        ledger: used for nothing else.
        group: the process group of the job.
        call: the wrapped call.
    """

    def __init__(
        self,
        training: TrainingState,
        kept: KeptState,
        ledger: CallLedger,
        group: Any,
        call: RunningCall,
    ) -> None:
        self._training, self._kept, self._group, self._call = training, kept, group, call
        self._ranks = Agreement(ledger, kept.timeout_s, kept.url)
        self._rank, self._world_size = ledger.rank, ledger.world_size
        self._offered: Frozen | None = None
        self._branch = ""
        self._recorder: Recorder | None = None
        self._before = _recorders_of(call).get(kept.url, "")
        if isinstance(self._before, Recorder):
            self._before.freeze()

    def newest(self) -> Choice | str:
        """The newest state of which the ranks still have all parts, or why there is none. Called on
        all ranks, with the same result.
        """

        def work(parts: list[Any]) -> Any:
            offers = [msgspec.convert(part, Offer) for part in parts]
            branch = next_branch(offers, uuid.uuid4().hex[:8])
            return [msgspec.to_builtins(choose(offers, branch)), branch]

        with self._ranks.operation():
            found, self._branch = self._ranks.gather(msgspec.to_builtins(self._offer()), work)
        if isinstance(found, str):
            return found
        return msgspec.convert(found, Choice, str_keys=True)

    def collect(self, choice: Choice) -> tuple[dict[str, Any], int] | str:
        """The state to load, and how many bytes of it this rank has received; or why that failed
        on any rank. Called on all ranks.
        """
        notify("restoring")
        collected: tuple[dict[str, Any], int] | None = None
        try:
            collected = self._collect(choice)
        except (TransferFailed, ValueError, TypeError, KeyError) as e:
            log.warning("the state of the surviving ranks cannot be used: %s", e)
        failed = first_rank(collected is None, self._rank, self._group)
        if failed is None and collected is not None:
            return collected
        return f"the state of step {choice.step} could not be collected: see rank {failed}"

    def begin(self, choice: Choice | None, counters: dict[str, Any]) -> None:
        """All ranks have restored a state, that of `choice` or another: notes it, and from now on
        every step. What was kept for this restore is released.
        """
        branch = self._branch if choice is None else choice.branch
        restored = StateId(branch, int(counters["steps"]), self._rank, self._world_size)
        self._recorder, missing = None, ""
        try:
            self._recorder = Recorder(self._training, self._kept, restored, self._branch, counters)
        except NotSupported as e:
            missing = str(e)
            log.info("after a fault, this job loads a checkpoint: %s", e)
        self._replace(self._recorder or missing)

    def completed(self, step: int, counters: dict[str, Any]) -> None:
        """Notes that `step` is complete."""
        if self._recorder is not None:
            self._recorder.completed(step, counters)

    def close(self) -> None:
        """The job has ended without a fault: nothing is kept."""
        self._recorder = None
        self._replace("")

    def _replace(self, recorder: Recorder | str) -> None:
        recorders, self._before = _recorders_of(self._call), ""
        before = recorders.get(self._kept.url)
        recorders[self._kept.url] = recorder
        if isinstance(before, Recorder):
            before.release()

    def _offer(self) -> Offer:
        records = list(self._records())
        branches = [int(record.branch.partition("-")[0]) for record in records]
        offer = Offer(
            records=records,
            signature=signature(plain_state_dict(self._training.module, keep_vars=True)),
            resizable=not any(part.is_of_rank for part in self._training.parts.values()),
            came_back=self._call.fault_came_back,
            branches=max(branches, default=0),
        )
        before = self._before
        frozen = self._offered = None if isinstance(before, str) else before.frozen
        if frozen is None:
            why = before if isinstance(before, str) else before.why
            return dataclasses.replace(offer, why=why)
        return dataclasses.replace(
            offer,
            at=frozen.id,
            settled=frozen.settled,
            passes=frozen.passes,
            held=frozen.signature,
            layout=frozen.layout,
        )

    def _records(self) -> dict[Record, bytes]:
        """The own states that this process has, of its own and of one that was killed."""
        found = [each for memory in self._kept.memories for each in read(memory)]
        return dict(reversed(found))  # of several of the same, the one that was written last

    def _collect(self, choice: Choice) -> tuple[dict[str, Any], int]:
        frozen = self._offered
        exchange = Exchange(self._group, self._rank)
        here, trusted = self._own_state(choice, exchange)
        found = exchange.run(choice.sources, frozen)
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
        records = self._records()
        moves = [
            (each[0], rank, each[1])
            for rank, each in enumerate(choice.own)
            if each is not None and each[0] != rank
        ]
        if moves:
            mine = [len(records[record]) for holder, _, record in moves if holder == self._rank]
            sizes = self._ranks.exchange(mine)
            sized = [(holder, rank, sizes[holder].pop(0)) for holder, rank, _ in moves]
            sent = {r: records[record] for holder, r, record in moves if holder == self._rank}
            moved = exchange.move(sized, sent)
            if moved is not None:
                return moved, False
        chosen = choice.own[self._rank]
        return (None, False) if chosen is None else (records[chosen[1]], True)


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
