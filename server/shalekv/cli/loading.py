"""Writes batches with a few in flight, and keeps account of what is stored for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shalekv.cli.tsv import BadRow, Rows
from shalekv_client import Client, Durability, NotApplied, ShaleKVError


@dataclass(slots=True)
class Account:
    """What a load has done so far."""

    rows: int = 0  # acknowledged
    bytes: int = 0  # of acknowledged keys and values
    source_bytes: int = 0  # of the lines of acknowledged rows
    refused: list[tuple[Rows, ShaleKVError]] = field(default_factory=list)  # not applied
    unknown: list[tuple[Rows, ShaleKVError]] = field(default_factory=list)  # perhaps applied
    cancelled_rows: int = 0  # given up while they were under way
    bad_row: BadRow | None = None
    _acknowledged: dict[int, int] = field(default_factory=dict)  # first line -> last line
    _stored_line: int = 0

    @property
    def stored_line(self) -> int:
        """All lines from the first to this one are stored for certain; 0: none is."""
        return self._stored_line

    @property
    def rows_beyond(self) -> int:
        """Rows after `stored_line` that are stored as well."""
        return sum(last - first + 1 for first, last in self._acknowledged.items())

    @property
    def unknown_rows(self) -> int:
        """Rows that may be stored or not."""
        return self.cancelled_rows + sum(len(rows.batch) for rows, _ in self.unknown)

    @property
    def is_good(self) -> bool:
        """Whether nothing has failed."""
        return not (self.refused or self.unknown or self.bad_row)

    def failures(self) -> list[tuple[Rows, ShaleKVError]]:
        """What was not acknowledged, by line."""
        return sorted(self.refused + self.unknown, key=lambda failure: failure[0].first_line)

    def acknowledge(self, rows: Rows) -> None:
        """These rows are stored."""
        self.rows += len(rows.batch)
        self.bytes += rows.batch.size_bytes
        self.source_bytes += rows.source_bytes
        self._acknowledged[rows.first_line] = rows.last_line
        while self._stored_line + 1 in self._acknowledged:
            self._stored_line = self._acknowledged.pop(self._stored_line + 1)


class Loader:
    """Sends batches in order, up to `in_flight_max` at once, until one fails."""

    def __init__(
        self,
        client: Client,
        account: Account,
        *,
        durability: Durability,
        in_flight_max: int,
        progress: Callable[[Account], None],
    ) -> None:
        """`progress` is called after every acknowledgement."""
        self._client = client
        self._account = account
        self._durability = durability
        self._in_flight_max = in_flight_max
        self._progress = progress
        self._in_flight: dict[asyncio.Task[None], frozenset[bytes]] = {}

    async def load(self, batches: Iterator[Rows]) -> None:
        """Send all batches; after a failure no more, but those under way come to their end."""
        async with asyncio.TaskGroup() as tasks:
            while rows := await self._next(batches):
                keys = rows.keys()
                await self._make_room(keys)
                if not self._account.is_good:
                    break
                task = tasks.create_task(self._send(rows))
                self._in_flight[task] = keys
                task.add_done_callback(self._in_flight.pop)

    async def _next(self, batches: Iterator[Rows]) -> Rows | None:
        try:
            # In a thread: standard input may keep us waiting, and replies must not wait with us.
            return await asyncio.to_thread(next, batches, None)
        except BadRow as bad:
            self._account.bad_row = bad
            return None

    async def _make_room(self, keys: frozenset[bytes]) -> None:
        """Wait until another batch may be sent.

        A batch that sets a key of one in flight waits for that one, so that the last row of a key
        wins whatever happens on the way.
        """
        while len(self._in_flight) >= self._in_flight_max:
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
        rivals = [task for task, theirs in self._in_flight.items() if not keys.isdisjoint(theirs)]
        if rivals:
            await asyncio.wait(rivals)

    async def _send(self, rows: Rows) -> None:
        try:
            await self._client.write(rows.batch, durability=self._durability)
        except NotApplied as error:
            self._account.refused.append((rows, error))
        except ShaleKVError as error:
            self._account.unknown.append((rows, error))
        except asyncio.CancelledError:
            self._account.cancelled_rows += len(rows.batch)
            raise
        else:
            self._account.acknowledge(rows)
            self._progress(self._account)
