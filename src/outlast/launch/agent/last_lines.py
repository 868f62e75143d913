"""The last lines of a job: how it has ended, its first cause, and the failures on the way."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from outlast.errors import NO_RESTART
from outlast.events.fault_record import FaultRecord, ends
from outlast.events.restart_causes import Interruption, RestartCount, describe_restarts
from outlast.launch.agent.death_log import Death, Raised, from_last_traceback
from outlast.launch.agent.decisions import TOLD_TO_STOP, Decision
from outlast.system.units import duration_text


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a job has ended."""

    cause: Death | None  # the first failure of a worker from which it did not recover
    received: signal.Signals | None  # the signal to the launcher that ended it
    saved: bool  # whether the last save of a stop was made
    seconds: float  # since the start of the job, or since this host has joined it
    unsaved: bool = False  # whether the job was told to stop, and that save was not made
    # the fault with which the ranks have ended the job; `None` if they have not
    fault: FaultRecord | None = None
    text: str = ""  # why it has failed, if no worker is the cause
    restarts: tuple[RestartCount, ...] = ()  # by cause
    joined_late: bool = False  # whether this host joined a job that ran already
    links: tuple[str, ...] = ()  # which links between hosts were broken, in words
    left: str = ""  # why this host has left a job that goes on, if it has
    left_in_order: bool = True  # whether none of its ranks was killed instead
    leave_exit_code: int = 0

    @property
    def stopped(self) -> bool:
        told = self.cause is not None and self.cause.decision is Decision.STOPPED
        return self.saved if self.received is not None else told or self._died_in_stop

    @property
    def _died_in_stop(self) -> bool:
        """Whether no rank is left that could save: all were killed once the job was to stop."""
        cause = self.cause
        killed = cause is not None and cause.decision is Decision.LOST and cause.exit_code < 0
        return killed and self.unsaved and self.fault is None

    @property
    def failed(self) -> bool:
        caused = self.cause is not None or bool(self.text)
        return self.received is None and caused and not self.stopped and not self.left

    @property
    def exit_code(self) -> int:
        """128 + n if signal n ended the job; else that of the first cause (128 + n if signal n
        killed that worker), 1 if no worker is the cause; else 0.
        """
        if self.left and self.left_in_order:
            return self.leave_exit_code
        if self.received is not None:
            return 128 + self.received
        if self.cause is None:
            return 1 if self.failed else 0
        if self._died_in_stop:
            return TOLD_TO_STOP
        return self.cause.exit_code if self.cause.exit_code > 0 else 128 - self.cause.exit_code

    def first_cause(self, host: str) -> str:
        """The first cause in one line; empty if the job has not failed."""
        if not self.failed or self.cause is None:
            return self.text if self.failed else ""
        if (fault := self._told_by_ranks) is not None:
            place = fault.where.partition(" in ")[0]
            many = f", host {fault.host}" if self.cause.host_id else ""
            return Raised(fault.cause, place).told(f" (rank {fault.rank}{many})")
        if (error := self.cause.error) is not None:
            return error.told(f" ({self.cause.who(host).replace(' (', ', ', 1)}")
        return f"{self.cause.who(host)} {self.cause.how}"

    @property
    def advice(self) -> str:
        fault, cause = self._told_by_ranks, self.cause
        error = Raised(fault.cause) if fault is not None else cause.error if cause else None
        return error.advice if error is not None else ""

    @property
    def _told_by_ranks(self) -> FaultRecord | None:
        """The fault, unless it is the end of a process, of which the launcher knows more. It knows
        less of an exception such as `SystemExit`, if another rank has ended the job because of it.
        """
        fault, cause = self.fault, self.cause
        if fault is None or not ends(fault):
            return fault
        told = cause is not None and cause.exit_code == NO_RESTART
        return fault if told and fault.interruption == Interruption.BASE_EXCEPTION else None

    def output(self) -> list[str]:
        """The traceback or the last output of the first cause, with a line above it; empty if the
        user has seen it: it is in one of the lines that this launcher has passed on.
        """
        cause = self.cause
        if not self.failed or cause is None or not cause.last_output:
            return []
        if cause.shown and not cause.host and (cause.error or self._told_by_ranks):
            return []
        output = cause.last_output.splitlines()
        if cause.exit_code == NO_RESTART:  # the equal faults before it have the same traceback
            output = from_last_traceback(output)
        kind = "traceback:" if cause.source == "traceback" else "last lines on stderr:"
        return [kind, *(f"  {line}" for line in output)]


def summary(deaths: Sequence[Death], ending: Ending, host: str) -> list[str]:
    """The last lines of a job. A failed job's first cause comes after its other failures, and its
    output last, unless the user has seen it; otherwise the last line tells how the job has ended.
    Ranks that exited with 93 because of the first cause are not failures of their own.
    """
    cause = ending.cause if ending.failed else None
    others = [
        death
        for death in sorted(deaths, key=lambda death: death.when)
        if (cause is None or death.process != cause.process)
        and not (ending.stopped and death.decision is Decision.STOPPED)
        and not (cause is not None and cause.exit_code == death.exit_code == NO_RESTART)
    ]
    lines = ["broken links between hosts, as they were found:"] if ending.links else []
    lines.extend(f"  {text}" for text in ending.links)
    lines += ["failures:"] if others and cause is None else ["other failures:"] if others else []
    for death in others:
        same = cause and cause.error and death.error and death.error.repeats(cause.error)
        how = "failed with the same error" if same else death.how
        lines.append(f"  {death.who(host)} {how}: {death.decision.value}")
    code, after = f", exit code {ending.exit_code}", _after(ending)
    then = f",{after}" if after.startswith(" ") else after
    if ending.left:
        took = duration_text(ending.seconds)
        lines.append(f"this host has left the job after {took}{code}: {ending.left}")
    elif ending.stopped:
        signal_ = "as told" if ending.received is None else f"by {ending.received.name}"
        saved = "NOT saved, a fault prevented the last save" if ending.unsaved else "saved"
        lines.append(f"job stopped {signal_}: {saved}{code}{then}")
    elif ending.received is not None:
        unsaved = ": NOT saved" if ending.unsaved else ""
        lines.append(f"job ended by {ending.received.name}{unsaved}{code}{then}")
    elif ending.failed:
        lines += [f"job failed{code}{then}", f"first cause: {ending.first_cause(host)}"]
        lines += [ending.advice] if ending.advice else []
        lines += ending.output()
    else:
        lines.append(f"job completed{after}")
    return lines


def _after(ending: Ending) -> str:
    """After how long and which restarts. A host that joined late knows only its own time."""
    took, restarts = duration_text(ending.seconds), describe_restarts(ending.restarts)
    if ending.joined_late:
        return f"{restarts and f' after {restarts}'}; this host took part for {took}"
    return f" after {took}{restarts and f' and {restarts}'}"
