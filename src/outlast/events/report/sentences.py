"""The words of a report: sentences that say what failed, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from outlast.events.report.model import Cause, Party, Restart

__all__ = ["cause_words", "duration", "name_restart", "one_line", "plural", "share", "story"]

_DID = {
    "EXCEPTION": "raised an exception",
    "BASE_EXCEPTION": "left the job",
    "SOFT_TIMEOUT": "made no progress (soft timeout)",
    "HARD_TIMEOUT": "made no progress and was ended (hard timeout)",
    "TERMINATED": "died",
    "UNRESPONSIVE": "was not heard of any more",
}
_LONGEST = 240
_SHORT = 100
_MANY = 8
_SOURCE = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")
"""Where in torch's or gloo's own source a message comes from; the long path helps nobody."""
_LAST_FRAME = re.compile(r'^ *File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)


def plural(count: int, noun: str) -> str:
    """`count` and the noun: 1 rank, 2 ranks, 2 processes."""
    ending = "" if count == 1 else ("es" if noun.endswith("s") else "s")
    return f"{count} {noun}{ending}"


def duration(seconds: float) -> str:
    """A duration as people say it: 850 µs, 12.3 ms, 4.56 s, 3 min 20 s."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def share(part: float) -> str:
    """A part of a whole as a percentage, never rounded up to all of it."""
    return "100 %" if part >= 1 else f"{min(part * 100, 99.99):.2f} %"


def one_line(text: str) -> str:
    """The first line that says something, without control characters and paths of C++ sources."""
    lines = (_SOURCE.sub("", line).strip() for line in text.splitlines())
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else "�" for char in line)


def cause_words(restart: Restart) -> str:
    """The first cause in a few words, for a table."""
    cause = restart.cause
    if cause is not None:
        what = cause.message or cause.exit or cause.interruption
        return f"rank {cause.rank}: {one_line(what)}"
    if restart.joined:
        return "new ranks came to join"
    return one_line(restart.reason) or "not recorded"


def name_restart(number: int, restart: Restart, calls: int) -> str:
    """A heading: which restart, of which iteration (and call, where there are several)."""
    call = f", call {restart.call}" if calls > 1 else ""
    return f"{number}. End of iteration {restart.iteration}{call}, {restart.at:.3f} s into the run"


def story(restart: Restart) -> list[str]:
    """What happened, a sentence each."""
    sentences = [*_what_failed(restart)]
    detection, total = restart.phases.detection, restart.phases.total
    if detection is not None:
        sentences.append(f"Every survivor on its host knew after {duration(detection)}.")
    for place in restart.swallowed:
        sentences.append(f"User code swallowed the interrupt at {one_line(place)}.")
    if restart.lost:
        told = {cause.message for cause in (restart.cause, *restart.others) if cause is not None}
        sentences.append(f"Lost: {_parties(restart.lost, told)}.")
    if restart.joined:
        sentences.append(f"Joined: {_parties(restart.joined, set())}.")
    if not restart.resumed:
        sentences.append("No rank entered the function again.")
    elif total is not None:
        since = "it was first seen" if restart.phases.total_from_seen else "the fault"
        sentences.append(
            f"{plural(restart.world_size_after, 'rank')} in the function again, "
            f"{duration(total)} after {since}."
        )
    else:
        sentences.append(f"{plural(restart.world_size_after, 'rank')} in the function again.")
    return sentences


def _what_failed(restart: Restart) -> Iterable[str]:
    cause = restart.cause
    if cause is None:
        reason = one_line(restart.reason)
        if restart.joined:
            yield "No fault: the iteration ended so that new ranks could take part."
        else:
            yield f"No process recorded a fault{f'; a survivor saw: {reason}' if reason else ''}."
        return
    yield f"Rank {cause.rank} on {one_line(cause.host)} {_did(cause)}."
    if cause.consequence:
        yield "That looks like the echo of a fault of which no log tells."
    for other in restart.others:
        if not other.consequence:
            yield f"Rank {other.rank}, too, {_did(other)}."
    echoes = [other for other in restart.others if other.consequence]
    if echoes:
        ranks = _listed([str(echo.rank) for echo in echoes])
        message = _cut(one_line(echoes[0].message), _SHORT)
        who = "rank" if len(echoes) == 1 else "ranks"
        yield f"Probably in consequence, {who} {ranks} failed: {message}."


def _did(cause: Cause) -> str:
    words = _DID.get(cause.interruption.upper().rpartition(".")[2], "failed")
    message = _cut(one_line(cause.message), _LONGEST)
    text = f"{words}: {message}" if message else words
    frames = list(_LAST_FRAME.finditer(cause.traceback))
    if frames:
        frame = frames[-1]
        file = one_line(frame["file"]).rpartition("/")[2]
        text += f" ({file}, line {frame['line']}, in {one_line(frame['name'])})"
    return f"{text} [{cause.exit}]" if cause.exit else text


def _parties(parties: Iterable[Party], told: set[str]) -> str:
    return _listed(
        [
            f"rank {party.rank} on {one_line(party.host)}"
            + (f" ({one_line(party.reason)})" if party.reason and party.reason not in told else "")
            for party in parties
        ]
    )


def _listed(names: Sequence[str]) -> str:
    """All of a few, the first of many."""
    if len(names) > _MANY:
        names = [*names[:_MANY], f"{len(names) - _MANY} more"]
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1].rstrip(" .") + "…"
