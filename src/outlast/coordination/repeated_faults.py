"""Faults that come back: which faults are equal, what counts as progress, when the job ends.

Each decision contains the `FaultHistory` of the job: the first cause of the iteration that ended is
added to the history before it. So all members, also later ones, stop or pause together.

*Equal* are exceptions (and hangs) of the same type, message and place, on any rank: a program fails
on the rank that happens to be first. Numbers in the message may differ: a loss, a step, an address.

The *end of a process* is equal only if the same rank ends at the same step or ping. A death costs a
process, so it cannot be repeated for ever: the launcher counts and delays replacements. And kills
from outside (a preempted host, the out-of-memory killer of a busy one) are alike whatever causes
them, so without this a job would be stopped for three of them in a row.

A *mistake in the program* is not a fault of the machine: an exception of a type such as `KeyError`
(`permanent_error.is_mistake`), raised by the same line of the user, on any rank. It is counted over
the whole job, whatever progress is in between: a restart skips what failed, and nobody asked for
that. So it ends the job when it comes back.

*Ranks that do not make the same steps* hang where one of them has no more batches. That is a
mistake in the program, and no restart changes it: so it ends the job at once.

*Progress* is a later step than ever before (`Job.step`, `Checkpointer.save`): steps are counted
from the beginning of the training, so repeated steps are not progress. Where no steps are known,
the pings of the rank that failed are compared with those at the last equal fault: more are
progress, and as many are the same place. Fewer may be the same place after a checkpoint, or an
earlier one: the count starts again with these two. Of a program that neither steps nor pings,
nothing is known: its faults count only if each comes soon after the function was entered, as in a
crash loop.
"""

from __future__ import annotations

import dataclasses
import datetime
import re

from outlast.events.fault_record import FaultRecord, ends
from outlast.events.hung_ranks import is_uneven, without_collectives
from outlast.events.restart_causes import JOINED, MOVED, RestartCount, add_up, what_failed
from outlast.system.arguments import Duration, as_timedelta, check_int, seconds

ALWAYS = "always"
AT_START = "at start"
"""Permanent if it is raised before the first ping or step of the job. Later it may pass, and counts
like any other error: an error in the program may depend on the data, and the folder may be locked
by a lost host of this job.
"""

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\b(?=[a-f]*\d)[0-9a-f]{12,}\b|\d+")  # or the ID of a save
_SIGNATURE_CHARS = 300
_REMEMBERED = 8  # different faults since the last progress


@dataclasses.dataclass(frozen=True)
class RepeatedFaults:
    """When faults that come back end the job; pass it as `repeated_faults=`.

    Attributes:
        max_equal: the job ends after this many equal faults without progress in between.
        crash_loop: where no rank steps or pings, a fault counts as one without progress only if it
            comes within this time of the entry into the function.
        max_mistakes: the job ends when an exception that a mistake in the program raises
            (`KeyError`, `TypeError`, ...) has come this often from the same line, progress or not;
            `None`: such exceptions count like all others.
        backoff: the pause before the restart that follows the second equal fault; each further one
            doubles it. The first restart never waits.
        max_backoff: the longest pause.
    """

    max_equal: int = 3
    max_mistakes: int | None = 3
    crash_loop: Duration = datetime.timedelta(seconds=10)
    backoff: Duration = datetime.timedelta(seconds=0.5)
    max_backoff: Duration = datetime.timedelta(seconds=30)

    def __post_init__(self) -> None:
        check_int("RepeatedFaults max_equal", self.max_equal, at_least=1)
        if self.max_mistakes is not None:
            check_int("RepeatedFaults max_mistakes", self.max_mistakes, at_least=1)
        for name in ("crash_loop", "backoff", "max_backoff"):
            value = as_timedelta(f"RepeatedFaults {name}", getattr(self, name), allow_zero=True)
            object.__setattr__(self, name, value)

    def pause(self, times: int) -> float:
        if times < 2:
            return 0.0
        return min(seconds(self.max_backoff), seconds(self.backoff) * 2.0 ** min(times - 2, 60))


@dataclasses.dataclass(frozen=True)
class EqualFaults:
    """Equal faults without progress in between; `pings` are those of the last one."""

    signature: str
    times: int
    pings: int


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake in the program: its place in a few words, and where in the training it came."""

    what: str
    times: int = 0
    came: tuple[str, ...] = ()  # the last ones


@dataclasses.dataclass(frozen=True)
class FaultHistory:
    """What is known of all faults when an iteration has ended."""

    step: int = 0  # the furthest training step of the job; 0 if none is known
    trained: bool = False  # the job has made a step or a second ping
    seen: tuple[EqualFaults, ...] = ()  # the faults since the last progress, the latest last
    mistakes: tuple[Mistake, ...] = ()  # those of the program, from the beginning of the call
    restarts: tuple[RestartCount, ...] = ()  # those of the call, by cause
    stop: str = ""  # why the job ends; empty if it continues
    cause: FaultRecord | None = None  # the first cause with which it ends
    pause: float = 0.0  # seconds until the restart

    @property
    def came_back(self) -> bool:
        """Whether the last fault is equal to one before it, without progress in between."""
        return bool(self.seen) and self.seen[-1].times > 1

    def without_end(self) -> FaultHistory:
        """The same faults, which neither end the job nor delay the restart."""
        return dataclasses.replace(self, stop="", cause=None, pause=0.0)


def add_fault(
    history: FaultHistory,
    cause: FaultRecord | None,
    step: int,
    pinged: bool,
    policy: RepeatedFaults | None,
    moved: bool = False,
) -> FaultHistory:
    """The history after an iteration whose first cause is `cause`: `None` if it ended without a
    fault. `step` is its furthest step; `pinged` says whether a rank made a second ping in it.
    Without a policy, the job restarts without limit.
    """
    made = dataclasses.replace(
        history.without_end(),
        step=max(step, history.step),
        trained=history.trained or pinged or step > 0,
        seen=() if step > history.step else history.seen,
    )
    if cause is None:
        return _restarted(made, RestartCount(MOVED if moved else JOINED))
    signature, times = signature_of(cause), 1
    if signature:
        before = next((each for each in made.seen if each.signature == signature), None)
        unknown = made.step == 0 and cause.pings == 0
        if policy is not None and unknown and cause.ran > seconds(policy.crash_loop):
            times = 1
        elif before is not None:
            times = _times(before, cause.pings, steps_known=made.step > 0)
        others = [each for each in made.seen if each.signature != signature]
        seen = (*others, EqualFaults(signature, times, cause.pings))[-_REMEMBERED:]
        made = dataclasses.replace(made, seen=seen)
    mistakes = _add_mistake(history.mistakes, cause, cause.step or made.step)
    made = dataclasses.replace(made, mistakes=mistakes)
    if policy is not None:
        stop = _why_permanent(cause, made.trained)
        if not stop and signature and times >= policy.max_equal:
            stop = f"{times} equal faults without progress in between" if times > 1 else "a fault"
        stop = stop or _why_mistaken(mistakes, cause, policy)
        if stop:
            return dataclasses.replace(made, stop=stop, cause=cause)
        made = dataclasses.replace(made, pause=policy.pause(times))
    return _restarted(made, RestartCount.of(_what(cause), cause.rank))


def _restarted(history: FaultHistory, count: RestartCount) -> FaultHistory:
    return dataclasses.replace(history, restarts=add_up([*history.restarts, count]))


def _what(fault: FaultRecord) -> str:
    return what_failed(fault.interruption, fault.cause, fault.where)


def _add_mistake(before: tuple[Mistake, ...], cause: FaultRecord, step: int) -> tuple[Mistake, ...]:
    if not cause.mistake:
        return before
    what = _what(cause)
    known = next((each for each in before if each.what == what), Mistake(what))
    at = f"step {step}" if step else f"ping {cause.pings}"
    came = (*known.came, f"rank {cause.rank} after {at}")[-_REMEMBERED:]
    others = [each for each in before if each.what != what]
    return (*others, Mistake(what, known.times + 1, came))[-_REMEMBERED:]


def _why_mistaken(mistakes: tuple[Mistake, ...], cause: FaultRecord, policy: RepeatedFaults) -> str:
    if not cause.mistake or policy.max_mistakes is None:
        return ""
    last = mistakes[-1]
    if last.times < policy.max_mistakes:
        return ""
    times = f"{last.times} x {last.what}"
    return f"a mistake in the program that came back, {times}: {', '.join(last.came)}"


def signature_of(fault: FaultRecord) -> str:
    """Equal for equal faults; empty for a death at an unknown place, which is equal to none."""
    if ends(fault):
        at = f"step {fault.step}" if fault.step else f"ping {fault.pings}"
        known = fault.step or fault.pings
        return f"{fault.interruption} of rank {fault.rank} at {at}" if known else ""
    text = f"{fault.interruption} {_NUMBER.sub('#', without_collectives(fault.cause))}"
    return f"{text[:_SIGNATURE_CHARS]} at {fault.where}"


def _times(before: EqualFaults, pings: int, *, steps_known: bool) -> int:
    if steps_known or pings == before.pings:
        return before.times + 1  # a later step would have cleared the history
    return 1 if pings > before.pings else 2


def _why_permanent(cause: FaultRecord, trained: bool) -> str:
    if cause.permanent == ALWAYS:
        return "an error that every restart would raise again"
    if cause.permanent == AT_START and not trained:
        return "an error before the first step or second ping that a restart does not fix"
    if is_uneven(cause.cause):
        return "a hang to which every restart would come again"
    return ""
