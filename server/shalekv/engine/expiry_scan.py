"""Looks through SSTs for values that have expired: those that the writer does not keep in mind.

An SST is read only if it may hold such values by now: the manifest tells when the first of its
values expires, and what it held when it was read last is remembered. What is found here is a
candidate only: a newer version may stand elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain

import structlog

from shalekv.clock import Clock
from shalekv.core.tree import Tree
from shalekv.errors import ObjectNotFound
from shalekv.format.columns import Columns
from shalekv.format.section import Section
from shalekv.protocol.entry import NO_EXPIRY, Kind
from shalekv.protocol.expiring import ExpiringValues
from shalekv.protocol.sst_table import SstInfo
from shalekv.read.sst_reader import OpenSst
from shalekv.read.version import HeldTree
from shalekv.read.version_set import TreeKeeper

READ_BYTES = 1 << 20  # with one request
NEVER_MS = 2**64 - 1  # no time
_MS_PER_S = 1_000

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Seen:
    """What an SST held when it was read."""

    through_seq: int  # what is newer was kept in mind then, and was not looked for
    due_ms: int  # when the next of its values expires


class ExpiryScan:
    """The scans of one writer, one after the other."""

    def __init__(
        self,
        levels: TreeKeeper,
        values: ExpiringValues,
        clock: Clock,
        *,
        bytes_per_s: int,
        now_ms: Callable[[], int],
    ) -> None:
        """`values` are kept in mind; `now_ms` is logical time."""
        self._levels = levels
        self._values = values
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._now_ms = now_ms
        self._seen: dict[bytes, _Seen] = {}

    async def expired(self) -> AsyncGenerator[Sequence[bytes], None]:
        """Keys with a version that has expired, some at once, until all SSTs are looked through.

        The blocks that they stand in are cached: whoever looks for the newest versions finds these
        there. Raises `CorruptObject` and `StoreUnavailable`.
        """
        through_seq, now_ms = self._values.through_seq, self._now_ms()
        done: set[bytes] = set()
        while True:
            held = self._levels.current.base  # anew each time: an older one would keep garbage
            infos = [*ssts(held.tree)]
            self._seen = {i.id: self._seen[i.id] for i in infos if i.id in self._seen}
            info = next(
                (i for i in infos if i.id not in done and self._is_due(i, through_seq, now_ms)),
                None,
            )
            if info is None:
                return
            done.add(info.id)
            due_ms = NEVER_MS
            try:
                async with aclosing(self._read(held, info)) as blocks:
                    async for columns in blocks:
                        keys, next_ms = _expired(columns, through_seq, now_ms)
                        due_ms = min(due_ms, next_ms)
                        if keys:
                            yield keys
            except ObjectNotFound as missing:  # this process was stopped for long: the next time
                log.warning("an SST could not be looked through", error=str(missing))
                continue
            self._seen[info.id] = _Seen(through_seq, due_ms)

    def _is_due(self, info: SstInfo, through_seq: int, now_ms: int) -> bool:
        if info.min_seq > through_seq:
            return False  # all of it is kept in mind
        if not NO_EXPIRY < info.first_expiry_ms <= now_ms:
            return False
        seen = self._seen.get(info.id)
        if seen is None or (seen.through_seq < through_seq and info.max_seq > seen.through_seq):
            return True
        return seen.due_ms <= now_ms

    async def _read(self, held: HeldTree, info: SstInfo) -> AsyncGenerator[Columns, None]:
        opened = await held.ssts.metadata(info)  # with the filter: what is found is looked up
        for numbers in _groups(opened):
            fetched = await held.ssts.fetch(opened, numbers, keep=True)
            for number in numbers:
                yield fetched.block(number).columns()
                await self._clock.sleep_ms(0)
            size_bytes = sum(opened.index[number].length for number in numbers)
            await self._clock.sleep_ms(_MS_PER_S * size_bytes / self._bytes_per_s)


def ssts(tree: Tree) -> Iterator[SstInfo]:
    """Those that hold keys of clients."""
    return chain(tree.l0, *(run.ssts for run in tree.runs))


def _groups(opened: OpenSst) -> Iterator[range]:
    """The blocks of points, some that stand together at once."""
    blocks = opened.index.blocks_of(Section.POINTS)
    start, size_bytes = blocks.start, 0
    for number in blocks:
        length = opened.index[number].length
        if number > start and size_bytes + length > READ_BYTES:
            yield range(start, number)
            start, size_bytes = number, 0
        size_bytes += length
    if start < blocks.stop:
        yield range(start, blocks.stop)


def _expired(columns: Columns, through_seq: int, now_ms: int) -> tuple[list[bytes], int]:
    """The keys of values that have expired, and when the next of the others does."""
    keys, seqs, kinds, _, expire_at_ms = columns
    if not any(expire_at_ms):
        return [], NEVER_MS
    rows = [
        row
        for row, at_ms in enumerate(expire_at_ms)
        if at_ms != NO_EXPIRY and kinds[row] == Kind.PUT and seqs[row] <= through_seq
    ]
    due_ms = min((at for row in rows if (at := expire_at_ms[row]) > now_ms), default=NEVER_MS)
    return [keys[row] for row in rows if expire_at_ms[row] <= now_ms], due_ms
