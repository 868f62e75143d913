"""Restores the state of a job: from the ranks that have survived a fault, or from a checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from outlast.async_checkpoint import Checkpointer
from outlast.async_checkpoint.observers import notify
from outlast.async_checkpoint.trust import Trusted, trusted
from outlast.coordination.agreement import Agreement
from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.collectives import first_rank, raise_together
from outlast.elastic.job.by_rank.equal_states import refusal
from outlast.elastic.job.encoding import load_plain, load_state, unpacked
from outlast.elastic.job.fallback import Fallback, load_checkpoint
from outlast.elastic.job.live.choice import Choice, Offer, StateToSave, choose, next_branch
from outlast.elastic.job.live.frozen import Frozen, Leaf, join, of_state, signature
from outlast.elastic.job.live.handover import Handover, Inherited, fetch
from outlast.elastic.job.live.own_state import MakeMirror, Record, read_all, values_of_states
from outlast.elastic.job.live.recorder import NotSupported, Recorder
from outlast.elastic.job.live.rescue import Kept, check_same_folder, release_all, rescue_for
from outlast.elastic.job.live.to_save import choose_to_reshard, reshard
from outlast.elastic.job.live.transfer import Exchange, TransferFailed
from outlast.elastic.job.same_on_all_ranks import SameParameters, name_that_differs
from outlast.elastic.job.training_state import TrainingState
from outlast.elastic.wrapped_modules import plain_state_dict
from outlast.errors import CheckpointError, RestartAbort
from outlast.inprocess.running_call import RunningCall
from outlast.system.notices import notice
from outlast.system.units import duration_text, rank_names

log = logging.getLogger("outlast.elastic")

Noted = tuple[bytes | None, bool, list[bytes]]
"""A rank's own state, whether this process or its predecessor on the host has noted it; and those
of all ranks, by rank, if their number has changed and a part needs them.
"""


class Restoring:
    """One rank's part in the restores of a job. With a wrapped `call`, it also notes the state of
    each step, from which the next iteration of the call continues; if that is `required`, it is an
    error if it cannot. `fallback` is another folder, which may have a newer checkpoint; `create`
    and `finite` are for `Kept`.
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
        create: Callable[[Any], Checkpointer],
        finite: Callable[[], Collection[str]],
        fallback: Fallback | None = None,
    ) -> None:
        self._required, self._fallback = required, fallback
        self._create, self._finite = create, finite
        self._training, self._call = training, call
        self._checkpointer, self._restorer, self._group = checkpointer, checkpointer.restorer, group
        self._url, timeout_s = checkpointer.session.url, checkpointer.session.writer.timeout_s
        self._ledger, self._rank, self._world_size = ledger, ledger.rank, ledger.world_size
        self._ranks = Agreement(ledger.child("live"), timeout_s, self._url)
        self._resharded: int | None = None  # the step that was saved for ranks of another number
        self._found: Choice | str = ""  # the newest state with all parts on the ranks, or why none
        self._are_stages = False  # whether ranks have different parameters
        self._newest: int | None = None  # the step of the newest checkpoint
        self._choice: Choice | None = None
        self._branch = ""
        self._recorder: Recorder | None = None
        self._before: Recorder | str = ""  # that of the last iteration, or why there is none
        self._offered: Frozen | None = None  # what this rank has of the chosen state
        self._inherited: Inherited | None = None  # from the process that had this rank before
        self._mirror: MakeMirror | None = None
        self._own: dict[Record, bytes] = {}
        self._mirrored: dict[Record, bytes] = {}
        """What this rank has offered of single ranks: of itself, and of some on other hosts. Read
        once: the memory may be lost before the transfer, and the others would wait for this rank.
        """
        if call is not None:
            check_same_folder(call, self._url)
            kept = call.kept.get(self._url)
            before = self._before = "" if kept is None else kept.recorder
            if isinstance(before, Recorder) and before.iteration == call.state.iteration:
                before.release()  # the program wants the state from before what has gone wrong
                self._before = "the program has caught its own exception"
            elif isinstance(before, Recorder):
                before.freeze()

    @property
    def from_survivors(self) -> bool:
        return self._choice is not None

    def restore(self, step: int | None) -> int | None:
        """After `look`: restores the newest state, or the checkpoint of `step`. Returns the number
        of its steps, or `None` if there is none: everything is then as before.

        The newest step that the ranks have in their memory is taken, unless a checkpoint is newer
        or is required, or its parts cannot be collected. Raises what `Job.restore` describes.
        """
        self._choice = None
        found = self._found
        if isinstance(found, Choice):
            # A checkpoint of a later step exists only if all ranks have completed that step, and
            # have lost it since. If it turns out to be damaged, an older one is loaded.
            if step is not None:
                found = f"the checkpoint of step {step} is required"
            elif self._newest is not None and self._newest > found.step:
                newer = f"a checkpoint at step {self._newest}"
                found = f"the ranks are at step {found.step}, and {newer}"
            else:
                self._check_states(found)
                found = self._load_from_ranks(found)
        if isinstance(found, Choice):
            self._choice = found
            return self._training.counters.steps
        if self._resharded is not None and self._resharded == self._newest:
            found = ""  # it is used
        self._restorer.not_live = found
        if found and self._rank == 0:
            log.warning("the state of the surviving ranks is not used: %s", found)
        given = self._training, self._checkpointer, self._fallback, step
        return load_checkpoint(*given, self._load_on_all_ranks)

    def begin(self) -> None:
        """All ranks continue from what was restored, or from the initial state. From now on, the
        state of each step is noted, a `ValueError` if it cannot be, and must be; what was kept for
        this restore is released. Collective.
        """
        self._training.buckets.apply()
        if self._call is None:
            return
        branch = self._branch if self._choice is None else self._choice.branch
        training, phase = self._training, self._training.iteration.phase
        of = {"rank": self._rank, "world_size": self._world_size, "phase": phase, "until": phase}
        restored = Record(branch, training.counters.steps, final=True, **of)
        self._recorder, missing = None, ""
        keep = self._checkpointer.session.keep
        ledger = self._ledger.child("meeting") if self._are_stages else None
        given = self._branch, self._call.check_running, self._mirror, ledger
        try:
            self._recorder = Recorder(training, keep, restored, *given)
            self._recorder.iteration = self._call.state.iteration
        except NotSupported as e:
            if self._required:
                raise ValueError(f"live=True: {e}") from None
            missing = str(e)
            log.info("after a fault, this job loads a checkpoint: %s", e)
        self._keep(self._recorder or missing)
        self._checkpointer.session.mirrors.begun()
        if self._inherited is not None:
            self._inherited.release()
            self._inherited = None

    def completed(self) -> None:
        if self._recorder is not None:
            self._recorder.completed()

    def later(self, phase: int, *, is_changed: bool = True) -> None:
        """A later phase of the last step is reached; as `Recorder.later`."""
        if self._recorder is not None:
            self._recorder.later(phase, is_changed=is_changed)

    def close(self, why: str = "") -> None:
        """The job has ended without a fault, or for the reason `why` no state may be used."""
        self._recorder = None
        self._keep(why)

    def _keep(self, recorder: Recorder | str) -> None:
        self._before, self._own, self._mirrored = "", {}, {}
        if self._call is not None:
            kept = self._call.kept
            if not kept:
                self._call.at_end(partial(release_all, kept))
            before = kept.pop(self._url, None)
            if recorder:
                kept[self._url] = Kept(recorder, self._create, list(self._finite()))
            self._call.rescue = partial(rescue_for, self._call) if kept else None
            if before is not None and isinstance(before.recorder, Recorder):
                before.recorder.release()

    def look(self, step: int | None, parameters: SameParameters) -> Trusted | None:
        """The first round of all ranks: what each of them has, and what there is on storage. From
        that, rank 0 chooses for all. Returns which checkpoints can be trusted, if not all.
        """
        call, mirrors = self._call, self._checkpointer.session.mirrors

        def work(parts: list[Any]) -> Any:
            digests = [part["parameters"] for part in parts]
            if name_that_differs(digests) is not None:
                return {"parameters": digests}
            known = trusted(self._checkpointer) if step is None else None
            first = step if known is None else known.step
            choice: Choice | str = ""
            branch, reshard, signatures = "", None, list[str]()
            found = self._restorer.sort(first, [part["held"] for part in parts])
            if call is not None:
                offers = [msgspec.convert(part["offer"], Offer) for part in parts]
                signatures = [offer.signature for offer in offers]
                choice, branch = choose(offers), next_branch(offers, uuid.uuid4().hex[:8])
                if isinstance(choice, str) and first is None:
                    reshard = choose_to_reshard(offers, found)
            return {
                "parameters": digests if len(set(digests)) > 1 else [],
                "signatures": signatures if len(set(signatures)) > 1 else [],
                "trusted": None if known is None else dataclasses.asdict(known),
                "choice": msgspec.to_builtins(choice),
                "branch": branch,
                "mirror": call and mirrors.arranged([part["mirror"] for part in parts]),
                "reshard": msgspec.to_builtins(reshard),
                "found": found,
            }

        with self._ranks.operation():
            digest = parameters.digest()
            offer = None if call is None else msgspec.to_builtins(self._offer(call))
            # A checkpoint before what this rank has of its own is not newer than any choice.
            after = min((record.step for record in self._own), default=-1)
            part = {"parameters": digest, "offer": offer, "held": self._restorer.held(after)}
            part["mirror"] = None if call is None else mirrors.offer()
            answer = self._ranks.gather(part, work)
        parameters.compared(answer["parameters"])
        self._are_stages |= bool(answer["parameters"])
        found = answer["signatures"]
        self._training.alike = [r for r, each in enumerate(found) if each == found[self._rank]]
        if answer.get("reshard") is not None:
            to_save = msgspec.convert(answer["reshard"], StateToSave)
            own = self._mirrored | self._own
            given = self._checkpointer, self._ranks, self._group, to_save, self._all_frozen, own
            self._resharded, answer["found"] = reshard(*given, self._finite)
        known = None if answer["trusted"] is None else Trusted(**answer["trusted"])
        first = step if known is None else known.step
        self._newest = self._restorer.looked(answer["found"], first)
        self._found = msgspec.convert(answer["choice"], Choice | str, str_keys=True)
        self._branch = answer["branch"]
        self._mirror = mirrors.accept(answer["mirror"], self._rank)
        return known

    @property
    def _all_frozen(self) -> Sequence[Frozen]:
        if not isinstance(self._before, str):
            return self._before.all_frozen
        return () if self._inherited is None else (self._inherited.frozen,)

    def freeze(self, *, succeeded: bool) -> bool:
        """See `LiveState`."""
        if self._recorder is None:
            return False
        self._recorder.freeze()
        frozen = self._recorder.all_frozen
        # Of another number of ranks, sharded tensors and what is of single ranks are loaded anew.
        return bool(frozen) and (succeeded or frozen[-1].for_any_size)

    def hand_over(self) -> None:
        """See `LiveState`."""
        assert self._recorder is not None
        assert self._call is not None
        own = read_all(self._checkpointer.session.memories)
        handover = Handover(self._call, self._url, self._recorder.all_frozen[-1], own)
        self._call.at_end(handover.wait)

    def _offer(self, call: RunningCall) -> Offer:
        session, before = self._checkpointer.session, self._before
        parts = self._training.parts.values()
        self._own, self._mirrored = read_all(session.memories), read_all(session.mirrors.collect())
        if before == "" and call.state.iteration > 0:
            self._inherited = fetch(call, self._url)
        if self._inherited is not None:
            self._own |= self._inherited.records
        return Offer(
            records=list(self._own),
            mirrored=list(self._mirrored),
            signature=signature(plain_state_dict(self._training.module, keep_vars=True)),
            resizable=not any(part.is_of_rank or part.needs_own for part in parts),
            mergeable=all(part.mergeable for part in parts),
            came_back=call.fault_came_back,
            branches=max((int(each.branch.partition("-")[0]) for each in self._own), default=0),
            held=[each.held for each in self._all_frozen],
            why=before if isinstance(before, str) else before.why,
        )

    def _check_states(self, choice: Choice) -> None:
        """Raises a `RestartAbort` on all ranks if one would lose a value of `states` that differs
        from the others'. A restart would end in the same.
        """
        records = [record for _, record in choice.own]
        is_resized = any(r is None or r.world_size != self._world_size for r in records)
        if not choice.sources and not is_resized:
            return
        known = {} if isinstance(self._before, str) else self._before.equal_states.known
        noted = [values_of_states(each) for each in (self._own, self._mirrored)]
        check = partial(refusal, receivers=list(choice.sources), is_resized=is_resized)
        with self._ranks.operation():
            if found := self._ranks.gather((*noted, known), check):
                raise RestartAbort(found)

    def _load_from_ranks(self, choice: Choice) -> Choice | str:
        """Loads this state of the ranks; returns why it could not be collected on all ranks."""
        began = time.monotonic()
        notify("restoring")
        state: dict[str, Any] | None = None
        received_bytes = 0
        # Another error in the exchange is raised: other ranks wait in it for this one.
        exchange = Exchange(self._group, self._rank)
        self._offered = of_state(choice.state, self._all_frozen)
        try:
            noted = self._collected(choice, exchange)
            found = exchange.run(choice.sources, self._offered)
            try:
                state, received_bytes = self._joined(found, noted)
            except (ValueError, TypeError, KeyError) as e:
                raise TransferFailed(str(e)) from e
        except TransferFailed as e:
            log.warning("the state of the surviving ranks cannot be used: %s", e)
        if choice.moves:
            failed = first_rank(state is None, self._rank, self._group)
            if failed is not None:
                return f"the state of step {choice.step} could not be collected: see rank {failed}"
        # Where each rank has its state, one that cannot use it has written to it meanwhile.
        self._load_on_all_ranks(state)
        self._training.iteration.phase = choice.phase
        source = "replica" if self._rank in choice.sources else "live"
        if self._inherited is not None:
            source, received_bytes = "predecessor", received_bytes + self._inherited.bytes
        seconds = time.monotonic() - began
        self._restorer.restored_elsewhere(choice.step, source, seconds, received_bytes)
        self._checkpointer.saves.prepare(self._training.state_dict)
        if self._rank == 0:
            received = sorted(choice.sources)
            how = f"; {rank_names(received)} received it from others" if received else ""
            text = "continuing after step %d with the state of the surviving ranks%s (%s)"
            notice(log, text, choice.step, how, duration_text(seconds))
        return choice

    def _joined(
        self, found: tuple[bytes, list[torch.Tensor]] | None, noted: Noted
    ) -> tuple[dict[str, Any], int]:
        """The state to load, from what was received and noted; how many bytes came."""
        frozen, (here, trusted, of_all) = self._offered, noted
        if found is not None:
            header, leaves = found
            skeleton, sent = load_state(header, [Leaf])
        else:
            assert frozen is not None  # the choice says so
            skeleton, sent, leaves = frozen.skeleton, frozen.own, list(frozen.leaves)
        if frozen is not None and frozen.versions.changed:
            raise ValueError("its tensors were written to during the restore")
        state: dict[str, Any] = join(skeleton, leaves, lambda: self._training.load_target()[0])
        own = {"buffers": {}, "parts": {}} if here is None else load_plain(here)
        # Buffers first as on the rank that sent them, then as on this rank.
        for name, value in {**sent["buffers"], **own["buffers"]}.items():
            state["model"][name] = unpacked(value)
        ranks = {rank: load_plain(each)["parts"] for rank, each in enumerate(of_all)}
        self._training.add_noted(state, {self._rank: own["parts"]}, ranks, trusted)
        return state, sum(leaf.nbytes for leaf in leaves) if found is not None else 0

    def _collected(self, choice: Choice, exchange: Exchange) -> Noted:
        moved = exchange.move(
            [
                (holder, rank, self._noted(record, holder))
                for rank, (holder, record) in enumerate(choice.own)
                if record is not None and holder != rank
            ]
        )
        of_all = exchange.share([(h, self._noted(r, h)) for h, r in choice.of_all])
        _, mine = choice.own[self._rank]
        if moved is not None or mine is None:
            return moved, False, of_all
        return self._noted(mine, self._rank), mine in self._own, of_all

    def _noted(self, record: Record, holder: int) -> bytes | None:
        noted = self._own if record in self._own else self._mirrored
        return noted[record] if holder == self._rank else None

    def _load_on_all_ranks(self, state: dict[str, Any] | None) -> None:
        """If one rank cannot, raises on all ranks: they would wait for it in a collective."""
        error: Exception | None = None
        try:
            if state is None:
                raise CheckpointError("the state of this rank cannot be used: its log says why")
            self._training.load_state_dict(state)
        except Exception as e:  # noqa: BLE001 - raised below, when the other ranks know of it
            error = e
        what = "the state could not be loaded"
        raise_together(error, what, self._rank, self._group, kind=CheckpointError)
