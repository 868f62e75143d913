"""One frame of `outlast top`: what the ranks do, the last fault, the checkpoints, the goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import psutil
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outlast.events.report import Report, describe_cause, headline_host, lost_time, printable
from outlast.events.types import CheckpointCommitted, CheckpointFailed
from outlast.metrics.live_run import LiveRun
from outlast.metrics.progress_page import Progress
from outlast.metrics.run_state import Process, State
from outlast.system.units import duration_text, size_text

_STYLES = {
    State.RUNNING: "green",
    State.RESERVE: "cyan",
    State.RESTARTING: "yellow",
    State.STARTING: "yellow",
    State.WAITING: "yellow",
    State.LOST: "red",
}
_OTHER_LINES = 14  # of a frame, apart from the rows of the ranks

_HEADINGS = ("rank", "state", "host", "pid", "restarts", "step", "steps/s", "CPU/step", "progress")


class Screen:
    """Draws frames of a run; remembers the last one for the rates of steps."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._before: dict[tuple[str, int], Progress] = {}
        self._cpu: dict[tuple[str, int], float] = {}

    def frame(self, height: int | None = None) -> RenderableType:
        """The run as of its last `poll`. `height`: the lines of the terminal; ranks that do not fit
        are summed up. By default all are shown.
        """
        report, logs = self._run.report(), self._run.follower
        lines = [self._fault(report), self._checkpoints(report)]
        if (host := headline_host(report)) is not None and host.wall_seconds:
            lost = " · ".join(lost_time(host)) or "none"
            lines.append(Text.assemble(("lost time   ", "bold"), lost))
        if logs.damaged_lines:
            lines.append(Text(f"{logs.damaged_lines} damaged lines: {logs.damaged[-1]}", "red"))
        ranks = self._ranks(height)
        shown = [line for line in lines if line.plain]
        return Group(self._title(report), self._members(), Text(), *ranks, Text(), *shown)

    def _title(self, report: Report) -> Text:
        run, longest = self._run, headline_host(report)
        text = Text.assemble((_line(run.name), "bold"), "  ", self._state())
        if longest is not None:
            text.append(f" · {duration_text(longest.wall_seconds)}")
        if report.goodput is not None:
            text.append(f" · goodput {100 * report.goodput:.2f} %")
        text.append(f" · {_line(report.restart_causes) or '0 restarts'}")
        if run.state.stop:
            text.append(f" · told to stop: {_line(run.state.stop)}", "yellow")
        return text

    def _state(self) -> tuple[str, str]:
        """What the run does, or how it ended, and the style."""
        run, codes = self._run, set(self._run.state.exit_codes.values())
        if not run.state.now:
            return "no events yet", "yellow"
        if run.over():
            if codes == {0}:
                return "finished", "bold green"
            if codes and run.state.stop:
                return f"stopped, with exit code {max(codes)}", "bold yellow"
            how = f" with exit code {max(codes)}" if codes else ": its processes no longer exist"
            return f"ended{how}", "bold red"
        if run.alive():
            return ("stopping", "bold yellow") if run.state.stop else ("running", "bold green")
        if run.own_host in run.state.now:
            return "no process on this host at present", "bold yellow"
        return "on other hosts", "bold"

    def _members(self) -> Text:
        state = self._run.state
        counts = Counter(process.state for process in state.processes.values())
        hosts = {process.host for process in state.current}
        parts = [
            f"{counts[State.RUNNING] + counts[State.RETURNED]} active",
            f"{counts[State.RESERVE]} reserve",
            f"{counts[State.STARTING] + counts[State.WAITING]} joining",
            f"{counts[State.RESTARTING]} restarting",
            f"{counts[State.LOST]} lost so far",
        ]
        parts += [f"{counts[s]} {s.value}" for s in (State.COMPLETED, State.ENDED) if counts[s]]
        parts.append(f"{len(hosts)} host{'' if len(hosts) == 1 else 's'}")
        if state.hosts_lost:
            parts.append(f"hosts lost: {_line(', '.join(state.hosts_lost.values()))}")
        if state.leaving:
            parts.append(f"leaving: {_line('; '.join(state.leaving.values()))}")
        return Text(" · ".join(parts))

    def _ranks(self, height: int | None) -> list[RenderableType]:
        processes = self._run.state.current
        room = len(processes) if height is None else max(3, height - _OTHER_LINES)
        # What is wrong is worth a row more than what is well.
        by_worth = sorted(processes, key=lambda process: process.state is State.RUNNING)
        hidden: Sequence[Process] = by_worth[room:]
        left_out = {id(process) for process in hidden}
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for heading in _HEADINGS:
            left = heading in ("state", "host")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        for process in processes:
            if id(process) not in left_out:
                table.add_row(*self._row(process))
        if not hidden:
            return [table]
        states = Counter(process.state.value for process in hidden)
        more = ", ".join(f"{count} {state}" for state, count in states.most_common())
        return [table, Text(f"and {len(hidden)} more: {more}", "dim")]

    def _row(self, process: Process) -> list[str | Text]:
        step, rate, cpu, idle = self._progress(process)
        state = Text(process.state.value, _STYLES.get(process.state, ""))
        return [
            "-" if process.rank < 0 else str(process.rank),
            Text("stopped", "bold red") if self._is_stopped(process) else state,
            Text(_line(process.host)),  # no markup
            str(process.pid),
            str(max(0, process.iteration)),
            "-" if step is None else str(step),
            "-" if rate is None else f"{rate:.3g}",
            "-" if cpu is None else duration_text(cpu),
            "-" if idle is None else f"{duration_text(idle)} ago",
        ]

    def _is_stopped(self, process: Process) -> bool:
        """Whether a process on this host is stopped (SIGSTOP), which it cannot record itself."""
        try:
            return (
                self._run.is_here(process)
                and psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
            )
        except psutil.Error:
            return False

    def _progress(
        self, process: Process
    ) -> tuple[int | None, float | None, float | None, float | None]:
        """Step, steps per second, CPU time of a step, and seconds since the last progress."""
        key = process.host, process.pid
        now = self._run.now(process.host)
        idle = None if now is None or process.over else max(0.0, now - process.seen)
        live = self._run.progress(process)
        if live is None:
            return process.step, process.rate, process.cpu_a_step, idle
        before = self._before.get(key)
        if before is None or live.at - before.at >= 0.5 or live.pings < before.pings:
            self._before[key] = live
        rate = process.rate
        if before is not None and before.iteration == live.iteration and live.at > before.at:
            steps = live.step and before.step
            done = live.step - before.step if steps else live.pings - before.pings
            rate = max(0, done) / (live.at - before.at)
            if done > 0 and live.cpu > before.cpu > 0:
                self._cpu[key] = (live.cpu - before.cpu) / done
        if live.progress and now is not None:
            idle = max(0.0, now - live.progress)
        step = max(live.step, process.step or 0) or process.step
        return step, rate, self._cpu.get(key, process.cpu_a_step), idle

    def _fault(self, report: Report) -> Text:
        restart = next((r for r in reversed(report.restarts) if r.cause is not None), None)
        if restart is None or restart.cause is None:
            return Text()
        cause = restart.cause
        text = Text.assemble(("last fault  ", "bold"), describe_cause(cause))
        now = self._run.now(cause.host)
        if now is not None and not self._run.over():
            ago = now - self._run.origin(cause.host) - cause.at
            text.append(f"; {duration_text(max(0.0, ago))} ago")
        if restart.phases.total is not None:
            text.append(f"; back after {duration_text(restart.phases.total)}")
        if restart.redone_steps is not None:
            text.append(f"; {restart.redone_steps} steps redone")
        return text

    def _checkpoints(self, report: Report) -> Text:
        state, newest = self._run.state, self._run.newest_save()
        committed, failed = state.saves(CheckpointCommitted), state.saves(CheckpointFailed)
        if newest is None and not failed:
            return Text()
        text = Text.assemble(("checkpoints ", "bold"))
        if newest is not None:
            save, age = newest
            text.append(f"newest: step {save.step}, {size_text(save.size_bytes)}")
            if not self._run.over():
                text.append(f", {duration_text(age)} old")
        text.append(f"; {committed} committed, {failed} failed")
        if report.saves is not None and report.saves.committed:
            text.append(f"; blocked {duration_text(report.saves.blocked_median)} each (median)")
        return text


def _line(text: str) -> str:
    """Text from a log, without characters that would control the terminal."""
    return printable(text).replace("\n", "\N{REPLACEMENT CHARACTER}")
