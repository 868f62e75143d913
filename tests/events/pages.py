"""What an HTML page consists of, read with the parser of the standard library; and a large run."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser

from events.synthetic_run import SyntheticRun
from events.test_goodput import own, restored, save

_VOID = ("meta", "img")


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text.

    Raises:
        AssertionError: if elements are not closed in the order in which they were opened.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.raw: dict[str, str] = {}  # the content of the script and of the style
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def named(self, name: str) -> list[dict[str, str]]:
        """The attributes of all elements with this name."""
        return [attributes for element, attributes in self.elements if element == name]

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, {key: value or "" for key, value in attributes}))
        if name not in _VOID:
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] in ("script", "style"):
            self.raw[self._open[-1]] = text
        else:
            self.text += text


def large_run(restarts: int = 300) -> SyntheticRun:
    """More than 10,000 events: restarts of all kinds on two hosts, with a save before each."""
    run = SyntheticRun(hosts=["a", "a", "b", "b"], offsets={"b": 5000.0})
    run.begin(at=0.0)
    for number in range(1, restarts + 1):
        at = number * 10.0
        save(run, number * 20, began=at - 5.0)
        rank = number % 4
        if number % 3 == 0:
            run.death(run.view[rank], at=at)
            host = run.hosts[run.view[rank]]
            run.restart(at=at, lost=[run.view[rank]], joiners=[host])
        else:
            cause = f"Error{number % 50}: {'a long message ' * 20}"
            frames = '  File "train.py", line 7, in step\n' * 40
            run.fault(run.view[rank], at=at, cause=cause, traceback=frames)
            run.restart(at=at)
        restored(run, number * 20, at=at + 1.0)
    run.complete(at=restarts * 10.0 + 5.0)
    return run


def hostile_run() -> SyntheticRun:
    """All text that comes from logs has markup in it."""
    bad = '"><script>alert(1)</script><img src=http://a.test/x onerror="alert(2)">'
    run = SyntheticRun(hosts=[f"a{bad}", "b"], offsets={"b": 700.0})
    run.begin(at=0.0)
    save(run, 10, began=2.0)
    run.fault(0, at=5.0, cause=f"ValueError: {bad}", traceback=f"</pre></style>{bad}")
    run.restart(at=5.0)
    restored(run, 10, at=6.0)
    own(run, 0, dataclasses.replace(run.events[-1], rank=0), 6.5)
    run.complete(at=10.0)
    return run
