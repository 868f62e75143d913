"""Small states for tests: text, and one that fails."""

from __future__ import annotations

from typing import BinaryIO

from outlast.elastic import State


class Text(State):
    """Text, and the methods that were called."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(name)
        self.text = text
        self.calls: list[str] = []

    def save(self, fileobj: BinaryIO) -> None:
        self.calls.append("save")
        fileobj.write(self.text.encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.calls.append("load")
        self.text = fileobj.read().decode()

    def sync(self) -> None:
        self.calls.append("sync")


class Failing(Text):
    """A state that raises in the given methods."""

    def __init__(self, name: str, *methods: str) -> None:
        super().__init__(name)
        self.methods = set(methods)

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"half of it")
        self._fail("save")

    def load(self, fileobj: BinaryIO) -> None:
        super().load(fileobj)
        self._fail("load")

    def sync(self) -> None:
        self._fail("sync")

    def _fail(self, method: str) -> None:
        if method in self.methods:
            raise RuntimeError(f"no {method} today")
