"""The group of the agents themselves (`--rdzv-backend c10d`): no service besides them is needed."""

from __future__ import annotations

import contextlib
import os
import threading
import time

from outlast.coordination.replicated.hosts import HostInfo
from outlast.coordination.replicated.quorum import Timing
from outlast.coordination.replicated.table import entry_key
from outlast.errors import LaunchError
from outlast.launch.hosts.host_group import GroupSpec, GroupState
from outlast.launch.hosts.plan import Entry, decode
from outlast.launch.hosts.replicated.endpoints import Endpoint, listen, resolve
from outlast.launch.hosts.replicated.record import Record, open_record
from outlast.launch.hosts.replicated.service import HostService
from outlast.launch.hosts.server.combining import Upstream
from outlast.launch.hosts.server.loop_store import LoopStore, wait_for_call
from outlast.system.processes import readable

_LOOK_S = 1.0
"""Between two attempts to resolve the names of endpoints."""
_SAY_S = 5.0
"""After how long a host that has not joined says what it waits for, and says it when it changes."""
_ALL_NAMES_S = 10.0
"""How long to wait for the names of all endpoints; then one is enough."""


class ReplicatedGroup:
    """A `HostGroup` whose store lives in the agents. `start` joins it."""

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        self._timing = Timing(lease=spec.lease_s)
        self._service: HostService | None = None
        self._wakeup = -1
        self._record: Record | None = None

    @property
    def me(self) -> HostInfo:
        return self._started().me

    @property
    def store(self) -> LoopStore:
        return self._store_of(self._started())

    @property
    def workers(self) -> LoopStore:
        return self._store_of(self._started().server)

    def _store_of(self, upstream: Upstream) -> LoopStore:
        run = f"run {self._spec.run_id!r}"
        return LoopStore(self._started(), upstream, run, self._spec.lease_s)

    def start(self) -> None:
        limit = time.monotonic() + self._spec.join_limit_s
        try:
            endpoints = self._resolved(limit)
            self._spec.page.renew(0.0)  # none is held yet, and no worker runs
            self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            while not self._await_join(self._serve(endpoints), endpoints, limit):
                pass  # as another host
            self._wake()  # the first state, of which `_await_join` has taken the event
        except BaseException:
            self.close(leave=True)
            raise

    def wakeup_fd(self) -> int:
        return self._wakeup

    def poll(self) -> GroupState:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wakeup)
        return self._started().state

    def claim(self, number: int, entry: Entry) -> Entry:
        return decode(self.store.claim(entry_key(number), entry.encode()))

    def new_attempt(self, attempt: int) -> None:
        service = self._started()
        wait_for_call(service, lambda: service.server.new_attempt(attempt))

    def close(self, *, leave: bool) -> None:
        if self._service is not None:
            self._service.close(leave=leave)
        if self._record is not None:
            self._record.close()
        if self._wakeup >= 0:
            os.close(self._wakeup)
            self._wakeup = -1

    # ------------------------------------------------------------------ parts of `start`
    def _resolved(self, limit: float) -> list[Endpoint]:
        """The endpoints, with the addresses of all of them, or of some if the others take long."""
        patience = min(limit, time.monotonic() + _ALL_NAMES_S)
        say_at, told = time.monotonic() + _SAY_S, ""
        names = ", ".join(host for host, _ in self._spec.endpoints)
        # A name server that does not answer may keep the first lookup for longer than that.
        slow = f"waits for the addresses of {names} (--rdzv-endpoint)"
        saying = threading.Timer(_SAY_S, self._spec.say, [slow])
        saying.daemon = True
        saying.start()
        while True:
            endpoints = [resolve(host, port) for host, port in self._spec.endpoints]
            saying.cancel()
            problems = "; ".join(f"{e}: {e.problem}" for e in endpoints if e.address is None)
            now = time.monotonic()
            if not problems or (now >= patience and problems.count(";") + 1 < len(endpoints)):
                return endpoints
            if now >= limit:
                raise LaunchError(f"--rdzv-endpoint: no endpoint can be reached: {problems}")
            if now >= say_at and problems != told:
                self._spec.say(f"not in a group yet (--rdzv-endpoint): {problems}")
                told = problems
            time.sleep(_LOOK_S)

    def _serve(self, endpoints: list[Endpoint]) -> HostService:
        place = listen(endpoints, self._spec.local_addr)
        if self._record is None:
            folder = self._spec.conf.get("record_dir", "")
            self._record = open_record(
                self._spec.run_id, self._spec.endpoints, place.address, folder
            )
        service = self._service = HostService(
            self._spec.run_id,
            self._spec.host(),
            endpoints,
            place,
            self._timing,
            self._spec.page,
            self._wake,
            self._record,
            self._spec.secret,
        )
        service.start()
        return service

    def _await_join(self, service: HostService, endpoints: list[Endpoint], limit: float) -> bool:
        """Returns whether this host has joined, or `False` if it must join again."""
        look = time.monotonic() + _LOOK_S
        say_at, told = time.monotonic() + _SAY_S, ""
        while not service.joined:
            error = service.state.error
            if error and service.joins_again():
                self._spec.say(f"{error}; it looks for the group again")
                service.close(leave=False)
                return False
            if error:
                raise LaunchError(f"cannot join run {self._spec.run_id!r}: {error}")
            now = time.monotonic()
            if now >= limit:
                raise LaunchError(
                    f"no group of run {self._spec.run_id!r} within "
                    f"{self._spec.join_limit_s:g} s (--rdzv-endpoint): {service.problem()}"
                )
            if now >= say_at:
                say_at = now + _SAY_S
                if (problem := service.problem()) != told:
                    told = problem
                    left = f"{limit - now:.0f} s more"
                    self._spec.say(f"not in a group yet, and waits for {left}: {told}")
            if now >= look:
                look = now + _LOOK_S
                self._resolve_again(service, endpoints)
            self._sleep(min(limit, look) - now)
        return True

    def _resolve_again(self, service: HostService, endpoints: list[Endpoint]) -> None:
        unknown = [i for i, e in enumerate(endpoints) if e.address is None]
        for index in unknown:
            endpoints[index] = resolve(endpoints[index].host, endpoints[index].port)
        if unknown:
            service.resolved(list(endpoints))

    def _sleep(self, seconds: float) -> None:
        if readable(self._wakeup, timeout=seconds):
            os.eventfd_read(self._wakeup)

    def _wake(self) -> None:
        os.eventfd_write(self._wakeup, 1)

    def _started(self) -> HostService:
        if self._service is None:
            raise ValueError("the group was not started")
        return self._service
