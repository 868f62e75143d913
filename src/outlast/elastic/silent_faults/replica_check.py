"""`ReplicaCheck`: finds parameters that differ between ranks that must hold the same ones.

Data-parallel replicas apply the same gradients to the same parameters. A bit that flips in one
replica's memory, or a wrong result of its processor, makes them differ for good, and no error is
raised. The check hashes the parameters, a slice per step, and compares the digests of all replicas.

Why hashing in the background is correct: between two steps of the optimizer the parameters are
constant. The training thread hands a slice to the background thread after a step; a torch hook
before the next step of any optimizer waits for the digest. It also compares the write counters of
torch with those at the handover: a slice that was written to in between, by user code, is left out
of this cycle. A write that torch does not count may be reported as a difference.

Buffers are hashed with the first slice, if they have not been written to since the check began: a
mask or a table. Batch-norm statistics differ between replicas legitimately. What DDP broadcasts
needs no check, since a difference does not outlast the next forward pass. Not hashed: the state of
the optimizer, which shows in the parameters after its next step. Not to be seen from parameters: a
wrong gradient before the all-reduce, which becomes part of the sum that all replicas apply.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outlast.coordination.call_ledger import CallLedger
from outlast.coordination.training_step import loop
from outlast.elastic.silent_faults.comparison import Difference, Judge, Record, Result
from outlast.elastic.silent_faults.digests import Buffers, Digest, SideStreams, cpu_digest
from outlast.elastic.silent_faults.exchange import Exchange, Running, Startable
from outlast.elastic.silent_faults.layout import Layout
from outlast.elastic.tensors import Versions, local
from outlast.errors import RankExcluded, ReplicasDiffer
from outlast.events.emitter import Emitter
from outlast.events.types import ReplicaMismatch
from outlast.system.arguments import as_int
from outlast.system.devices import on_accelerator
from outlast.system.units import listed

log = logging.getLogger("outlast.elastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaCheck(Startable["RunningReplicaCheck"]):
    """Compares the parameters of data-parallel replicas every `every` steps.

    Pass it to `outlast.Job(checks=...)`, or `start` it in a program without `Job`.

    Attributes:
        every: a cycle begins every so many steps, and takes at most as many: each step hashes one
            slice of the parameters. A model of up to 1 MiB is one slice.
        on_mismatch: what to do when replicas differ, beside the event and the message in the log.
            `"report"`: nothing. `"exclude"`: the ranks that differ from the majority leave the job
            with `RankExcluded`; without a majority, as with two replicas, all ranks raise
            `ReplicasDiffer`. A `Job` then restores the newest checkpoint from before the
            difference. Or a function, called with the `ReplicaMismatch` on every rank, in the
            training thread, not after the same step on all ranks; it may raise.
    """

    every: int = 100
    on_mismatch: str | Callable[[ReplicaMismatch], object] = "report"

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", as_int("every", self.every, at_least=1))
        if self.on_mismatch not in ("report", "exclude") and not callable(self.on_mismatch):
            raise ValueError(
                f"on_mismatch must be 'report', 'exclude' or a function, not {self.on_mismatch!r}"
            )

    @property
    def excludes(self) -> bool:
        """Whether ranks that differ leave the job."""
        return self.on_mismatch == "exclude"

    def _run(
        self, module: nn.Module, ledger: CallLedger, emitter: Emitter, step: int
    ) -> RunningReplicaCheck:
        return RunningReplicaCheck(self, module, ledger, emitter, step)


class RunningReplicaCheck(Running):
    """The check of one module.

    `before_result`, if given, is called on rank 0 with each result that has differences, in the
    background, before any other rank knows of it. `clean_step` is an earlier step, if the replicas
    are not known to be equal at the beginning. `known_clean_step` is the last step after which they
    were, as far as this rank knows.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        module: nn.Module,
        ledger: CallLedger,
        emitter: Emitter,
        step: int,
        before_result: Callable[[Result], None] | None = None,
        clean_step: int | None = None,
    ) -> None:
        self._check, self._emitter = check, emitter
        self._layout = Layout.of(module, check.every)
        self._buffers = Buffers(module)
        self.known_clean_step = step if clean_step is None else clean_step
        self._judge = Judge(self.known_clean_step)
        self._before_result = before_result
        self._alone = ledger.world_size == 1
        self._exchange = Exchange(ledger, "replicas", self._compare, Record, Result)
        self._step = step
        self._in_cycle = False
        self._slice = 0  # the next one to hash in the cycle
        self._first, self._batches = step, loop.taken
        self._unjudged: deque[int] = deque()  # the first steps of what this rank has published
        self._digests: list[list[Digest] | None] = []
        self._buffer_digests: dict[str, Digest] = {}
        # The parameters whose digests are being made; set once these are there.
        self._handover: tuple[Versions, threading.Event] | None = None
        self._told_of_writes = False
        self._times: Counter[tuple[int, ...]] = Counter()
        tensors = [local(p) for p in self._layout.parameters]
        on_devices = {tensor.device for tensor in tensors if on_accelerator(tensor)}
        self._streams = SideStreams(on_devices)
        self._hook = register_optimizer_step_pre_hook(self._settle)

    @property
    def undecided_steps(self) -> list[int]:
        """On rank 0: the first steps of comparisons without a result; one may become clean."""
        return [*self._unjudged, *([self._first] if self._in_cycle else [])]

    @property
    def clean_steps(self) -> list[int]:
        """The steps that are, or may become, the last one after which the replicas are known to
        have been equal, as far as rank 0 knows or every rank; on rank 0.
        """
        # First: a comparison that ends in between has made its step the clean one.
        undecided = self.undecided_steps
        return [*undecided, self._judge.clean_step, self._judge.known_by_all]

    def step(self, step: int | None = None) -> None:
        """Call it after each step of the optimizer, with the number of steps so far.

        Raises:
            RankExcluded: with `"exclude"`, if this rank differs from the majority.
            ReplicasDiffer: with `"exclude"`, if replicas differ and there is no majority.
        """
        self._step = self._step + 1 if step is None else step
        if self._alone:
            return
        self._settle()
        self._publish_if_complete()
        begins = self._step % self._check.every == 0 and self._exchange.error is None
        if not self._in_cycle and begins:
            self._in_cycle, self._slice = True, 0
            self._first, self._batches = self._step, loop.taken
        if self._in_cycle and self._slice < len(self._layout.slices):
            self._hand_over(self._slice)
            self._slice += 1
        for result in self._exchange.results():
            self._act_on(result)

    def compare_now(self, timeout_s: float, *, required: bool = False) -> None:
        """Compares all parameters as they are now, and waits for the result: before a state is
        saved as the last one, or copied to other ranks. Call it on all ranks after the same step.
        After `timeout_s` seconds without a result, it only says so in the log.

        Raises as `step`; and if it is `required`, a `StoreError` if the store was lost: another
        rank may have raised already, and the abort that follows ends this rank's connections before
        it interrupts this thread, which would go on with a state that differs.
        """
        if self._alone:
            return
        self._settle()
        self._publish_if_complete()
        self._digests, self._first, self._batches = [], self._step, loop.taken
        for number in range(len(self._layout.slices)):
            self._hand_over(number)
            self._settle()
        self._publish()
        self._in_cycle = False
        for result in self._exchange.all_results(timeout_s):
            self._act_on(result)
        if required and self._exchange.error is not None:
            raise self._exchange.error

    def close(self) -> None:
        """Ends the check; what was not compared yet is not."""
        self._hook.remove()
        self._settle()
        self._exchange.close()

    # ------------------------------------------------------------------------- digests

    def _hand_over(self, number: int) -> None:
        """Lets the digests of a slice be made, until `_settle`."""
        pieces = self._layout.slices[number]
        used = {part.parameter for piece in pieces for part in piece.parts}
        parameters = self._layout.parameters
        tensors = [local(p) if i in used else p for i, p in enumerate(parameters)]
        ended = threading.Event()
        self._handover = Versions([parameters[i] for i in sorted(used)]), ended
        # Parameters in CPU memory may be in one slice with others: it is then summed as those are.
        if any(tensors[i].device in self._streams for i in used):
            self._digests.append(list(self._streams.start(pieces, tensors)))
            if number == 0:
                self._buffer_digests = self._buffers.start(self._streams)
            ended.set()
            return
        results: list[str] = []
        hash_buffers: Callable[[], None] | None = None
        if number == 0:
            self._buffer_digests, hash_buffers = self._buffers.later()

        def hash_slice() -> None:
            try:
                results.extend(cpu_digest(piece, tensors) for piece in pieces)
                if hash_buffers is not None:
                    hash_buffers()
            finally:
                ended.set()

        self._digests.append([lambda i=i: results[i] for i in range(len(pieces))])  # type: ignore[misc]
        self._exchange.run(hash_slice)

    def _settle(self, *_: Any) -> None:
        """Waits for the digests in progress, and drops them if the parameters were written to. On
        the training thread, where no write is in progress.
        """
        handover, self._handover = self._handover, None
        if handover is None:
            return
        self._streams.hold_training()
        versions, ended = handover
        ended.wait()
        if not versions.changed:
            return
        self._digests[-1] = None
        if not self._told_of_writes:
            self._told_of_writes = True
            log.warning(
                "parameters were written to between two optimizer steps, after step %d: the "
                "replicas are not compared where that happens",
                self._step,
            )

    def _publish_if_complete(self) -> None:
        # Also of a rank that holds no parameters: all ranks take part in every round.
        if self._in_cycle and self._slice == len(self._layout.slices):
            self._publish()
            self._in_cycle = False

    def _publish(self) -> None:
        digests, self._digests = self._digests, []
        constant = self._buffers.unwritten()
        of_buffers = {n: d for n, d in self._buffer_digests.items() if n in constant}
        layout, first, known = self._layout, self._first, self.known_clean_step
        batches, host = self._batches, socket.gethostname()
        if self._exchange.rank == 0 and self._exchange.error is None:
            self._unjudged.append(first)

        def record() -> Record:
            found: list[str | None] = []
            for pieces, made in zip(layout.slices, digests, strict=True):
                found += [None] * len(pieces) if made is None else [digest() for digest in made]
            return Record(
                signature=layout.signature,
                host=host,
                first=first,
                slices=[len(pieces) for pieces in layout.slices],
                digests=found,
                known=known,
                buffers={name: digest() for name, digest in of_buffers.items()},
                batches=batches,
            )

        self._exchange.publish(record)

    # ------------------------------------------------------------------------- results

    def _compare(self, records: Sequence[Record]) -> Result:
        """On rank 0, in the background. No rank acts on the result before this returns: the restart
        that follows would interrupt rank 0 before it had said why.
        """
        result = self._judge(records)
        self._unjudged.popleft()
        for difference in result.differences:
            if self._exchange.rank in difference.replicas:
                self._report(self._mismatch(difference, result.clean_step))
        if self._before_result is not None and result.differences:
            self._before_result(result)
        return result

    def _report(self, mismatch: ReplicaMismatch) -> None:
        """Emits the event, and logs the message; of the same ranks, every 2nd, 4th, 8th... time."""
        self._times[tuple(mismatch.ranks)] += 1
        times = self._times[tuple(mismatch.ranks)]
        if times > 1 and self._check.excludes:
            return  # they are leaving, and a cycle has ended meanwhile
        self._emitter.emit(mismatch)
        if times & (times - 1) == 0:
            log.error("%s%s", describe(mismatch), f" (seen {times} times)" if times > 1 else "")

    def _act_on(self, result: Result) -> None:
        mine = self._exchange.rank
        self.known_clean_step = max(self.known_clean_step, result.clean_step)
        for difference in result.differences:
            mismatch = self._mismatch(difference, result.clean_step)
            text = describe(mismatch)
            # One event, of a rank that knows the names. That of rank 0 is there already.
            if mine == difference.replicas[0] != 0:
                self._report(mismatch)
            if callable(self._check.on_mismatch):
                self._check.on_mismatch(mismatch)
            elif self._check.excludes and mine in difference.ranks:
                raise RankExcluded(text) if difference.majority else ReplicasDiffer(text)

    def _mismatch(self, difference: Difference, clean_step: int) -> ReplicaMismatch:
        labels = self._layout.labels if self._exchange.rank in difference.replicas else []
        return ReplicaMismatch(
            step=difference.step,
            clean_step=clean_step,
            replicas=len(difference.replicas),
            ranks=difference.ranks,
            hosts=difference.hosts,
            majority=difference.majority,
            parameters=[labels[piece] for piece in difference.pieces if piece < len(labels)]
            + difference.buffers,
        )


def describe(mismatch: ReplicaMismatch) -> str:
    """A mismatch in a sentence."""
    what, count = listed(mismatch.parameters), len(mismatch.ranks)
    places = zip(mismatch.ranks, mismatch.hosts, strict=True)
    which = ", ".join(f"rank {rank} on {host}" for rank, host in places)
    if mismatch.majority:
        verb = "differs" if count == 1 else "differ"
        found = f"{which} {verb} from the other {mismatch.replicas - count} replicas"
    else:
        found = f"{which} differ, and no majority of replicas says which is wrong"
    return (
        f"after step {mismatch.step}: {found}, in {what or 'parameters'}; they were equal after "
        f"step {mismatch.clean_step}"
    )
