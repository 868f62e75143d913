"""Runs the methods on their subjects: in turn, by seeds, until the time is over; prints a table.

Each trial is a process of its own, so that a hang or a crash of it is a violation like others.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import faulthandler
import json
import logging
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .calls import Calls, initialize, preloaded, why_not
from .crash_states import Result
from .crash_states import Subject as CrashSubject
from .failing_calls import Subject as FailingSubject

TESTS = Path(__file__).parents[1]
_HOSTS = "hosts:"
_JOBS = (_HOSTS, "programs", "states")
_SLICE_S = 25.0
_NET_S = 600.0
"""How long a trial may take beyond its slice, before it counts as a hang."""

Trial = Callable[[Calls, int, float, "int | None"], Result]


def trials() -> dict[str, Trial]:
    """The methods on their subjects, by name."""
    from .crash_states import try_crash_states
    from .ext4 import try_ext4
    from .failing_calls import try_failing_calls
    from .forged_files import try_forged_files
    from .subjects import checkpointer as c
    from .subjects.elastic_states import JobSubject, RegisteredStates, StateFile
    from .subjects.host_record import HostRecord
    from .subjects.lightning_pointers import LightningPointers
    from .subjects.several_ranks import TwoRanks

    def crash(make: Callable[[random.Random], CrashSubject]) -> Trial:
        return lambda calls, seed, until, most: try_crash_states(
            make(random.Random(seed)), calls, seed, until=until, most=most
        )

    def fail(make: Callable[[], FailingSubject]) -> Trial:
        return lambda calls, seed, until, most: try_failing_calls(
            make(), calls, seed, until=until, most=most
        )

    def forge(calls: Calls, seed: int, until: float, most: int | None) -> Result:
        return Result(*try_forged_files(seed, until=until, most=most))

    return {
        "crash:checkpointer": crash(c.new_steps),
        "crash:checkpointer-first": crash(c.first_step),
        "crash:checkpointer-replaced": crash(c.replaced_step),
        "crash:checkpointer-recycled": crash(c.recycled_files),
        "crash:two-ranks": crash(TwoRanks),
        "crash:lightning-epochs": crash(lambda random: LightningPointers("epochs")),
        "crash:lightning-last": crash(lambda random: LightningPointers("last")),
        "crash:states": crash(lambda random: RegisteredStates()),
        "crash:state-file": crash(lambda random: StateFile()),
        "crash:job": crash(lambda random: JobSubject()),
        "crash:record": crash(lambda random: HostRecord()),
        "ext4:checkpointer": try_ext4,
        "fail:save": fail(lambda: c.FailingSave("save")),
        "fail:save-replaced": fail(lambda: c.FailingSave("save-replaced", replaced=True)),
        "fail:save-recycled": fail(lambda: c.FailingSave("save-recycled", keep=1)),
        "fail:restore": fail(c.FailingRestore),
        "forged:checkpointer": forge,
        **trials_of_jobs(),
    }


def trials_of_jobs() -> dict[str, Trial]:
    """Those whose subject is a whole job, and not a process whose calls are recorded. They need no
    torch in this process: it takes long to import.
    """
    from .hosts.jobs import try_etcd_jobs, try_jobs
    from .hosts.store import try_etcd, try_liveness, try_safety
    from .programs.trial import try_programs
    from .states.trial import try_states

    etcd = shutil.which("etcd") is not None
    return {
        "hosts:safety": try_safety,
        "hosts:liveness": try_liveness,
        "hosts:jobs": try_jobs,
        **({"hosts:etcd": try_etcd, "hosts:etcd-jobs": try_etcd_jobs} if etcd else {}),
        "programs": try_programs,
        "states": try_states,
    }


@dataclasses.dataclass
class Report:
    """What one trial has found; `seconds` that it took."""

    name: str
    seed: int
    seconds: float
    tried: int
    violations: list[str]


def run_trial(
    name: str,
    seed: int,
    seconds: float,
    *,
    most: int | None = None,
    python: str = sys.executable,
) -> Report:
    """Runs one trial in a process of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        root = Path(folder).resolve() / "root"
        root.mkdir()
        command = [python, "-m", "torture", "--child", name, "--seed", str(seed)]
        command += ["--seconds", str(seconds)] + (["--most", str(most)] if most else [])
        with preloaded(root) as env:
            env["PYTHONPATH"] = os.pathsep.join([str(TESTS), env.get("PYTHONPATH", "")])
            env.setdefault("OMP_NUM_THREADS", "1")
            try:
                done = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=seconds + _NET_S + 30
                )
                out, err, code = done.stdout, done.stderr, done.returncode
            except subprocess.TimeoutExpired as e:
                out, err, code = "", str(e.stderr), -1
    took = time.monotonic() - began
    lines = [line for line in out.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        return Report(name, seed, took, **json.loads(lines[-1]))
    what = f"the process has ended with {code}, or hangs: {err[-3000:]}"
    return Report(name, seed, took, 0, [what])


def _child(name: str, seed: int, seconds: float, most: int | None) -> int:
    logging.disable(logging.CRITICAL)
    faulthandler.dump_traceback_later(seconds + _NET_S, exit=True)
    of_job = name.startswith(_JOBS)
    if not of_job:
        initialize()
    result = (trials_of_jobs() if of_job else trials())[name](
        Calls.attached(), seed, time.monotonic() + seconds, most
    )
    print(json.dumps(dataclasses.asdict(result)), flush=True)
    return 0


def replay(report: Report, most: int | None = None) -> str:
    """The command that runs a trial again, to its end; on hosts, with the same planned faults."""
    return (
        f"PYTHONPATH=tests {shlex.quote(sys.executable)} -m torture --only {report.name} "
        f"--seed {report.seed} --once" + (f" --most {most}" if most else "")
    )


def table(reports: list[Report], base: int) -> str:
    """The table of what was tried, in Markdown."""
    rows: dict[str, list[Report]] = collections.defaultdict(list)
    for report in reports:
        rows[report.name].append(report)
    lines = ["| method: subject | runs | tried | violations |", "|---|--:|--:|--:|"]
    for name in sorted(rows):
        each = rows[name]
        tried, wrong = sum(r.tried for r in each), sum(len(r.violations) for r in each)
        lines.append(f"| {name.replace(':', ': ')} | {len(each)} | {tried:,} | {wrong:,} |")
    tried, wrong = sum(r.tried for r in reports), sum(len(r.violations) for r in reports)
    lines.append(f"| all, by seed {base} | {len(reports)} | {tried:,} | {wrong:,} |")
    return "\n".join(lines)


def _not_possible(names: list[str]) -> dict[str, str]:
    """The methods among these that cannot be used here, and why."""
    from . import ext4
    from .hosts import store

    methods = {"ext4:": ext4.why_not, _HOSTS: store.why_not}
    needed = {m: asked for m, asked in methods.items() if any(n.startswith(m) for n in names)}
    return {method: why for method, asked in needed.items() if (why := asked())}


def main() -> int:
    """The program `python -m torture`; returns its exit code."""
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", help="names of trials that begin so, with commas between them")
    parser.add_argument("--once", action="store_true", help="each trial once, to its end")
    parser.add_argument("--most", type=int, help="states, failures or seconds of a trial")
    parser.add_argument("--markdown", type=Path, help="also writes the table to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options.child, options.seed, options.seconds, options.most)
    if why := why_not():
        print(f"not possible here: {why}", file=sys.stderr)
        return 2
    only = tuple((options.only or "").split(","))
    known = trials_of_jobs() if all(name.startswith(_JOBS) for name in only) else trials()
    names = [name for name in known if name.startswith(only)]
    for method, why in _not_possible(names).items():
        print(f"without {method} {why}", flush=True)
        names = [name for name in names if not name.startswith(method)]
    if not names:
        parser.error(f"--only {options.only} is no beginning of one of {', '.join(trials())}")
    slice_s = options.seconds if options.once else min(_SLICE_S, options.seconds)
    end = time.monotonic() + options.seconds
    reports: list[Report] = []

    def one(number: int) -> None:
        if number >= len(names) and (options.once or time.monotonic() > end):
            return
        # The first seed of each trial is the given one, so that a report's seed replays it.
        seed = options.seed + number // len(names)
        report = run_trial(names[number % len(names)], seed, slice_s, most=options.most)
        reports.append(report)
        found = f"{len(report.violations)} violations" if report.violations else "as it must be"
        print(f"{report.name} seed {seed}: {report.tried} tried, {found}", flush=True)
        for text in report.violations[:5]:
            print(f"    {text}", flush=True)
        if report.violations:
            print(f"    replay: {replay(report, options.most)}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        number = 0
        running: set[concurrent.futures.Future[None]] = set()
        while number < len(names) or (not options.once and time.monotonic() < end):
            running.add(pool.submit(one, number))
            number += 1
            if len(running) >= options.jobs:
                done, running = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for each in done:
                    each.result()
        for each in running:
            each.result()
    text = table(reports, options.seed)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    return 1 if any(report.violations for report in reports) else 0
