"""`LiveState`: one rank's part in continuing from the state of the ranks that survived a fault."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from typing import Any

from outlast.async_checkpoint.kept_state import KeptState
from outlast.async_checkpoint.observers import notify
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import least
from outlast.elastic.job.live import registry
from outlast.elastic.job.live.decision import Decision, Offer, decide, names, next_branch
from outlast.elastic.job.live.encoding import load_plain, load_state
from outlast.elastic.job.live.point import Frozen, Leaf, Place, join, signature
from outlast.elastic.job.live.rank_state import insert, is_simple
from outlast.elastic.job.live.recorder import NotSupported, Recorder
from outlast.elastic.job.live.slots import Record, read
from outlast.elastic.job.live.transfer import Exchange, TransferFailed
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.numerics import generators
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.inprocess.running_call import RunningCall
from outlast.system.notices import notice
from outlast.system.units import duration_text

log = logging.getLogger("outlast.elastic")

_NO_RANK = 1 << 62


class LiveState:
    """Restores from survivors, and notes the steps that follow, for one `Job`.

    Args:
        training: the state of the job.
        kept: where the rank's own state survives a kill.
        ledger: used for nothing else.
        group: the process group of the job.
        call: the wrapped call.
        random: whether the random generators are part of the state.
    """

    def __init__(
        self,
        training: TrainingState,
        kept: KeptState,
        ledger: CallLedger,
        group: Any,
        call: RunningCall,
        *,
        random: bool,
    ) -> None:
        self._training, self._kept = training, kept
        self._ranks = Agreement(ledger, kept.timeout_s, kept.url)
        self._group, self._call, self._random = group, call, random
        self._rank, self._world_size = ledger.rank, ledger.world_size
        self._offered: Frozen | None = None
        self._branch = ""
        self._recorder: Recorder | None = None
        self._before = registry.present(kept.url, call)
        if self._before is not None:
            self._before.freeze()

    def decide(self, step: int | None) -> Decision | None:
        """The newest state that is left and is not older than the newest checkpoint; `None` if a
        checkpoint must be loaded, that of `step` if it is given. Called on all ranks, with the same
        result.
        """
        with self._ranks.operation():
            decision, self._branch = self._decided()
        if isinstance(decision, str):
            self._not_live(decision)
            return None
        if step is not None:
            self._not_live(f"the checkpoint of step {step} is required")
            return None
        # A checkpoint of a later step exists only if all ranks have completed that step, and have
        # lost it since. If it turns out to be damaged, an older one is loaded.
        newest = self._kept.newest(decision.step)
        if newest is None:
            return decision
        self._not_live(f"the ranks are at step {decision.step}, and a checkpoint at step {newest}")
        return None

    def collect(self, decision: Decision) -> tuple[dict[str, Any], int] | None:
        """The state to load, and how many bytes of it this rank has received; `None` if that failed
        on any rank: a checkpoint must be loaded then. Called on all ranks.
        """
        notify("restoring")
        collected: tuple[dict[str, Any], int] | None = None
        try:
            collected = self._collect(decision)
        except (TransferFailed, ValueError, TypeError, KeyError) as e:
            log.warning("the state of the surviving ranks cannot be used: %s", e)
        failed = least(_NO_RANK if collected is not None else self._rank, self._group)
        if failed == _NO_RANK:
            return collected
        self._not_live(
            f"the state of step {decision.step} could not be collected: see rank {failed}"
        )
        return None

    def log(self, decision: Decision, seconds: float) -> None:
        """Says on rank 0 what was restored."""
        if self._rank != 0:
            return
        received = sorted(decision.sources)
        how = f"; {names(received)} received it from others" if received else ""
        notice(
            log,
            "continuing after step %d with the state of the surviving ranks%s (%s)",
            decision.step,
            how,
            duration_text(seconds),
        )

    def begin(self, decision: Decision | None, counters: dict[str, Any]) -> None:
        """All ranks have restored a state, that of `decision` or another: notes it, and from now on
        every step. What was kept for this restore is released.
        """
        step = int(counters["steps"])
        branch = self._branch if decision is None else decision.branch
        place = Place(branch, step, self._rank, self._world_size)
        recorder: Recorder | None = None
        missing = ""
        try:
            recorder = Recorder(
                self._training,
                self._kept,
                place,
                self._branch,
                random=self._random,
                counters=counters,
            )
        except NotSupported as e:
            missing = str(e)
            log.info("after a fault, this job loads a checkpoint: %s", e)
        self._recorder, self._before = recorder, None
        registry.replace(self._kept.url, self._call, recorder, missing)

    def completed(self, step: int, counters: dict[str, Any]) -> None:
        """Notes that `step` is complete."""
        if self._recorder is not None:
            self._recorder.completed(step, counters)

    def close(self) -> None:
        """The job has ended without a fault: nothing is kept."""
        self._recorder = self._before = None
        registry.replace(self._kept.url, self._call, None)

    # ----------------------------------------------------------------------------- private

    def _not_live(self, reason: str) -> None:
        """A checkpoint is loaded, and no state of the ranks: says why, in the log of rank 0 and in
        the event of the restore.
        """
        self._kept.not_live = reason
        if reason and self._rank == 0:
            log.warning("the state of the surviving ranks is not used: %s", reason)

    def _decided(self) -> tuple[Decision | str, str]:
        """The decision, or why there is none, and the branch of the steps that follow it."""

        def work(parts: list[Any]) -> Any:
            offers = [Offer.of_json(part) for part in parts]
            branch = next_branch(offers, uuid.uuid4().hex[:8])
            found = decide(offers, branch)
            return [found if isinstance(found, str) else found.to_json(), branch]

        found, branch = self._ranks.gather(self._offer().to_json(), work)
        return (found if isinstance(found, str) else Decision.of_json(found)), branch

    def _offer(self) -> Offer:
        frozen = self._offered = None if self._before is None else self._before.frozen
        records = list(self._records())
        known = [record.branch for record in records]
        entries = plain_state_dict(self._training.module, keep_vars=True)
        offer = Offer(
            records=records,
            signature=signature(entries),
            resizable=is_simple(self._training),
            came_back=self._call.fault_came_back,
            branches=max((int(name.partition("-")[0]) for name in known), default=0),
        )
        if frozen is None:
            before = self._before
            why = registry.why_missing(self._kept.url) if before is None else before.why
            return dataclasses.replace(offer, why=why)
        return dataclasses.replace(
            offer,
            place=frozen.place,
            settled=frozen.settled,
            passes=frozen.passes,
            held=frozen.signature,
            layout=frozen.layout,
        )

    def _records(self) -> dict[Record, bytes]:
        """The own states that this process has, of its own and of one that was killed."""
        found = [each for memory in self._kept.memories for each in read(memory)]
        return dict(reversed(found))  # of several of the same, the one that was written last

    def _collect(self, decision: Decision) -> tuple[dict[str, Any], int]:
        frozen, records = self._offered, self._records()
        exchange = Exchange(self._group, self._rank)
        here, moved = self._own(decision, records, exchange)
        found = exchange.run(decision.sources, frozen)
        if found is not None:
            header, leaves = found
            skeleton, sent = load_state(header, [Leaf])
        else:
            assert frozen is not None  # the decision says so
            (skeleton, sent), leaves = frozen.skeleton, list(frozen.leaves)
        if frozen is not None and frozen.versions.changed():
            raise ValueError("its tensors were written to during the restore")
        target: dict[str, Any] = {}
        if any(_is_sharded(each) for each in _leaves_of(skeleton)):
            target, _ = self._training.load_target()
        state: dict[str, Any] = join(skeleton, leaves, target)
        # Buffers first as on the rank that sent them, then as on this rank.
        insert({"buffers": sent["buffers"]}, state, self._rank, self._world_size)
        if here is not None:
            own = load_plain(here)
            insert(own, state, self._rank, self._world_size, trusted=not moved)
        elif self._random:  # a rank that did not exist before keeps its own
            state["random"] = {str(self._rank): generators.capture()}
        received = sum(leaf.nbytes for leaf in leaves) if found is not None else 0
        return state, received

    def _own(
        self, decision: Decision, records: dict[Record, bytes], exchange: Exchange
    ) -> tuple[bytes | None, bool]:
        """This rank's own state, and whether another process had it."""
        moves = [
            (holder, rank, record)
            for rank, each in enumerate(decision.own)
            if each is not None
            for holder, record in [each]
            if holder != rank
        ]
        moved: bytes | None = None
        if moves:
            sizes = self._ranks.gather(
                [len(records[record]) for holder, _, record in moves if holder == self._rank], list
            )
            sized = [(holder, rank, sizes[holder].pop(0)) for holder, rank, _ in moves]
            sent = {r: records[record] for holder, r, record in moves if holder == self._rank}
            moved = exchange.move(sized, sent)
        mine = decision.own[self._rank]
        if moved is not None or mine is None:
            return moved, True
        return records[mine[1]], False


def _leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves_of(each)]
    if type(value) in (list, tuple):
        return [leaf for each in value for leaf in _leaves_of(each)]
    return [value]


def _is_sharded(value: Any) -> bool:
    return bool(getattr(value, "sharded", False))
