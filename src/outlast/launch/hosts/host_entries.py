"""The entries of the chain on the hosts themselves: their links, checks and faults. See `plan`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from outlast.coordination.replicated.hosts import ChainEntry

if TYPE_CHECKING:
    from outlast.launch.hosts.plan import JobPlan


class Probe(ChainEntry, frozen=True, tag="probe"):
    """A link between hosts may be broken: each of these hosts is to try to reach the others.
    The members of the wrapped call wait for its end, under `key` in the workers' store.
    """

    attempt: int
    key: str
    hosts: tuple[str, ...]

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if not plan.running or self.attempt != plan.attempt or self.key == plan.probed:
            return plan
        return replace(plan, probed=self.key, probe=self)


class Links(ChainEntry, frozen=True, tag="links"):
    """What a probe has found: the hosts that leave the job, each with the reason, and with the
    hosts that it has to reach before it joins again. Without them, all links are whole.
    """

    attempt: int
    key: str
    excluded: dict[str, str] = msgspec.field(default_factory=dict)
    waits_for: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def applied_to(self, plan: JobPlan) -> JobPlan:
        probe = plan.probe
        if (
            not plan.running
            or probe is None
            or (probe.attempt, probe.key) != (self.attempt, self.key)
        ):
            return plan
        return replace(plan, probe=None, excluded={**plan.excluded, **self.excluded})


class Check(ChainEntry, frozen=True, tag="check"):
    """Each of these hosts makes an all-reduce with its two neighbors in this ring, before any of
    them that is new runs ranks.
    """

    attempt: int
    key: str
    hosts: tuple[str, ...]

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return replace(plan, check=self) if plan.check is None and not plan.ends else plan


class Checked(ChainEntry, frozen=True, tag="checked"):
    """What a check has found. `passed` are the hosts that have made an all-reduce with a host that
    stays; `excluded` and `waits_for` are as in `Links`. A host in neither is checked again.
    """

    key: str
    passed: list[str] = msgspec.field(default_factory=list)
    excluded: dict[str, str] = msgspec.field(default_factory=dict)
    waits_for: dict[str, list[str]] = msgspec.field(default_factory=dict)

    def applied_to(self, plan: JobPlan) -> JobPlan:
        if plan.check is None or self.key != plan.check.key:
            return plan
        checked = plan.checked | set(self.passed)
        excluded = {**plan.excluded, **self.excluded}
        return replace(plan, check=None, checked=checked, excluded=excluded)


class Blame(ChainEntry, frozen=True, tag="blame"):
    """A rank of this host was the first cause of a restart. `restart` names that, as it is counted
    once; `cause` is in words.
    """

    host: str
    restart: str
    cause: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        known = any(each.restart == self.restart for each in plan.blames)
        return plan if known else replace(plan, blames=(*plan.blames, self))


class Unfit(ChainEntry, frozen=True, tag="unfit"):
    """A host has had too many faults: it leaves the job, and gets no more ranks."""

    host: str
    reason: str

    def applied_to(self, plan: JobPlan) -> JobPlan:
        return replace(plan, unfit={**plan.unfit, self.host: self.reason})
