"""Reads what ranks on several hosts load alike once: one rank reads each chunk, and passes it on.

From the rank that has read it, a chunk goes to one rank of each other host, in a tree of the hosts,
and within a host from rank to rank. The next chunk is read by a rank of the next host. So storage
gives each byte once, each host receives it once, and all have an equal share. A rank passes on what
has arrived before it verifies it, and reads its own next chunks meanwhile.

Why no rank waits forever: all take the chunks in the same order. A chunk comes from a rank that has
it, or that waits for it likewise, up to the one that reads it; a send ends when its receiver comes
to that chunk, and waits for earlier ones only. A rank with an error of its own goes on passing
chunks, marks those that it has not read (all further ones), and raises at the end.

A group that takes no tensors in CPU memory (NCCL) broadcasts each chunk instead, if all its ranks
load the same: sends between two ranks would make a communicator for each pair, and wait for each
other in one queue. Else each rank reads all.

What has arrived damaged is read from storage by the rank that has found it: the network decides
nothing about a checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from outlast.async_checkpoint.restore.load import Batch, Read
from outlast.async_checkpoint.restore.verified_read import (
    Chunk,
    Piece,
    Source,
    default_threads,
    distribute,
    extent_of,
    is_intact,
    opened,
    pieces_by_chunk,
    read_chunk,
)
from outlast.async_checkpoint.storage.manifest import sections_of
from outlast.async_checkpoint.storage.system_errors import Reopened
from outlast.coordination.agreement import Agreement
from outlast.coordination.collectives import device_of, global_rank
from outlast.coordination.waits import waits
from outlast.errors import CheckpointError
from outlast.system.shared_memory import memory_at

log = logging.getLogger("outlast.checkpoint")

_LEAST_BYTES = 4 << 20
"""Less is read by each rank."""
_SENDING = 4  # chunks, at most

Plan = list[list[Chunk]]
"""The chunks of each batch of a load, in the order in which they are passed on."""


def plan_of(batches: Iterable[Batch]) -> tuple[Plan, str]:
    """The plan of a load, and its digest, which is empty if there is too little to share."""
    plan, size_bytes = list[list[Chunk]](), 0
    for batch in batches:
        pieces = [Piece(*extent, 0, None) for extent in batch.extents]
        plan.append(sorted(pieces_by_chunk(batch.source, pieces)))
        size_bytes += sum(each.size_bytes for each in pieces)
    if size_bytes < _LEAST_BYTES:
        return [], ""
    return plan, xxhash.xxh3_128_hexdigest(msgspec.json.encode(plan))


def sharers(
    loads: Sequence[tuple[str, str]], *, is_cached: bool = True, only_all: bool = False
) -> dict[str, list[list[int]]]:
    """The ranks that share their reads, by host, under the digest of what they load; `loads` are
    host and digest of each rank. Ranks of one host do not if its page cache has what they read; if
    `only_all`, ranks of which others load something else do not.
    """
    fewest_hosts, fewest = 2 if is_cached else 1, len(loads) if only_all else 2
    found: dict[str, dict[str, list[int]]] = {}
    for rank, (host, digest) in enumerate(loads):
        if digest:
            found.setdefault(digest, {}).setdefault(host, []).append(rank)
    by_host = {digest: list(hosts.values()) for digest, hosts in found.items()}
    return {
        digest: hosts
        for digest, hosts in by_host.items()
        if len(hosts) >= fewest_hosts and sum(map(len, hosts)) >= fewest
    }


def broadcasts(group: Any) -> bool:
    """Whether chunks are passed on by broadcasts of all ranks of this group."""
    return device_of(group).type != "cpu"


class Routes:
    """The ways of all chunks through `rank`, one of those on these hosts."""

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int) -> None:
        self._hosts = hosts
        # From chunk to chunk, another host's turn.
        self._readers = sorted(
            ((place, host) for host, ranks in enumerate(hosts) for place in range(len(ranks)))
        )
        ((self._host, self._place),) = [
            (host, ranks.index(rank)) for host, ranks in enumerate(hosts) if rank in ranks
        ]

    def _turn(self, number: int) -> tuple[int, int]:
        return self._readers[number % len(self._readers)]

    def broadcast(self, number: int) -> tuple[int | None, list[int]]:
        """As `route`, if the rank that reads a chunk sends it to all others at once."""
        place, host = self._turn(number)
        reader = self._hosts[host][place]
        return (None, [reader]) if (host, place) == (self._host, self._place) else (reader, [])

    def route(self, number: int) -> tuple[int | None, list[int]]:
        """From whom this rank gets the chunk with this number (`None`: it reads it), and to whom it
        passes it on.
        """
        hosts, (place, root) = self._hosts, self._turn(number)

        def first_on(node: int) -> int:
            ranks = hosts[(root + node) % len(hosts)]
            return ranks[place % len(ranks)]

        node, ranks = (self._host - root) % len(hosts), hosts[self._host]
        before = (self._place - place) % len(ranks)  # how many ranks of the host have it earlier
        behind = [ranks[(self._place + 1) % len(ranks)]] if before + 1 < len(ranks) else []
        if before:
            return ranks[self._place - 1], behind
        children = [each for each in (2 * node + 1, 2 * node + 2) if each < len(hosts)]
        return first_on((node - 1) // 2) if node else None, [*map(first_on, children), *behind]


class _Missing(Exception):
    """Another rank could not read a chunk."""


class SharedRead:
    """One rank's part in the reads that it shares with the ranks on these hosts, over `group`, as
    long as `ranks` wait.
    """

    def __init__(
        self, hosts: Sequence[Sequence[int]], plan: Plan, ranks: Agreement, group: Any
    ) -> None:
        self._left, self._group, self._device = deque(plan), group, device_of(group)
        self._broadcasts, routes = broadcasts(group), Routes(hosts, ranks.rank)
        self._route = routes.broadcast if self._broadcasts else routes.route
        self._timeout = datetime.timedelta(seconds=ranks.timeout_s)
        self._error: Exception | None = None  # the first one
        self._over = False  # the load has failed: nothing more is read
        self._in_batch = False  # other ranks wait for its chunks

    def load(self, source: Source, work: Callable[[Read], None]) -> bool:
        """Calls `work` with what reads each batch of the plan, as `read_verified` does. If it
        raises, the other ranks go on with theirs; but not after an error of the group. Returns
        whether all has arrived: if another rank has not read a chunk, that one raises.
        """
        try:
            work(self._read_batch)
        except Exception as e:
            self._over = True
            while self._left and not self._in_batch:
                for _ in self._arrivals(source, self._left.popleft()):
                    pass
            if not isinstance(e, _Missing):
                raise
            return False
        return True

    def _read_batch(self, source: Source, wanted: Sequence[Piece]) -> None:
        pieces = pieces_by_chunk(source, wanted)
        for chunk, content in self._arrivals(source, self._left.popleft()):
            begin, size = extent_of(source, chunk)
            distribute(content.data_ptr(), begin, begin + size, pieces[chunk])
            del pieces[chunk]
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if pieces:
            raise _Missing

    def _arrivals(
        self, source: Source, chunks: Sequence[Chunk]
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """All chunks in their order, verified; not those that their rank could not read."""
        routes = [self._route(number) for number in range(len(chunks))]
        ahead = 1 if self._broadcasts else 2  # broadcasts begin in the same order on all ranks
        own = [chunk for chunk, (sender, _) in zip(chunks, routes, strict=True) if sender is None]
        arriving: deque[Callable[[], torch.Tensor]] = deque()
        sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._in_batch = True
        with self._reading(source, own) as read:
            for number, (chunk, (sender, receivers)) in enumerate(zip(chunks, routes, strict=True)):
                while number + len(arriving) < min(number + ahead, len(chunks)):
                    # The next one arrives while this one is verified.
                    after = number + len(arriving)
                    before, size = routes[after][0], extent_of(source, chunks[after])[1]
                    arriving.append(read if before is None else self._receive(before, size))
                content = arriving.popleft()()
                sending += [(self._send(content, to), content) for to in receivers]
                while len(sending) > _SENDING:
                    self._await(sending.popleft()[0])
                content = content.cpu()
                if self._is_right(source, chunk, content, is_read=sender is None):
                    yield chunk, content
            for work, _ in sending:
                self._await(work)
        self._in_batch = False

    def _is_right(
        self, source: Source, chunk: Chunk, content: torch.Tensor, *, is_read: bool
    ) -> bool:
        """Whether this is the chunk. One that was damaged on the way is read."""
        arrived = memory_at(content.data_ptr(), content.numel() - 1)
        if is_read or is_intact(source, chunk, xxhash.xxh3_128(arrived).hexdigest()):
            return not is_read or bool(content[-1])
        if content[-1] and not self._over:
            where = source.where, chunk[0]
            log.warning("a part of %s/%s arrived damaged: it is read again", *where)
            with self._reading(source, [chunk]) as read:
                content.copy_(read())
            return bool(content[-1])
        self._over = True
        return False

    @contextlib.contextmanager
    def _reading(
        self, source: Source, chunks: Sequence[Chunk]
    ) -> Iterator[Callable[[], torch.Tensor]]:
        """Returns the next one of these chunks at each call; some are read ahead."""
        threads, left = default_threads(), iter(chunks)
        readers: dict[str, Reopened] = {}

        def work(chunk: Chunk) -> torch.Tensor:
            """With a byte behind it that says whether it could be read."""
            size = extent_of(source, chunk)[1]
            content = torch.zeros(size + 1, dtype=torch.uint8)
            try:
                if chunk[0] in readers and not self._over:
                    into = partial(sections_of, memory_at(content.data_ptr(), size))
                    read_chunk(source, readers[chunk[0]], chunk, into)
                    content[-1] = 1
            except (CheckpointError, OSError) as e:
                self._fail(e)
            return content

        with contextlib.ExitStack() as stack:
            for name in {name for name, _ in chunks}:
                try:
                    readers[name] = stack.enter_context(opened(source, name))
                except (CheckpointError, OSError) as e:
                    self._fail(e)
            pool = stack.enter_context(ThreadPoolExecutor(threads, "outlast-read"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            ahead = deque(pool.submit(work, each) for each in itertools.islice(left, threads))

            def read() -> torch.Tensor:
                content = ahead.popleft().result()
                ahead.extend(pool.submit(work, each) for each in itertools.islice(left, 1))
                return content.to(self._device)

            yield read

    def _fail(self, error: Exception) -> None:
        self._error, self._over = self._error or error, True

    def _receive(self, sender: int, size: int) -> Callable[[], torch.Tensor]:
        content = torch.empty(size + 1, dtype=torch.uint8, device=self._device)
        work: Any = (
            self._send(content, sender)
            if self._broadcasts
            else dist.irecv(content, global_rank(self._group, sender), group=self._group)
        )

        def received() -> torch.Tensor:
            self._await(work)
            return content

        return received

    def _send(self, content: torch.Tensor, to: int) -> Any:
        """Or, in a broadcast, what this rank or another one sends."""
        if self._broadcasts:
            return dist.broadcast(
                content, global_rank(self._group, to), group=self._group, async_op=True
            )
        return dist.isend(content, global_rank(self._group, to), group=self._group)

    def _await(self, work: Any) -> None:
        with waits():
            work.wait(self._timeout)
