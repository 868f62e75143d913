"""The sentences of a report: the faults, the recovery that followed, the checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from outlast.events.report.model import Cause, Party, Restart, Saves

_FAILURES = {
    "EXCEPTION": "raised an exception",
    "BASE_EXCEPTION": "left the job",
    "SOFT_TIMEOUT": "made no progress (soft timeout)",
    "HARD_TIMEOUT": "made no progress and was ended (hard timeout)",
    "TERMINATED": "died",
    "UNRESPONSIVE": "stopped responding",
}
_LONG = 240
_SHORT = 100
_LISTED = 8
_SOURCE = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")
"""The path of a source file in a torch or gloo message; it is long and of no use here."""
_LAST_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)


def plural(count: int, noun: str) -> str:
    """`count` and the noun: 1 rank, 2 ranks, 2 processes."""
    ending = "" if count == 1 else ("es" if noun.endswith("s") else "s")
    return f"{count} {noun}{ending}"


def duration(seconds: float) -> str:
    """A duration with its unit: 850 µs, 12.3 ms, 4.56 s, 3 min 20 s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def share(part: float) -> str:
    """A fraction as a percentage, never rounded up to 100 %."""
    return "100 %" if part >= 1 else f"{min(part * 100, 99.99):.2f} %"


def one_line(text: str) -> str:
    """The first non-empty line, without control characters and paths of C++ sources."""
    lines = (_SOURCE.sub("", line).strip() for line in text.splitlines())
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else "�" for char in line)


def cause_text(restart: Restart) -> str:
    """The first cause in a few words, for a table."""
    cause = restart.cause
    if cause is not None:
        what = cause.message or cause.exit or cause.interruption
        return f"rank {cause.rank}: {one_line(what)}"
    if restart.joined:
        return "new ranks joined"
    return one_line(restart.reason) or "not recorded"


def restart_title(number: int, restart: Restart, calls: int) -> str:
    """A heading: number of the restart, its iteration, and its call if there are several."""
    call = f", call {restart.call}" if calls > 1 else ""
    return f"{number}. End of iteration {restart.iteration}{call}, {restart.at:.3f} s into the run"


def describe_restart(restart: Restart) -> list[str]:
    """Sentences about one restart."""
    sentences = [*_describe_failure(restart)]
    detection, total = restart.phases.detection, restart.phases.total
    if detection is not None:
        sentences.append(f"Detected by every survivor on its host after {duration(detection)}.")
    for place in restart.swallowed:
        sentences.append(f"User code swallowed the interrupt at {one_line(place)}.")
    if restart.lost:
        known = {cause.message for cause in (restart.cause, *restart.others) if cause is not None}
        sentences.append(f"Lost: {_parties(restart.lost, known)}.")
    if restart.joined:
        sentences.append(f"Joined: {_parties(restart.joined, set())}.")
    if not restart.resumed:
        return [*sentences, "No rank entered the function again."]
    since = "it was first detected" if restart.phases.total_from_seen else "the fault"
    when = "" if total is None else f" {duration(total)} after {since}"
    ranks = plural(restart.world_size_after, "rank")
    return [*sentences, f"{ranks} back in the function{when}."]


def describe_saves(saves: Saves) -> list[str]:
    """Sentences about the checkpoints."""
    sentences = []
    if saves.committed:
        sentences.append(
            f"{plural(saves.committed, 'checkpoint')} of {saves.size_bytes / 1e6:.3g} MB "
            f"committed: each blocked training for {duration(saves.blocked_median)} (median; "
            f"{duration(saves.blocked_worst)} at worst) and was durable after "
            f"{duration(saves.durable_median)}."
        )
    if saves.failed:
        steps = ", ".join(str(step) for step, _ in saves.failed)
        sentences.append(f"Failed on all ranks, not committed: step {steps}.")
    if saves.passed_over:
        steps = ", ".join(str(step) for step, _ in saves.passed_over)
        sentences.append(f"Damaged, skipped by a restore: step {steps}.")
    if saves.restored:
        each = ", ".join(f"step {step} from {source}" for step, source in saves.restored)
        sentences.append(f"Restored: {each}.")
    return sentences


def _describe_failure(restart: Restart) -> Iterable[str]:
    cause = restart.cause
    if cause is None:
        reason = one_line(restart.reason)
        if restart.joined:
            yield "No fault: the iteration ended so that new ranks could join."
        else:
            yield f"No process recorded a fault{f'; a survivor saw: {reason}' if reason else ''}."
        return
    yield f"Rank {cause.rank} on {one_line(cause.host)} {_failure(cause)}."
    if cause.consequence:
        yield "That looks like the consequence of a fault that is not in the logs."
    for other in restart.others:
        if not other.consequence:
            yield f"Rank {other.rank} also {_failure(other)}."
    consequences = [other for other in restart.others if other.consequence]
    if consequences:
        ranks = _listed([str(other.rank) for other in consequences])
        message = _cut(one_line(consequences[0].message), _SHORT)
        noun = "rank" if len(consequences) == 1 else "ranks"
        yield f"Probably as a consequence, {noun} {ranks} failed: {message}."


def _failure(cause: Cause) -> str:
    verb = _FAILURES.get(cause.interruption.upper().rpartition(".")[2], "failed")
    message = _cut(one_line(cause.message), _LONG)
    text = f"{verb}: {message}" if message else verb
    frames = list(_LAST_FRAME.finditer(cause.traceback))
    if frames:
        frame = frames[-1]
        file = one_line(frame["file"]).rpartition("/")[2]
        text += f" ({file}, line {frame['line']}, in {one_line(frame['name'])})"
    return f"{text} [{cause.exit}]" if cause.exit else text


def _parties(parties: Iterable[Party], known: set[str]) -> str:
    return _listed(
        [
            f"rank {party.rank} on {one_line(party.host)}"
            + (f" ({one_line(party.reason)})" if party.reason and party.reason not in known else "")
            for party in parties
        ]
    )


def _listed(names: Sequence[str]) -> str:
    """A list in words; a long one is shortened to its first names."""
    if len(names) > _LISTED:
        names = [*names[:_LISTED], f"{len(names) - _LISTED} more"]
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip(" .") + "…"
