"""Sends a frozen state from the ranks that have it to those that need it.

The bytes of all tensors are cut into parcels of some MiB. A receiver gets them from several ranks
at once, if there are enough. Otherwise it is sent in rounds: a rank that has received it sends it
on, so that a state that one rank has reaches N ranks in log2(N) rounds.

The sender's checksums follow the parcels, and the receiver compares them with its own. On one host,
the receiver reads the sender's memory instead (`same_host`).
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from outlast.coordination.collectives import device_of, global_rank
from outlast.elastic.job.encoding import load_shapes
from outlast.elastic.job.live.frozen import Frozen
from outlast.elastic.job.live.same_host import OwnersMemory, lent, reader
from outlast.elastic.tensors import bytes_of, memory_of

log = logging.getLogger("outlast.elastic")

_PARCEL_BYTES = 8 << 20
_MOST_SOURCES = 4  # of one receiver: its network is busy then

Shapes = Sequence[tuple[str, tuple[int, ...]]]
Piece = tuple[int, int, int]  # the number of a tensor, its first byte, the byte after the last


class TransferFailed(Exception):
    """What has arrived is not what was sent."""


def rounds(sources: Mapping[int, Sequence[int]]) -> Iterator[dict[int, list[int]]]:
    """Which ranks send to which receiver, round after round."""
    have = {rank: list(found) for rank, found in sources.items()}
    left = sorted(have)
    while left:
        free = {rank for rank in left for rank in have[rank]}
        now: dict[int, list[int]] = {}
        for number, receiver in enumerate(left):
            usable = [rank for rank in have[receiver] if rank in free]
            waiting = sum(1 for each in left[number:] if set(have[each]) & free)
            share = max(1, len(usable) // max(waiting, 1))
            chosen = usable[: min(share, _MOST_SOURCES)]
            if chosen:
                now[receiver] = chosen
                free -= set(chosen)
        yield now
        for receiver in now:
            for other in left:
                if other not in now and have[other][:1] == have[receiver][:1]:
                    have[other].append(receiver)
        left = [rank for rank in left if rank not in now]


class Exchange:
    """One rank's part in a transfer, over a process group; `rank` is that in the group."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._rank = group, rank

    @functools.cached_property
    def _device(self) -> torch.device:
        """On which the group sends: that of the tensors, or the CPU. One rank may have no group."""
        return device_of(self._group)

    def run(
        self, sources: Mapping[int, Sequence[int]], frozen: Frozen | None
    ) -> tuple[bytes, list[torch.Tensor]] | None:
        """Sends what this rank has, and receives what it lacks: the header and the tensors; `None`
        if it lacks nothing. Called on all ranks with the same `sources`. A rank that has received
        damaged bytes raises `TransferFailed` once it has taken its part in the whole transfer.
        """
        mine: tuple[bytes, list[torch.Tensor]] | None = None  # pickled only if a rank lacks it
        received, damaged = False, list[int]()
        for now in rounds(sources):
            if self._rank in now:
                mine, bad = self._receive(now[self._rank])
                damaged, received = damaged + bad, True
                continue
            sends = [(to, senders) for to, senders in now.items() if self._rank in senders]
            if sends and mine is None and frozen is not None:
                mine = frozen.header(), list(frozen.leaves)
            for receiver, senders in sends:
                if mine is not None:
                    self._send(receiver, senders, *mine)
        if damaged:
            raise TransferFailed(f"the state that rank {damaged[0]} sent arrived damaged")
        return mine if received else None

    def move(self, moves: Sequence[tuple[int, int, bytes | None]]) -> bytes | None:
        """Sends the own states of ranks to the processes that have these ranks now. `moves` are
        sender, receiver, and the content, if this rank is the sender. All ranks call this.
        """
        found: bytes | None = None
        for sender, receiver, content in moves:
            if content is not None:
                self._send_bytes(content, receiver)
            elif self._rank == receiver:
                found = self._receive_bytes(sender)
        return found

    def share(self, states: Sequence[tuple[int, bytes | None]]) -> list[bytes]:
        """Gives all ranks the own states that single ranks have: the holder of each, and on that
        the content. All ranks call this.
        """
        found: list[bytes] = []
        for holder, content in states:
            size = torch.tensor([len(content or b"")], device=self._device)
            data = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
            if dist.is_initialized():
                dist.broadcast(size, global_rank(self._group, holder), group=self._group)
                data = data.to(self._device) if content else size.new_empty(int(size)).byte()
                dist.broadcast(data, global_rank(self._group, holder), group=self._group)
            found.append(data.cpu().numpy().tobytes())
        return found

    def _send_bytes(self, content: bytes, to: int) -> None:
        self._send_tensor(torch.tensor([len(content)]), to)
        self._send_tensor(torch.frombuffer(bytearray(content), dtype=torch.uint8), to)

    def _receive_bytes(self, sender: int) -> bytes:
        size = int(self._receive_tensor(1, torch.int64, sender))
        return self._receive_tensor(size, torch.uint8, sender).numpy().tobytes()

    def _send_tensor(self, tensor: torch.Tensor, to: int) -> None:
        dist.send(tensor.to(self._device), global_rank(self._group, to), group=self._group)

    def _receive_tensor(self, size: int, dtype: torch.dtype, sender: int) -> torch.Tensor:
        """On the CPU."""
        tensor = torch.zeros(size, dtype=dtype, device=self._device)
        dist.recv(tensor, global_rank(self._group, sender), group=self._group)
        return tensor.cpu()

    def _send(
        self, to: int, senders: Sequence[int], header: bytes, leaves: Sequence[torch.Tensor]
    ) -> None:
        place = senders.index(self._rank)
        if place == 0:
            self._send_bytes(header, to)
        views = [bytes_of(leaf) for leaf in leaves]
        with lent(views, self._receive_tensor(2, torch.int64, to).tolist()) as told:
            self._send_tensor(torch.tensor([*told, *[0] * (len(views) + 4 - len(told))]), to)
            if self._receive_tensor(1, torch.int64, to).item():
                return
        checksums: list[int] = []
        sending: deque[tuple[torch.Tensor, Any]] = deque()  # at most two
        for parcel in islice(parcels_of(load_shapes(header)), place, None, len(senders)):
            content = gathered(views, parcel).to(self._device)
            sending.append(
                (content, dist.isend(content, global_rank(self._group, to), group=self._group))
            )
            checksums.append(checksum_of(content))
            if len(sending) > 1:
                sending.popleft()[1].wait()
        for _, work in sending:
            work.wait()
        self._send_tensor(torch.tensor([*checksums, 0]), to)

    def _receive(
        self, senders: Sequence[int]
    ) -> tuple[tuple[bytes, list[torch.Tensor]], list[int]]:
        """The header and the tensors, and the senders whose checksums differ."""
        header = self._receive_bytes(senders[0])
        shapes = load_shapes(header)
        leaves = [torch.empty(shape, dtype=getattr(torch, name)) for name, shape in shapes]
        views = [bytes_of(leaf) for leaf in leaves]
        lanes = [
            (rank, parcels)
            for place, rank in enumerate(senders)
            if not self._read_memory(
                rank, views, parcels := list(islice(parcels_of(shapes), place, None, len(senders)))
            )
        ]
        checksums: dict[int, list[int]] = {rank: [] for rank in senders}
        arriving: deque[tuple[int, list[Piece], torch.Tensor, Any]] = deque()

        def check_one() -> None:
            rank, parcel, into, work = arriving.popleft()
            work.wait()
            scatter(views, parcel, into)
            checksums[rank].append(checksum_of(into))

        for number in range(max((len(parcels) for _, parcels in lanes), default=0)):
            # The next parcel of each sender arrives while this one is checked.
            for rank, parcels in lanes:
                if number < len(parcels):
                    into = gathered(views, parcels[number]).to(self._device)
                    work = dist.irecv(into, global_rank(self._group, rank), group=self._group)
                    arriving.append((rank, parcels[number], into, work))
                if len(arriving) > len(lanes):
                    check_one()
        while arriving:
            check_one()
        sent = {r: self._receive_tensor(len(p) + 1, torch.int64, r).tolist() for r, p in lanes}
        damaged = [rank for rank, found in sent.items() if found != [*checksums[rank], 0]]
        return (header, leaves), damaged

    def _read_memory(
        self, sender: int, views: Sequence[torch.Tensor], parcels: Sequence[Sequence[Piece]]
    ) -> bool:
        """Reads the parcels from the sender's memory, if it is on this host."""
        self._send_tensor(torch.tensor(reader()), sender)
        told = self._receive_tensor(len(views) + 4, torch.int64, sender).tolist()
        try:
            memory = OwnersMemory(told)
            memory.read(
                [
                    (views[number][at:end], memory.addresses[number] + at)
                    for parcel in parcels
                    for number, at, end in parcel
                ]
            )
        except OSError as e:
            log.debug("the memory of rank %d is not read: %s", sender, e)
            memory = None
        self._send_tensor(torch.tensor([int(memory is not None)]), sender)
        return memory is not None


def parcels_of(shapes: Shapes) -> Iterator[list[Piece]]:
    """Cuts all tensors' bytes into parcels: small ones together, large ones in parts, in place."""
    parcel: list[Piece] = []
    room = _PARCEL_BYTES
    for number, (name, shape) in enumerate(shapes):
        size, at = torch.Size(shape).numel() * getattr(torch, name).itemsize, 0
        is_large = size > _PARCEL_BYTES // 8
        if parcel and (is_large or size > room):
            yield parcel
            parcel, room = [], _PARCEL_BYTES
        while at < size:
            end = min(at + room, size)
            parcel.append((number, at, end))
            room -= end - at
            at = end
            if is_large:
                yield parcel
                parcel, room = [], _PARCEL_BYTES
    if parcel:
        yield parcel


def gathered(views: Sequence[torch.Tensor], parcel: Sequence[Piece]) -> torch.Tensor:
    """The bytes of a parcel: a view if it is a part of one tensor."""
    pieces = [views[number][at:end] for number, at, end in parcel]
    if len({piece.device for piece in pieces}) > 1:  # some optimizers count steps on the CPU
        pieces = [piece.cpu() for piece in pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def scatter(views: Sequence[torch.Tensor], parcel: Sequence[Piece], content: torch.Tensor) -> None:
    """Does nothing with what was received in place."""
    at = 0
    for number, begin, end in parcel:
        view, piece = views[number][begin:end], content[at : at + end - begin]
        if (view.device, view.data_ptr()) != (piece.device, piece.data_ptr()):
            view.copy_(piece)
        at += end - begin


def checksum_of(content: torch.Tensor) -> int:
    """Of the bytes, as a signed number of 64 bits."""
    content = content.cpu()
    value = xxhash.xxh3_64_intdigest(memory_of(content))
    return value - (1 << 64) if value >= 1 << 63 else value
