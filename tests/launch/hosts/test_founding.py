"""Which endpoint founds the group: `Founding` driven by a model of the endpoints."""

from __future__ import annotations

import random

import pytest

from outlast.launch.hosts.replicated.founding import SILENCE_S, STALE_S, Founding


def test_one_endpoint_founds_after_the_silence() -> None:
    founding = Founding(1, 0, began=10.0)
    assert not founding.candidate(10.0 + SILENCE_S - 0.01)
    assert founding.candidate(10.0 + SILENCE_S)
    assert founding.founds()


def test_news_of_a_group_begins_the_silence_again() -> None:
    founding = Founding(1, 0, began=10.0)
    founding.heard_of_group(11.0)
    assert not founding.candidate(11.0 + SILENCE_S - 0.01)


def test_an_endpoint_leaves_it_to_one_with_a_lower_index() -> None:
    founding = Founding(3, 1, began=0.0)
    now = SILENCE_S
    founding.is_fresh(0, now)
    founding.is_fresh(2, now)
    assert not founding.candidate(now)
    assert founding.candidate(now + STALE_S)


@pytest.mark.parametrize(("count", "needed"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2)])
def test_the_first_endpoint_needs_a_quorum(count: int, needed: int) -> None:
    founding = Founding(count, 0, began=0.0)
    for other in range(1, count):
        assert founding.founds() == (other > needed)
        founding.granted(other, founding.attempt)
    assert founding.founds()


def test_a_grant_is_given_once() -> None:
    founding = Founding(3, 2, began=0.0)
    assert founding.asked(1, attempt=1)
    assert founding.asked(1, attempt=1)  # again: its answer was lost
    assert not founding.asked(0, attempt=1)
    assert not founding.candidate(SILENCE_S)
    founding.released(1, attempt=0)  # an old message
    assert not founding.asked(0, attempt=1)
    founding.released(1, attempt=1)
    assert founding.asked(0, attempt=1)


def test_late_grants_to_a_withdrawn_attempt_do_not_count() -> None:
    founding = Founding(3, 1, began=0.0)
    assert not founding.founds()
    founding.is_fresh(0, now=SILENCE_S)
    assert founding.withdraw(SILENCE_S) == 1
    founding.granted(2, attempt=1)
    assert founding.holder() is None
    assert not founding.founds()


class Endpoints:
    """Fresh endpoints that exchange messages in any order; a message may be lost."""

    def __init__(self, count: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.parts = {i: Founding(count, i, self.random.uniform(0, 2)) for i in range(count)}
        self.attempts_granted: list[tuple[int, int, int]] = []
        self.messages: list[tuple[str, int, int, int]] = []
        self.founders: set[int] = set()

    def step(self) -> None:
        """One endpoint acts, or one message arrives or is lost."""
        self.now += self.random.uniform(0.0, 0.05)
        if self.messages and self.random.random() < 0.8:
            message = self.messages.pop(self.random.randrange(len(self.messages)))
            if self.random.random() < 0.9:
                self.deliver(*message)
        else:
            self.act(self.random.choice(list(self.parts)))

    def act(self, index: int) -> None:
        part = self.parts[index]
        others = [i for i in self.parts if i != index]
        if index in self.founders:
            return
        self.messages += [("fresh", index, other, 0) for other in others]
        withdrawn = part.withdraw(self.now)
        if withdrawn:
            self.messages += [("withdraw", index, other, withdrawn) for other in others]
        if part.candidate(self.now):
            if part.founds():
                self.founders.add(index)
            else:
                self.messages += [("ask", index, other, part.attempt) for other in others]

    def deliver(self, kind: str, sender: int, receiver: int, attempt: int) -> None:
        part = self.parts[receiver]
        if receiver in self.founders:
            return
        if kind == "fresh":
            part.is_fresh(sender, self.now)
        elif kind == "ask" and part.asked(sender, attempt):
            self.messages.append(("grant", receiver, sender, attempt))
        elif kind == "grant":
            part.granted(sender, attempt)
        elif kind == "withdraw":
            part.released(sender, attempt)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_exactly_one_endpoint_founds_whatever_the_order_of_messages(count: int) -> None:
    for seed in range(40):
        endpoints = Endpoints(count, seed)
        for _ in range(4000):
            endpoints.step()
            assert len(endpoints.founders) <= 1, f"seed {seed}: {endpoints.founders}"
            if endpoints.founders and endpoints.now > 20:
                break
        assert len(endpoints.founders) == 1, f"seed {seed}: none founds"
